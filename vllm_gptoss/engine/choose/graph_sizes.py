"""The sizes of the CUDA graphs that vLLM captures: fewer than its own, because each takes time at the start."""

from __future__ import annotations

from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import runner
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import bands
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.settings import Settings


def chosen(config: Any) -> list[int] | None:
    """The sizes for a `VllmConfig`. None leaves them to vLLM: the user set some, or vLLM's layers or runner run steps.

    Called in the API server, in which no GPU may be initialised.
    """
    if not runner.has_default_graphs(config):
        return None
    here, deployment = Device("nvidia", "", runner.gpu_architecture(), 0), describe.configuration(config)
    wished = Settings.load(config.additional_config)
    layers = choose.layers(here, deployment, wished.layers)
    host = "gptoss" if wished.host == "gptoss" and not deployment.drafts else "auto"
    if "upstream" in (layers.value, choose.runner(here, deployment, host).value):
        return None
    scheduling = config.scheduler_config
    sizes = bands.graph_sizes(scheduling.max_num_seqs, scheduling.max_num_batched_tokens)
    say = _vllm.init_logger("vllm.gptoss").info
    say("CUDA graphs of %d sizes are captured (GPTOSS_HOST=stock: vLLM's sizes)", len(sizes))
    return sizes
