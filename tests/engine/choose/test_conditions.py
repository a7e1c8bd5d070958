"""Every condition as a row: the property of a device or deployment, the rejected choice and the reason."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import Deployment, KvCache, RankExperts, measured
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import GPT_OSS_20B, GPT_OSS_120B

H200 = Device("nvidia", "NVIDIA H200", "sm90", 139.8)
OTHERS = {
    "CPU": (Device("cpu", "Xeon", "x86_64", 24), "the kernels are CUDA kernels"),
    "A100": (Device("nvidia", "NVIDIA A100", "sm80", 79.3), "made for sm_90, this GPU is sm_80"),
}
USUAL = KvCache((4, 8, 16, 128), "bfloat16", 1)
CODES = KvCache((4, 8, 32, 128), "uint8", 1)


def of(**changes: Any) -> Deployment:
    """The 20b on one GPU; names of `ModelSpec` change the model."""
    model = {name: changes.pop(name) for name in list(changes) if name in ModelFields}
    return Deployment(replace(GPT_OSS_20B, **model), **changes)


ModelFields = GPT_OSS_20B.__dataclass_fields__


ADAPTED: dict[str, Any] = {"lora": True, "lora_on_attention": True}
LAYERS = [
    ({"device_type": "cpu"}, "the kernels are CUDA kernels"),
    ({"dtype": "float16"}, "activations are float16, not bfloat16"),
    ({"lora": True}, "LoRA is not limited to attention (--lora-target-modules)"),
    ({**ADAPTED, "tensor_parallel": 2}, "LoRA is on, with several GPUs or drafts"),
    ({**ADAPTED, "drafts": "ngram"}, "LoRA is on, with several GPUs or drafts"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "the KV cache is fp8_e5m2, not bfloat16 or fp8_e4m3"),
    ({"kv_cache_dtype": "fp8", "one_scale": False}, "the fp8 KV cache has scales for each head"),
    ({"data_parallel": 2}, "data parallelism is on"),
    ({"expert_parallel": True}, "expert parallelism is on"),
    ({"decode_context_parallel": 2}, "decode context parallelism is on"),
    ({"prefill_context_parallel": 2}, "prefill context parallelism is on"),
    ({"micro_batches": True}, "dual batch overlap is on"),
    ({"batch_invariant": True}, "batch invariance is on"),
    ({"piecewise_graphs": True}, "cudagraph_mode=PIECEWISE has no graph of a whole step"),
    ({"compiled_whole": True}, "the whole model is compiled by torch.compile"),
    ({"sequence_parallel": True}, "sequence-parallel experts are on"),
    ({"offloaded": True}, "weights are offloaded to the host"),
    ({"quantized_projections": True}, "a projection is quantized"),
    ({"built_attention": "TRITON_ATTN"}, "the attention backend is TRITON_ATTN, not FLASH_ATTN"),
    ({"head_size": 128}, "head size 128, not 64"),
    ({"kv_heads": 16}, "64 query heads for 16 key/value heads, not 8 each"),
    ({"tensor_parallel": 16}, "4 query heads for 0 key/value heads"),
    ({"kv_heads": 28, "query_heads": 224, "hidden": 1024}, "17920 rows of 1024 columns need 237568 bytes"),
    ({"hidden": 2896}, "2896 columns are not a multiple of 64"),
    ({"hidden": 1088}, "1088 columns do not divide among 8 to 16 warps"),
    ({"experts": 24}, "24 experts are not a multiple of 32"),
    ({"active_experts": 33}, "33 of 32 experts a token"),
    ({"caches": (KvCache((2, 4, 16, 8, 64), "bfloat16", 1),)}, "shape [2, 4, 16, 8, 64]"),
    ({"caches": (USUAL, KvCache((4, 16, 8, 128), "bfloat16", 1))}, "shape [4, 16, 8, 128]"),
    ({"caches": (KvCache((4, 8, 16, 128), "uint8", 1),)}, "the KV cache is uint8"),
    ({"caches": (KvCache((4, 8, 16, 128), "bfloat16", 2),)}, "with stride 2 in its last axis"),
    ({"caches": (KvCache((4, 8, 24, 128), "bfloat16", 1),)}, "cache blocks of 24 tokens, not a power of two"),
]


UNTRIED = [
    ({"tensor_parallel": 4}, "more than 2 GPUs, or a pipeline"),
    ({"pipeline_parallel": 2}, "more than 2 GPUs, or a pipeline"),
    ({"drafts": "draft_model"}, "drafts by draft_model"),
    ({"kv_connectors": ("OffloadingConnector", "NixlConnector")}, "the KV connector NixlConnector"),
    *(
        ({"kv_cache_dtype": "fp8", **more}, "a KV cache of fp8 with drafts, LoRA, a KV connector or several GPUs")
        for more in ({"drafts": "eagle3"}, ADAPTED, {"kv_connectors": ("OffloadingConnector",)}, {"tensor_parallel": 2})
    ),
]


@pytest.mark.parametrize(("changes", "why"), UNTRIED, ids=[str(changes) for changes, _ in UNTRIED])
def test_what_was_never_run_is_only_done_when_asked_for(changes: dict[str, Any], why: str) -> None:
    choice = choose.layers(H200, of(**changes))
    assert choice.value == "upstream"
    assert f"never run by us with {why}; layers=gptoss tries it" in choice.reason
    asked = choose.layers(H200, of(**changes), "gptoss")
    assert asked.value == "gptoss"
    assert f"never run by us with {why}" in asked.reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tensor_parallel": 2},
        {"drafts": "ngram"},
        {"drafts": "eagle3"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3", "one_scale": True, "caches": (CODES, USUAL)},
        {"experts": 128, "layers": 36},
        {"kv_heads": 27, "query_heads": 216, "hidden": 1024},
        {"built_attention": "FLASH_ATTN", "quantized_projections": False, "caches": (USUAL,)},
    ],
    ids=str,
)
def test_what_was_run_on_a_gpu_is_the_default(changes: dict[str, Any]) -> None:
    assert choose.layers(H200, of(**changes)).value == "gptoss"
    assert choose.experts(H200, of(**changes)).value == "gptoss"


ONE_TOKEN = [
    ({"auxiliary_states": True}, "draft model"),
    ({"tensor_parallel": 8}, "8 query heads are too few for 132 multiprocessors"),
    ({"tensor_parallel": 4}, "never run by us with 4 GPUs; layers=gptoss tries it"),
    ({"tensor_parallel": 2, "layers": 23}, "23 layers: several ranks take an even number"),
    ({"pipeline_parallel": 2}, "a pipeline"),
    ({"own_experts": False}, "another backend runs the experts, or maps them"),
    ({"active_experts": 2}, "not 4 experts a token"),
    ({"one_rotary_cache": False}, "rotary caches of their own"),
    ({"caches": (KvCache((4, 8, 8, 128), "bfloat16", 1),)}, "cache blocks of fewer than 16 tokens"),
    ({"kv_cache_dtype": "fp8", "caches": (CODES, USUAL)}, "layers have KV caches of several dtypes"),
    ({"intermediate": 2944}, "intermediate size 2944"),
    ({"experts": 96}, "96 experts, not 32, 64 or 128"),
    ({"hidden": 4800, "intermediate": 4800}, "too large"),
    ({"layers": 2000}, "leave a ring of"),
]


@pytest.mark.parametrize("model", [GPT_OSS_20B, GPT_OSS_120B], ids=lambda model: model.name)
def test_one_gpu_takes_one_launch_and_kernels_around_the_products(model: Any) -> None:
    found = Deployment(model, own_experts=True, one_rotary_cache=True, auxiliary_states=False, caches=(USUAL,))
    assert choose.one_token(H200, found).value == "one launch"
    assert choose.many_tokens(H200, found).value == "around cuBLAS"
    assert choose.one_token(H200, replace(found, kv_cache_dtype="fp8", caches=(CODES,))).value == "one launch"


MANY_TOKENS = [
    ({"tensor_parallel": 4}, "never run by us with 4 GPUs; layers=gptoss tries it"),
    ({"pipeline_parallel": 2}, "a pipeline shares the model"),
    ({"own_experts": False}, "another backend runs the experts, or maps them"),
    ({"hidden": 2900}, "2900 columns are not a multiple of 64"),
    ({"hidden": 47 * 64}, "do not divide among clusters"),
    ({"experts": 40}, "40 experts, not 32, 64, 96 or 128"),
    ({"head_size": 128}, "head size 128"),
]


RUNNER = [
    *(
        ({part: 2}, "pipeline, data or context parallelism is on")
        for part in ("pipeline_parallel", "data_parallel", "prefill_context_parallel", "decode_context_parallel")
    ),
    ({"drafts": "ngram"}, "drafts"),
    ({"lora": True}, "LoRA is not limited to attention"),
    ({**ADAPTED, "drafts": "eagle3"}, "LoRA is on, with several GPUs or drafts"),
    ({"kv_connectors": ("OffloadingConnector", "ExampleConnector")}, "the KV connector ExampleConnector"),
    ({"moves_experts": True}, "vLLM moves experts between ranks"),
    ({"piecewise_graphs": True}, "cudagraph_mode=PIECEWISE has no graph of a whole step"),
    ({"graphs": False}, "no CUDA graphs are captured"),
]


@pytest.mark.parametrize(
    "changes",
    [
        {"drafts": "eagle3", "draft_tokens": 3},
        {"kv_connectors": ("OffloadingConnector", "NixlConnector")},
        {"kv_connectors": ("NixlConnector", "LMCacheConnectorV1", "LMCacheMPConnector")},
        {"tensor_parallel": 2, "kv_connectors": ("OffloadingConnector",)},
        {"tensor_parallel": 2, "drafts": "eagle3", "draft_tokens": 3},
        {"tensor_parallel": 4},
        {"tensor_parallel": 8},
    ],
    ids=str,
)
def test_drafts_connectors_and_ranks_take_the_runner_only_where_asked_for(changes: dict[str, Any]) -> None:
    choice = choose.runner(H200, of(**changes))
    assert (choice.value, "host=gptoss tries it" in choice.reason) == ("upstream", True)
    assert choose.runner(H200, of(**changes), "gptoss").value == "gptoss"


@pytest.mark.parametrize(
    ("drafts", "wish", "most", "why"),
    [
        (0, "gptoss", 1, "no drafts"),
        (1, "gptoss", 2, "drafts among them: 1"),
        (7, "gptoss", 8, "drafts among them: 7"),
        (8, "gptoss", 1, "8 drafts are more than 7"),
        (3, "auto", 4, "drafts among them: 3"),
        (4, "auto", 1, "never run by us with 4 drafts; layers=gptoss tries it"),
    ],
)
def test_several_tokens_are_ours_where_measured_or_asked_for(drafts: int, wish: str, most: int, why: str) -> None:
    choice = choose.tokens_per_request(H200, of(drafts="eagle3", draft_tokens=drafts), wish)
    assert (choice.value, choice.reason) == (most, why)


def test_layers_of_upstream_take_no_several_tokens_of_a_request() -> None:
    choice = choose.tokens_per_request(H200, of(draft_tokens=3, pipeline_parallel=2), "gptoss")
    assert choice.value == 1
    assert "a pipeline shares the model" in choice.reason


def test_several_gpus_take_kernels_around_the_products_where_asked_for() -> None:
    for ranks in (2, 4):
        assert choose.many_tokens(H200, of(tensor_parallel=ranks), "gptoss").value == "around cuBLAS"
        assert choose.all_reduce(of(tensor_parallel=ranks), "gptoss").value == "push"
    assert choose.tokens_per_request(H200, of(draft_tokens=3, tensor_parallel=2), "gptoss").value == 4
    for changes in ({"pipeline_parallel": 2}, {"custom_all_reduce": False}):
        assert choose.all_reduce(of(tensor_parallel=2, **changes), "gptoss").value == "upstream"
        assert choose.one_token(H200, of(tensor_parallel=2, **changes), "gptoss").value == "six launches"
    assert choose.one_token(H200, of(custom_all_reduce=False)).value == "one launch", "one GPU sums nothing"
    assert choose.many_tokens(H200, of(custom_all_reduce=False)).value == "around cuBLAS"
    assert choose.tokens_per_request(H200, of(draft_tokens=3, tensor_parallel=2)).value == 1, "never run"


def test_what_was_measured_with_several_gpus_becomes_the_default_by_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two, four = of(tensor_parallel=2), of(tensor_parallel=4)
    parts = (choose.runner, choose.many_tokens, choose.one_token)
    ours = ["gptoss", "around cuBLAS", "one launch"]
    assert [part(H200, two).value for part in parts] == ours
    assert [part(H200, four).value for part in parts] == ["upstream", "upstream", "six launches"]
    monkeypatch.setattr(measured, "SM90", replace(measured.SM90, host_ranks=(1, 4), push_ranks=(1, 4)))
    assert [part(H200, four).value for part in parts] == ours


EXPERTS = [
    ({"lora": True}, "LoRA is not limited to attention (--lora-target-modules)"),
    ({"dtype": "float16"}, "activations are float16, not bfloat16"),
    ({"micro_batches": True}, "two streams at once"),
    ({"mps": True}, "MPS runs other processes"),
    ({"built_experts": "MARLIN"}, "the backend is MARLIN, not TRITON"),
    ({"monolithic": False}, "routes tokens between ranks"),
    ({"weighs_input": True}, "the router's weight is applied on the input"),
    ({"moves_experts": True}, "vLLM moves experts between ranks"),
    ({"load_format": "sharded_state"}, "--load-format sharded_state loads experts in another layout"),
    ({"expert_bias": False}, "the experts have no bias"),
    ({"largest_scale": 193}, "a scale is larger than e8m0 code 192"),
    ({"hidden": 32}, "32 x 2880 are not multiples of 64"),
    ({"expert_parallel": True, "intermediate": 3072}, "experts_down of 3072 columns"),
    ({"rank_experts": RankExperts(32, 2880, 96)}, "2880 x 96 are not multiples of 64"),
    ({"experts": 160}, "160 experts on one rank"),
    ({"active_experts": 8}, "8 experts a token"),
    ({"hidden": 16384}, "bytes of shared memory"),
]


PARTS: dict[str, tuple[Any, str, list[tuple[dict[str, Any], str]]]] = {
    "layers": (choose.layers, "upstream", LAYERS),
    "one token": (choose.one_token, "six launches", ONE_TOKEN),
    "many tokens": (choose.many_tokens, "upstream", MANY_TOKENS),
    "runner": (choose.runner, "upstream", RUNNER),
    "experts": (choose.experts, "triton", EXPERTS),
}
ROWS = [(name, *row) for name, (_, _, rows) in PARTS.items() for row in rows]


@pytest.mark.parametrize(("name", "changes", "why"), ROWS, ids=[f"{name}-{changes}" for name, changes, _ in ROWS])
def test_what_keeps_upstreams_part_is_named_and_no_wish_overrides_it(
    name: str, changes: dict[str, Any], why: str
) -> None:
    choose_part, value, _ = PARTS[name]
    choice = choose_part(H200, of(**changes))
    assert choice.value == value
    assert why in choice.reason
    if name in ("layers", "experts", "runner"):
        way = "host=gptoss cannot run here: .*{}.*; use host=auto" if name == "runner" else "{}"
        with pytest.raises(choose.ChoiceError, match=way.format(re.escape(why))):
            choose_part(H200, of(**changes), "gptoss")


@pytest.mark.parametrize("name", OTHERS)
def test_on_another_gpu_layers_are_upstreams_and_on_this_one_the_runner_is_ours(name: str) -> None:
    device, why = OTHERS[name]
    choice = choose.layers(device, of())
    assert choice.value == "upstream"
    assert why in choice.reason
    assert choose.runner(H200, of()).value == "gptoss"


@pytest.mark.parametrize(
    "changes",
    [
        {"built_experts": "TRITON", "monolithic": True, "weighs_input": False, "expert_bias": True},
        {"largest_scale": 192, "rank_experts": RankExperts(32, 2880, 1472), "tensor_parallel": 2},
    ],
    ids=str,
)
def test_what_a_start_finds_out_late_is_no_obstacle_where_it_is_usual(changes: dict[str, Any]) -> None:
    assert choose.experts(H200, of(**changes)).value == "gptoss"


@pytest.mark.parametrize("changes", [{"tensor_parallel": 4}, {"expert_parallel": True}, {"data_parallel": 4}], ids=str)
def test_experts_that_were_never_run_so_are_taken_by_wish(changes: dict[str, Any]) -> None:
    assert choose.experts(H200, of(**changes)).value == "triton"
    assert choose.experts(H200, of(**changes), "gptoss").value == "gptoss"


def test_adapters_of_attention_keep_layers_and_experts_and_offloading_keeps_the_runner() -> None:
    assert [part(H200, of(**ADAPTED)).value for part in (choose.layers, choose.experts)] == ["gptoss"] * 2
    assert choose.runner(H200, of(kv_connectors=("OffloadingConnector",))).value == "gptoss"


def test_choosing_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, vllm_gptoss.engine.choose, vllm_gptoss.engine.choose.vllm_config; "
        "print({'torch', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


OVER_MARLIN = [
    ({"device_type": "cpu"}, "the kernels are CUDA kernels"),
    ({"lora": True}, "LoRA is not limited to attention"),
    ({"expert_parallel": True}, "ranks hold different experts"),
    ({"data_parallel": 2}, "ranks hold different experts"),
    ({"dtype": "float16"}, "activations are float16, not bfloat16"),
    ({"hidden": 2890}, "experts of 2890 x 2880 are not multiples of 64"),
    ({"experts": 256}, "256 experts on one rank and 4 of a token, not up to 128 and 4"),
    ({"hidden": 8192, "intermediate": 8192}, "more than 101376 bytes of shared memory"),
    ({"built_experts": "TRITON"}, "the backend is TRITON, not MARLIN"),
    ({"largest_scale": 193}, "a scale is larger than e8m0 code 192"),
]


@pytest.mark.parametrize(("changes", "why"), OVER_MARLIN)
def test_experts_over_marlin_need_a_wish_and_what_they_were_made_for(changes: dict[str, Any], why: str) -> None:
    device = Device("nvidia", "NVIDIA L40S", "sm89", 44.4)
    assert choose.experts(device, of()).value == "marlin"
    assert choose.experts(device, of(), "gptoss").value == "gptoss"
    assert choose.experts(device, of(tensor_parallel=4), "gptoss").value == "gptoss"
    with pytest.raises(choose.ChoiceError, match=re.escape(why)):
        choose.experts(device, of(**changes), "gptoss")


OVER_TRITON = [
    ({"device_type": "cpu"}, "the kernel is a CUDA kernel"),
    ({"dtype": "float16"}, "activations are float16, not bfloat16"),
    ({"kv_cache_dtype": "fp8"}, "the KV cache is fp8, not bfloat16"),
    ({"decode_context_parallel": 2}, "decode context parallelism is on"),
    ({"micro_batches": True}, "dual batch overlap is on"),
    ({"batch_invariant": True}, "batch invariance is on"),
    ({"built_attention": "FLASHINFER"}, "no --attention-backend TRITON_ATTN"),
]


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm120", "sm121"])
@pytest.mark.parametrize(("changes", "why"), OVER_TRITON)
def test_attention_over_tritons_needs_a_wish_and_what_it_was_made_for(
    changes: dict[str, Any], why: str, arch: str
) -> None:
    device = Device("nvidia", "a GPU", arch, 44.4)
    assert choose.layers(device, of()).value == "upstream"
    assert (
        choose.layers(device, of(lora=True, expert_parallel=True, tensor_parallel=4), "attention").value == "attention"
    )
    with pytest.raises(choose.ChoiceError, match=re.escape(why)):
        choose.layers(device, of(**changes), "attention")
    with pytest.raises(choose.ChoiceError, match="not made for NVIDIA H200"):
        choose.layers(H200, of(), "attention")
