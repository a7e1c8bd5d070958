"""Fewer CUDA graphs: only where the plugin's layers and runner use them, and never instead of what a user set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.config.vllm import OptimizationLevel

from tests.support.vllm_configs import MODEL, THREE_DRAFTS, compilation, config, parallel, transfer
from vllm_gptoss._vllm import runner
from vllm_gptoss.engine.choose import graph_sizes

pytestmark = pytest.mark.vllm

EAGER = SimpleNamespace(**vars(MODEL) | {"enforce_eager": True})


def chosen(monkeypatch: pytest.MonkeyPatch, architecture: str = "sm90", **changes: Any) -> list[int] | None:
    monkeypatch.setattr(runner, "gpu_architecture", lambda: architecture)
    model = SimpleNamespace(**vars(MODEL), enforce_eager=False)
    device = SimpleNamespace(device_type="cuda")
    given = {"model_config": model, "device_config": device, "compilation_config": compilation(), **changes}
    return graph_sizes.chosen(config(**given))


def test_a_plain_server_captures_fewer_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = chosen(monkeypatch, scheduler_config=SimpleNamespace(max_num_seqs=1024, max_num_batched_tokens=8192))
    assert sizes is not None
    assert len(sizes) == 58
    mode = compilation(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    assert chosen(monkeypatch, compilation_config=mode), "vLLM's own mode"


def test_more_gpus_have_fewer_sizes_where_layers_and_runner_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, parallel_config=parallel(tensor_parallel_size=2)), "measured"
    four, asked = {"parallel_config": parallel(tensor_parallel_size=4)}, {"layers": "gptoss", "host": "gptoss"}
    for wishes, fewer in (({}, False), ({"layers": "gptoss"}, False), (asked, True)):
        assert bool(chosen(monkeypatch, additional_config={"gptoss": wishes}, **four)) == fewer, wishes
    given = {"additional_config": {"gptoss": asked}, "speculative_config": THREE_DRAFTS}
    assert chosen(monkeypatch, **given, **four) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "sm100"},
        {"architecture": ""},
        {"compilation_config": compilation(cudagraph_capture_sizes=[1, 2])},
        {"compilation_config": compilation(max_cudagraph_capture_size=64)},
        {"compilation_config": compilation(cudagraph_mode=CUDAGraphMode.PIECEWISE)},
        {"compilation_config": compilation(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)},
        {"optimization_level": OptimizationLevel.O1},
        {"performance_mode": "interactivity"},
        {"model_config": EAGER},
        {"speculative_config": THREE_DRAFTS},
        {"lora_config": SimpleNamespace()},
        {"parallel_config": parallel(tensor_parallel_size=4)},
        {"kv_transfer_config": transfer("ExampleConnector")},
        {"additional_config": {"gptoss": {"layers": "upstream"}}},
    ],
    ids=",".join,
)
def test_vllms_sizes_stay(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    assert chosen(monkeypatch, **changes) is None
