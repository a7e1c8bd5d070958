"""`GptOssForCausalLM`: vLLM's own model with a fused path for steps of few tokens.

The class keeps upstream's name, modules, weight names and loader, so LoRA, EAGLE3, pipeline parallelism and every
quantization stay upstream's. Only `forward` differs: a step of at most `few_tokens.MAX_TOKENS` tokens goes to
`FewTokens` when that path can serve it, everything else to upstream's compiled model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.gpt_oss import GptOssForCausalLM as UpstreamGptOssForCausalLM

from vllm_gptoss import announce, choose, device
from vllm_gptoss.checkpoint.load import LoadCheck
from vllm_gptoss.model import few_tokens
from vllm_gptoss.settings import Settings, SettingsError

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig


class GptOssForCausalLM(UpstreamGptOssForCausalLM):
    """gpt-oss as vLLM builds it; registered under the same architecture name."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.load_check = LoadCheck(vllm_config)
        choice = _choose(self, vllm_config)
        self.few_tokens = few_tokens.FewTokens(self, vllm_config) if choice.value == "gptoss" else None
        announce.note("layers", choice)
        announce.note("attention", announce.attention_of(self, vllm_config))
        if self.few_tokens is not None:
            from vllm_gptoss.attention import sm90

            sm90.plan_once(self)
        announce.note("KV cache", choose.kv_cache_dtype(device.detect(), vllm_config.cache_config.cache_dtype))
        announce.say()

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Hidden states [T, C] bf16 (or intermediate tensors, or with EAGLE3's auxiliary states), as upstream."""
        if self.few_tokens is not None and self.few_tokens.takes(positions.shape[0]):
            return self.few_tokens(input_ids, positions, intermediate_tensors, inputs_embeds)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads as upstream does; a missing, cut or wrongly shaped tensor is a `CheckpointError` with its name."""
        loaded: set[str] = super().load_weights(self.load_check(weights))
        return loaded


def _choose(model: Any, config: Any) -> choose.Choice[str]:
    """`gptoss` for the fused path, `upstream` otherwise.

    Raises:
        SettingsError: `layers=gptoss` was asked for where it cannot run.
    """
    wish = Settings.load(config.additional_config).layers
    if wish == "upstream":
        return choose.Choice("upstream", "asked for")
    if why := few_tokens.obstacle(model, config):
        if wish == "gptoss":
            raise SettingsError(f"layers=gptoss cannot run here: {why}; use layers=auto")
        return choose.Choice("upstream", why)
    if wish == "auto" and (why := _never_run(config)):
        return choose.Choice("upstream", f"never run by us with {why}; layers=gptoss tries it")
    return choose.Choice("gptoss", f"fused kernels for steps of up to {few_tokens.MAX_TOKENS} tokens")


def _never_run(config: Any) -> str | None:
    """What of this configuration the fused path was written for but has not been run with on a GPU."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size > 2 or parallel.pipeline_parallel_size > 1:
        return "more than two GPUs, or a pipeline"
    if config.speculative_config is not None and config.speculative_config.method not in ("ngram", "eagle3"):
        return f"drafts by {config.speculative_config.method}"
    return None
