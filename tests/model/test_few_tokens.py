"""When the fused path steps aside, and that it says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from vllm_gptoss.model import few_tokens, gpt_oss
from vllm_gptoss.settings import SettingsError


def config(**changes: Any) -> Any:
    """The fields of `VllmConfig` that are read, as a plain single-GPU server has them."""
    parallel = {
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "enable_expert_parallel": False,
        "decode_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    fields: dict[str, Any] = {
        "additional_config": {},
        "lora_config": None,
        "speculative_config": None,
        "kv_transfer_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "compilation_config": SimpleNamespace(mode=3, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        "device_config": SimpleNamespace(device_type="cpu"),
        "parallel_config": SimpleNamespace(**{**parallel, **changes.pop("parallel", {})}),
    }
    return SimpleNamespace(**{**fields, **changes})


def test_a_cpu_keeps_upstreams_layers_and_says_why() -> None:
    choice = gpt_oss._choose(None, config())
    assert (choice.value, choice.reason) == ("upstream", "the kernels are CUDA kernels")


def test_asking_for_the_path_where_it_cannot_run_is_an_error() -> None:
    with pytest.raises(SettingsError, match="layers=gptoss cannot run here: the kernels are CUDA kernels"):
        gpt_oss._choose(None, config(additional_config={"gptoss": {"layers": "gptoss"}}))


def test_upstream_can_be_asked_for() -> None:
    choice = gpt_oss._choose(None, config(additional_config={"gptoss": {"layers": "upstream"}}))
    assert (choice.value, choice.reason) == ("upstream", "asked for")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel": {"tensor_parallel_size": 4}}, "more than two GPUs, or a pipeline"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "more than two GPUs, or a pipeline"),
        ({"speculative_config": SimpleNamespace(method="draft_model")}, "drafts by draft_model"),
    ],
)
def test_what_was_never_run_is_only_done_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(few_tokens, "obstacle", lambda model, config: None)
    choice = gpt_oss._choose(None, config(**changes))
    assert choice.value == "upstream"
    assert choice.reason == f"never run by us with {why}; layers=gptoss tries it"
    assert (
        gpt_oss._choose(None, config(**changes, additional_config={"gptoss": {"layers": "gptoss"}})).value == "gptoss"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel": {"tensor_parallel_size": 2}},
        {"speculative_config": SimpleNamespace(method="ngram")},
        {"speculative_config": SimpleNamespace(method="eagle3")},
    ],
)
def test_what_was_run_on_a_gpu_is_the_default(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setattr(few_tokens, "obstacle", lambda model, config: None)
    assert gpt_oss._choose(None, config(**changes)).value == "gptoss"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_config": object()}, "LoRA is on"),
        ({"kv_transfer_config": object()}, "a KV connector is configured"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "the KV cache is not bfloat16"),
        ({"parallel": {"data_parallel_size": 2}}, "data parallelism is on"),
        ({"parallel": {"enable_expert_parallel": True}}, "expert parallelism is on"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode context parallelism is on"),
        ({"parallel": {"enable_dbo": True}}, "dual batch overlap is on"),
        (
            {"compilation_config": SimpleNamespace(mode=1, cudagraph_mode=CUDAGraphMode.FULL)},
            "the whole model is compiled by torch.compile",
        ),
        (
            {"compilation_config": SimpleNamespace(mode=3, cudagraph_mode=CUDAGraphMode.PIECEWISE)},
            "cudagraph_mode=PIECEWISE has no graph of a whole step",
        ),
    ],
)
def test_features_without_a_fused_path_are_named(changes: dict[str, Any], reason: str) -> None:
    assert few_tokens._feature_obstacle(config(**changes)) == reason


def test_a_plain_server_has_no_obstacle() -> None:
    assert few_tokens._feature_obstacle(config()) is None


def test_a_step_outside_the_engine_or_of_many_tokens_is_not_taken() -> None:
    path = few_tokens.FewTokens(SimpleNamespace(model=None), config())
    assert not path.takes(few_tokens.MAX_TOKENS + 1)
    assert not path.takes(1)  # there is no forward context here


def cache_of(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Any:
    attn = SimpleNamespace(kv_cache=torch.zeros(shape, dtype=dtype), num_heads=64, num_kv_heads=8)
    return SimpleNamespace(block=SimpleNamespace(attn=attn, head_dim=64))


def test_another_cache_layout_is_refused_not_read() -> None:
    assert few_tokens._cache_obstacle(cache_of((4, 8, 16, 128))) is None
    assert "shape [2, 4, 16, 8, 64]" in str(few_tokens._cache_obstacle(cache_of((2, 4, 16, 8, 64))))
    assert "shape [4, 16, 8, 128]" in str(few_tokens._cache_obstacle(cache_of((4, 16, 8, 128))))
    assert "torch.uint8" in str(few_tokens._cache_obstacle(cache_of((4, 8, 16, 128), torch.uint8)))
    assert few_tokens._cache_obstacle(cache_of((4, 8, 24, 128))) == "cache blocks of 24 tokens, not a power of two"


def test_vllms_config_has_every_field_that_is_read() -> None:
    from vllm.config import CacheConfig, CompilationConfig, DeviceConfig, ParallelConfig, VllmConfig

    real = VllmConfig(device_config=DeviceConfig("cpu"))
    assert few_tokens._feature_obstacle(real) is None
    assert {"lora_config", "kv_transfer_config", "additional_config"} <= set(VllmConfig.__dataclass_fields__)
    assert "cache_dtype" in CacheConfig.__dataclass_fields__
    assert "mode" in CompilationConfig.__dataclass_fields__
    assert "enable_dbo" in ParallelConfig.__dataclass_fields__


def a_layer() -> Any:
    """What `_compile` reads of a 20b layer."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(1).expand(rows, columns)

    runner = SimpleNamespace(moe_config=SimpleNamespace(experts_per_token=4))
    return SimpleNamespace(
        qkv_weight=weight(5120, 2880),
        out_weight=weight(2880, 4096),
        gate_weight=weight(32, 2880),
        runner=runner,
        block=SimpleNamespace(attn=SimpleNamespace(num_kv_heads=8)),
        window=0,
        experts=None,
    )


def test_every_kernel_of_the_path_is_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: set[Any] = set()
    monkeypatch.setattr(few_tokens.dense, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(few_tokens.dense, "kernel", lambda device, plan: compiled.add(plan))
    monkeypatch.setattr(few_tokens.attention, "kernel", lambda device, plan: compiled.add(plan))
    assert few_tokens._compile([a_layer()]) is None
    for tokens in range(1, few_tokens.MAX_TOKENS + 1):
        for mode, rows, columns, top_k in (
            (few_tokens.dense.Mode.QKV, 5120, 2880, 0),
            (few_tokens.dense.Mode.OUT, 2880, 4096, 0),
            (few_tokens.dense.Mode.ROUTER, 32, 2880, 4),
        ):
            assert few_tokens.dense.plan(mode, rows, columns, tokens, 132, top_k) in compiled
        assert few_tokens.attention.plan(tokens, 8, 0) in compiled


def test_a_compiler_that_refuses_leaves_upstreams_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int, plan: object) -> None:
        raise few_tokens.nvrtc.NvrtcError("libnvrtc was not found")

    monkeypatch.setattr(few_tokens.dense, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(few_tokens.dense, "kernel", refuse)
    assert few_tokens._compile([a_layer()]) == "a kernel cannot be compiled: libnvrtc was not found"
