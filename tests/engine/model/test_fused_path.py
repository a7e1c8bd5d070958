"""Which steps the fused path takes, and that all it needs is there before the first.

`tests/engine/choose` has the obstacles.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.vllm_log import heard, lines
from vllm_gptoss.engine.choose import Deployment
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.model import fused_path, many_tokens
from vllm_gptoss.engine.spec import GPT_OSS_20B

H200 = Device("nvidia", "NVIDIA H200", "sm90", 139.8)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> fused_path.FusedPath:
    """That of a 20b on an H200, nothing prepared."""
    monkeypatch.setattr(fused_path.device, "detect", lambda: H200)
    return fused_path.FusedPath(SimpleNamespace(model=None), Deployment(GPT_OSS_20B))


def stepping(monkeypatch: pytest.MonkeyPatch, longest: int, mode: str = "FULL") -> None:
    """Sets the forward context of a step with `longest` tokens in its longest request."""
    metadata = {f"layers.{at}": SimpleNamespace(max_query_len=longest) for at in range(2)}
    context = SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=mode)
    monkeypatch.setattr(fused_path.worker, "forward_context", lambda: context)
    monkeypatch.setattr(fused_path.worker, "in_piecewise_graph", lambda found: mode == "PIECEWISE")


def test_a_step_outside_the_engine_is_not_taken(path: fused_path.FusedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_path.worker, "forward_context", lambda: None)
    assert not path.could_take(1)
    assert not path.could_take(17)


ONE = [(1, 1, True), (16, 16, True), (17, 1, True), (512, 1, True), (17, 2, False), (512, 300, False), (513, 1, False)]
DRAFTS = [(17, 1, True), (32, 2, True), (512, 8, True), (512, 9, False), (513, 4, False), (16, 16, True)]


@pytest.mark.parametrize(
    ("per_request", "tokens", "longest", "taken"), [*((1, *row) for row in ONE), *((8, *row) for row in DRAFTS)]
)
def test_many_tokens_are_taken_up_to_a_limit_of_each_request(
    path: fused_path.FusedPath,
    monkeypatch: pytest.MonkeyPatch,
    per_request: int,
    tokens: int,
    longest: int,
    taken: bool,
) -> None:
    assert path.per_request == 1
    path.per_request = per_request
    stepping(monkeypatch, longest)
    assert path.could_take(tokens) == taken
    stepping(monkeypatch, longest, mode="PIECEWISE")
    assert not path.could_take(tokens), "a piecewise graph belongs to the compiled model"


def wrapped(no_lora: bool) -> Any:
    """A projection in vLLM's LoRA wrapper."""
    metadata = SimpleNamespace(no_lora_flag_cpu=torch.tensor([no_lora]))
    return SimpleNamespace(punica_wrapper=SimpleNamespace(token_mapping_meta=metadata))


PLAIN = SimpleNamespace()


@pytest.mark.parametrize(
    ("qkv_proj", "o_proj", "taken"),
    [
        (wrapped(True), wrapped(True), True),
        (wrapped(False), wrapped(False), False),
        (PLAIN, wrapped(True), True),
        (PLAIN, wrapped(False), False),
        (PLAIN, PLAIN, False),
        (SimpleNamespace(punica_wrapper=SimpleNamespace()), PLAIN, False),
    ],
)
def test_a_step_with_a_lora_adapter_is_vllms(
    path: fused_path.FusedPath, monkeypatch: pytest.MonkeyPatch, qkv_proj: Any, o_proj: Any, taken: bool
) -> None:
    """Also where the wrappers are not what we know. Without LoRA nothing is read of them."""
    stepping(monkeypatch, 1)
    layer = SimpleNamespace(attn=SimpleNamespace(qkv_proj=qkv_proj, o_proj=o_proj))
    path.model = SimpleNamespace(layers=[None, layer], start_layer=1)
    assert path.could_take(1)
    path.deployment = replace(path.deployment, lora=True, lora_on_attention=True)
    assert [path.could_take(tokens) for tokens in (1, 17)] == [taken] * 2


@pytest.mark.vllm
def test_the_flag_is_the_one_that_vllm_sets() -> None:
    """`LoRAKernelMeta.prepare_tensors` of the tokens' adapters, -1 without one, before each step."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    metadata = LoRAKernelMeta.make(max_loras=2, max_num_tokens=8, device="cpu")
    linear = SimpleNamespace(punica_wrapper=SimpleNamespace(token_mapping_meta=metadata))
    assert fused_path.worker.has_adapter([linear]), "before the first step"
    for adapters, any_of_them in (([-1, -1], False), ([-1, 0], True), ([1, 1], True), ([-1], False)):
        metadata.prepare_tensors(torch.tensor(adapters))
        assert fused_path.worker.has_adapter([linear]) is any_of_them


@pytest.mark.parametrize(("longest", "taken"), [(4, True), (9, False)])
def test_a_draft_whose_attention_names_no_longest_request_is_no_fault(
    path: fused_path.FusedPath, monkeypatch: pytest.MonkeyPatch, longest: int, taken: bool
) -> None:
    """`FlashInferMetadata`, of a draft model with `attention_backend` FLASHINFER."""
    path.per_request = 8
    stepping(monkeypatch, longest)
    fused_path.worker.forward_context().attn_metadata["draft.layers.0"] = SimpleNamespace()
    assert path.could_take(64) == taken


def test_what_cannot_be_compiled_leaves_the_few_tokens(
    path: fused_path.FusedPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers of few tokens keep their kernels, and one line reports the steps that vLLM runs."""

    def refuse(loads: Any) -> None:
        raise fused_path.nvrtc.NvrtcError("no")

    monkeypatch.setattr(many_tokens.nvrtc, "at_once", refuse)
    place: Any = SimpleNamespace(experts=SimpleNamespace(many=object()))
    with heard(caplog, logging.INFO) as said:
        assert many_tokens.prepared([place], path.deployment, "auto") == fused_path.MAX_TOKENS
        place.experts.many = None
        assert many_tokens.prepared([place], path.deployment, "auto") == fused_path.MAX_TOKENS
    compiled, missing = lines(said)
    assert "cannot be compiled: no" in compiled
    assert "no kernels of the plugin for the experts" in missing


def a_place() -> Any:
    """What `loads` reads of a 20b layer."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(1).expand(rows, columns)

    tensors = SimpleNamespace(
        qkv_weight=weight(5120, 2880),
        out_weight=weight(2880, 4096),
        router_weight=weight(32, 2880),
        active=4,
        window=0,
        experts=None,
    )
    return SimpleNamespace(tensors=tensors, attention=SimpleNamespace(num_kv_heads=8), cache=torch.empty(0))


def test_every_kernel_of_the_path_is_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: set[Any] = set()
    monkeypatch.setattr(fused_path.dense, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(fused_path.dense, "kernel", lambda device, plan: compiled.add(plan))
    monkeypatch.setattr(fused_path.attention, "kernel", lambda device, plan: compiled.add(plan))
    allocated: list[tuple[int, int]] = []
    monkeypatch.setattr(fused_path.attention, "allocate", lambda *sizes: allocated.append(sizes))
    fused_path.nvrtc.at_once(fused_path.loads(a_place()))
    assert allocated == [(0, 8)], "nothing can be allocated while a graph is captured"
    for tokens in range(1, fused_path.MAX_TOKENS + 1):
        for mode, rows, columns, top_k in (
            (fused_path.dense.Mode.QKV, 5120, 2880, 0),
            (fused_path.dense.Mode.OUT, 2880, 4096, 0),
            (fused_path.dense.Mode.ROUTER, 32, 2880, 4),
        ):
            assert fused_path.dense.plan(mode, rows, columns, tokens, 132, top_k) in compiled
        assert fused_path.attention.plan(tokens, 8, 0) in compiled


@pytest.mark.parametrize(
    ("wish", "theirs", "why", "push"),
    [
        ("gptoss", 512, "", ["push"]),
        ("gptoss", 512, "rank 1: no peer access", [None]),
        ("gptoss", 16, "", ["push"]),
        ("auto", 16, "never run by us with 4 GPUs; layers=gptoss tries it", []),
    ],
)
def test_ranks_agree_on_the_largest_step_and_on_who_sums(
    path: fused_path.FusedPath,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wish: str,
    theirs: int,
    why: str,
    push: list[str | None],
) -> None:
    """A rank on another path than its peers would wait for a sum that they never send."""
    made: list[str | None] = []

    def connected(*_: Any) -> Any:
        made.append(None if why else "push")
        if why:
            raise fused_path.UnavailableError(why)
        return "push"

    monkeypatch.setattr(fused_path.all_reduce, "connect", connected)
    monkeypatch.setattr(fused_path.worker, "gathered", lambda item: [item, (theirs, item[1])])
    monkeypatch.setattr(fused_path.worker, "tensor_parallel_rank", lambda: 0)
    path.deployment, path.ranks = Deployment(GPT_OSS_20B, tensor_parallel=4), 4
    path.places, path.most, path.wish = [a_place()], 512, wish
    with heard(caplog, logging.INFO) as said:
        path.connect()
    most = 16 if why else theirs  # steps of more tokens were never run with vLLM's all-reduce
    assert (path.most, made, path.push) == (most, push, next(iter(push), None))
    assert lines(said) == ([f"layers: vLLM's all-reduce ({why})"] if why else [])


@pytest.mark.parametrize("alike", [True, False])
def test_one_launch_of_all_ranks_has_their_memory_where_their_kernels_are_alike(
    path: fused_path.FusedPath, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    """Ranks with different kernels would wait for one another."""
    joined: list[str] = []
    plan, other = SimpleNamespace(received_bytes=64), SimpleNamespace(received_bytes=32)
    one: Any = SimpleNamespace(step=SimpleNamespace(plan=plan), join=joined.append)
    monkeypatch.setattr(fused_path.all_reduce, "connect", lambda *given: "push")
    monkeypatch.setattr(fused_path.worker, "gathered", lambda item: [item, (16, plan if alike else other)])
    monkeypatch.setattr(fused_path.worker, "tensor_parallel_rank", lambda: 0)
    path.deployment, path.ranks = Deployment(GPT_OSS_20B, tensor_parallel=2), 2
    path.places, path.one_token, path.wish = [a_place()], one, "gptoss"
    path.connect()
    assert (joined, path.push) == (["push"] * alike, "push")
    assert path.one_token is (one if alike else None)
