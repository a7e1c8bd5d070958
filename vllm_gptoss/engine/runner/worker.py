"""vLLM's GPU worker with our model runner, named in `parallel_config.worker_cls`."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class GptOssWorker(Worker):
    """As vLLM's; `_make_model_runner` is the hook that its subclasses override."""

    def _make_model_runner(self) -> Any:
        """Our runner where vLLM would have taken its Model Runner V2."""
        if not self.use_v2_model_runner or self.vllm_config.is_mm_encoder_only:
            return super()._make_model_runner()
        from vllm_gptoss.engine.runner.model_runner import GptOssModelRunner

        return GptOssModelRunner(self.vllm_config, self.device)
