"""vLLM's own configuration objects have what is read of them, and each fact is read from its place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    CUDAGraphMode,
    LoadConfig,
    LoRAConfig,
    OffloadConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)

from tests.support.vllm_configs import THREE_DRAFTS, compilation, config, parallel, transfer
from vllm_gptoss.engine.choose import KvCache
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.engine.spec import GPT_OSS_20B

pytestmark = pytest.mark.vllm


def test_a_plain_server_is_described_by_its_model_alone() -> None:
    found = describe.configuration(config())
    assert found.model == GPT_OSS_20B
    assert found.device_type == "cpu"
    on_a_gpu = {"device_type": "cuda", "piecewise_graphs": False, "graphs": True, "custom_all_reduce": True}
    assert replace(found, **on_a_gpu) == describe.Deployment(GPT_OSS_20B)


def test_graphs_for_steps_without_adapters_are_needed() -> None:
    lora, whole = LoRAConfig(target_modules=["o_proj"]), compilation(cudagraph_specialize_lora=False)
    assert not describe.configuration(config(lora_config=lora, compilation_config=whole)).lora_on_attention


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"parallel_config": parallel(tensor_parallel_size=2)}, "tensor_parallel", 2),
        ({"parallel_config": parallel(pipeline_parallel_size=3)}, "pipeline_parallel", 3),
        ({"parallel_config": parallel(data_parallel_size=4)}, "data_parallel", 4),
        ({"parallel_config": parallel(decode_context_parallel_size=2)}, "decode_context_parallel", 2),
        ({"parallel_config": parallel(prefill_context_parallel_size=2)}, "prefill_context_parallel", 2),
        ({"parallel_config": parallel(disable_custom_all_reduce=False)}, "custom_all_reduce", True),
        ({"parallel_config": parallel(disable_custom_all_reduce=True)}, "custom_all_reduce", False),
        ({"parallel_config": parallel(enable_expert_parallel=True)}, "expert_parallel", True),
        ({"parallel_config": parallel(enable_dbo=True)}, "micro_batches", True),
        ({"lora_config": SimpleNamespace()}, "lora", True),
        ({"lora_config": LoRAConfig()}, "lora_on_attention", False),
        ({"lora_config": LoRAConfig(target_modules=["q_proj", "o_proj"])}, "lora_on_attention", True),
        ({"lora_config": LoRAConfig(target_modules=["qkv_proj", "experts"])}, "lora_on_attention", False),
        ({"kv_transfer_config": transfer("NixlConnector")}, "kv_connectors", ("NixlConnector",)),
        ({"kv_transfer_config": transfer("MultiConnector", "A", "B")}, "kv_connectors", ("A", "B")),
        ({"cache_config": CacheConfig(cache_dtype="fp8")}, "kv_cache_dtype", "fp8"),
        ({"speculative_config": THREE_DRAFTS}, "drafts", "eagle3"),
        ({"speculative_config": THREE_DRAFTS}, "draft_tokens", 3),
        ({"compilation_config": compilation(mode=1)}, "compiled_whole", True),
        ({"compilation_config": compilation(cudagraph_mode=CUDAGraphMode.PIECEWISE)}, "piecewise_graphs", True),
        ({"compilation_config": compilation(cudagraph_mode=CUDAGraphMode.NONE)}, "graphs", False),
        ({"parallel_config": parallel(enable_eplb=True)}, "moves_experts", True),
        ({"parallel_config": parallel(enable_elastic_ep=True)}, "moves_experts", True),
        ({"offload_config": OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1))}, "offloaded", True),
        ({"offload_config": OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=1))}, "offloaded", True),
        ({"load_config": LoadConfig(load_format="sharded_state")}, "load_format", "sharded_state"),
    ],
    ids=str,
)
def test_each_fact_is_read_from_its_place(changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(describe.configuration(config(**changes)), field) == value


@pytest.mark.parametrize(
    ("environment", "may"),
    [
        ({}, False),
        ({"VLLM_ROCM_USE_AITER": "1"}, True),
        ({"VLLM_ROCM_USE_AITER": "True"}, True),
        ({"VLLM_ROCM_USE_AITER": "0"}, False),
        ({"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": "0"}, False),
    ],
    ids=str,
)
def test_aiter_is_read_as_vllm_reads_it(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], may: bool
) -> None:
    import vllm.envs as envs

    for name in ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert describe.uses_aiter() is may
    assert (envs.VLLM_ROCM_USE_AITER and envs.VLLM_ROCM_USE_AITER_MOE) is may


def a_layer(backend: str = "FLASH_ATTN", dtype: torch.dtype = torch.bfloat16) -> Any:
    linear = SimpleNamespace(weight=torch.empty(2, 2, dtype=dtype))
    attn = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))
    block = SimpleNamespace(attn=attn, qkv_proj=linear, o_proj=linear)
    return SimpleNamespace(attn=block, mlp=SimpleNamespace(router=linear))


@pytest.mark.parametrize(
    ("layers", "backend", "quantized"),
    [
        ([a_layer(), a_layer()], "FLASH_ATTN", False),
        ([a_layer(), a_layer("TRITON_ATTN")], "TRITON_ATTN", False),
        ([a_layer(), a_layer(dtype=torch.uint8)], "FLASH_ATTN", True),
        ([SimpleNamespace()], None, False),
    ],
    ids=["usual", "a layer of another backend", "a quantized projection", "a stage without layers"],
)
def test_one_layer_that_differs_is_seen(layers: list[Any], backend: str | None, quantized: bool) -> None:
    model = SimpleNamespace(model=SimpleNamespace(layers=layers))
    found = describe.built_model(describe.Deployment(GPT_OSS_20B), model)
    assert (found.built_attention, found.quantized_projections) == (backend, quantized)


def test_caches_of_each_kind_are_kept() -> None:
    cos_sin, cache = torch.zeros(8, 64), torch.zeros(4, 8, 16, 128, dtype=torch.bfloat16)
    tensors = SimpleNamespace(experts=SimpleNamespace(expert_map=None), cos_sin=cos_sin)
    places = [
        SimpleNamespace(tensors=tensors, attention=SimpleNamespace(kv_cache=each), scales=None)
        for each in (cache, cache, cache.view(2, 16, 16, 128))
    ]
    found = describe.first_step(describe.Deployment(GPT_OSS_20B), places, (2,))
    assert found.caches == (KvCache((4, 8, 16, 128), "bfloat16", 1), KvCache((2, 16, 16, 128), "bfloat16", 1))
    assert (found.own_experts, found.one_rotary_cache, found.auxiliary_states) == (True, True, True)


@pytest.mark.parametrize(
    ("scale", "one"),
    [
        (torch.ones(()), True),
        (torch.ones(1), True),
        (torch.ones(8), False),
        (torch.ones((), dtype=torch.float64), False),
    ],
)
def test_scales_of_an_fp8_cache_are_one_number_each(scale: torch.Tensor, one: bool) -> None:
    cache = torch.zeros(4, 8, 32, 128, dtype=torch.uint8)
    tensors = SimpleNamespace(experts=None, cos_sin=torch.zeros(8, 64))
    place = SimpleNamespace(tensors=tensors, attention=SimpleNamespace(kv_cache=cache), scales=(torch.ones(()), scale))
    found = describe.first_step(describe.Deployment(GPT_OSS_20B), [place], ())
    assert (found.caches, found.one_scale) == ((KvCache((4, 8, 32, 128), "uint8", 1),), one)
