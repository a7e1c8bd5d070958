"""Which of our expert kernels runs a step, and where vLLM's do: a token too many would read past what a block has
staged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gptoss.cli.bench import worker
from vllm_gptoss.engine.choose import ChoiceError, Deployment
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.experts import method
from vllm_gptoss.engine.kernels import dense, experts, experts_many, experts_plan, experts_prefill, nvrtc
from vllm_gptoss.engine.model import addresses
from vllm_gptoss.engine.spec import GPT_OSS_20B

H200 = Device("nvidia", "NVIDIA H200", "sm90", 139.8)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which side each call of `apply_monolithic` took."""
    sides: list[str] = []
    monkeypatch.setattr(method.sm90, "apply", lambda *_: (sides.append("ours"), "their output")[1])
    upstream = method.GptOssExpertsMethod.__mro__[1]
    monkeypatch.setattr(upstream, "apply_monolithic", lambda *_: sides.append("upstream"))
    return sides


def projections() -> tuple[experts.Projection, experts.Projection]:
    """Up and down of 32 experts, hidden and intermediate 64."""

    def bytes_of(rows: int) -> experts.Projection:
        values, scales = torch.zeros(32, rows // 4, 128), torch.zeros(32, -(-rows // 256) * 8, 128)
        return experts.Projection(values.byte(), scales.byte(), torch.zeros(32, rows))

    return bytes_of(128), bytes_of(64)


def layer(few: experts.FewTokenExperts) -> method.sm90.LayerExperts:
    """As `prepare` makes it on a GPU that takes all kernels or only those for few tokens."""
    if few.max_tokens < experts_plan.MAX_TOKENS:
        return method.sm90.LayerExperts(few)
    return method.sm90.LayerExperts(few, experts_many.ManyTokenExperts(few), experts_prefill.PrefillExperts(few))


def prepared(ours: Any, wish: str = "auto") -> method.GptOssExpertsMethod:
    of = method.GptOssExpertsMethod.__new__(method.GptOssExpertsMethod)
    for name, value in (("ours", ours), ("wish", wish), ("deployment", Deployment(GPT_OSS_20B)), ("laid_out", None)):
        object.__setattr__(of, name, value)
    return of


@pytest.mark.parametrize(
    ("multiprocessors", "most"),
    [(132, None), (114, 16), (78, 16)],
    ids=["H100 SXM and H200", "H100 PCIe", "the smallest sm90 part"],
)
def test_what_a_gpu_has_no_kernel_for_is_upstreams(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, multiprocessors: int, most: int | None
) -> None:
    monkeypatch.setattr(experts, "multiprocessors", lambda device: multiprocessors)
    few = experts.FewTokenExperts(*projections(), 4, 32, alpha=1.0, limit=7.0)
    of = prepared(layer(few))
    for tokens in (0, 1, 16, 17, 512, 513, 100_000):
        of.apply_monolithic(None, torch.empty(tokens, 64), torch.empty(tokens, 32))
        assert ran.pop() == ("ours" if 0 < tokens <= (most or tokens) else "upstream"), tokens


@pytest.mark.parametrize(("most", "made_for"), [(16, {16}), (64, {16, 64}), (256, {16, 64, 256})])
def test_the_start_compiles_what_is_needed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, most: int, made_for: set[int]
) -> None:
    compiled: list[tuple[str, int]] = []

    def kernel(recipe: experts.CompileJob) -> None:
        compiled.append((recipe.name, int(dict(recipe.options)["TOKENS"])))

    monkeypatch.setattr(experts, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(experts, "_kernel", kernel)
    monkeypatch.setattr(experts, "partial_sums", lambda device, width, tokens: None)
    few = experts.FewTokenExperts(*projections(), 4, 32, alpha=1.0, limit=7.0)
    few.compile(torch.bfloat16, most)
    assert {tokens for _, tokens in compiled} == made_for
    assert {name for name, _ in compiled} == {"experts_up", "experts_down"}


@pytest.mark.parametrize(
    ("routed", "active", "last"), [(32, 4, 24), (128, 4, 96), (24, 4, 18), (8, 2, 16), (128, 2, 192)]
)
def test_experts_with_many_tokens_each_run_the_kernels_for_many(
    monkeypatch: pytest.MonkeyPatch, routed: int, active: int, last: int
) -> None:
    """Slots decode an expert's weights once for 16 tokens; the threshold never leaves a step without a kernel."""
    monkeypatch.setattr(experts, "multiprocessors", lambda device: 132)
    few = experts.FewTokenExperts(*projections(), active, routed, alpha=1.0, limit=7.0)
    ours = layer(few)
    assert ours.many is not None
    assert [ours.kernel(tokens) for tokens in range(1, 513)] == [few] * last + [ours.many] * (512 - last)
    assert ours.kernel(0) is None


@pytest.mark.parametrize(
    ("routed", "active", "last"), [(32, 4, 768), (128, 4, 2048), (64, 8, 768), (24, 4, 576), (128, 8, 1024)]
)
def test_large_steps_are_ours_whatever_their_size(
    monkeypatch: pytest.MonkeyPatch, routed: int, active: int, last: int
) -> None:
    """Upstream's kernels would be compiled at their first use, while requests wait."""
    monkeypatch.setattr(experts, "multiprocessors", lambda device: 132)
    ours = layer(experts.FewTokenExperts(*projections(), active, routed, alpha=1.0, limit=7.0))
    assert {ours.kernel(tokens) for tokens in range(513, last + 1)} == {ours.many}
    assert ours.kernel(last + 1) is ours.kernel(100_000) is ours.prefill is not None


@pytest.mark.parametrize(
    ("routed", "most", "many", "prefill"),
    [(128, 64, set(), 0), (128, 512, {320, 512}, 0), (128, 10_000, {320, 512, 1024, 1536, 2048}, 1),
     (32, 192, {80, 256}, 0), (32, 512, {80, 256, 384, 512}, 0), (32, 10_000, {80, 256, 384, 512, 768}, 1)],
)  # fmt: skip
def test_a_start_compiles_the_kernels_of_its_steps_and_no_larger_ones(
    monkeypatch: pytest.MonkeyPatch, routed: int, most: int, many: set[int], prefill: int
) -> None:
    """Decode steps are routed by ids, which no step of more than 512 tokens is."""
    monkeypatch.setattr(experts, "multiprocessors", lambda device: 132)
    ours = layer(experts.FewTokenExperts(*projections(), 4, routed, alpha=1.0, limit=7.0))
    recipes = [recipe for _, recipe in ours.loads(torch.int32, most) if isinstance(recipe, experts.CompileJob)]
    assert {dict(each.options)["TOKENS"] for each in recipes if each.name == experts_many.NAME} == many
    assert sum(each.name == experts_prefill.EXPERTS for each in recipes) == prefill


def test_nothing_of_ours_is_taken_while_upstream_lays_weights_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small tensor that lands in memory just freed keeps the next layer from taking it again."""
    steps: list[str] = []
    upstream = method.GptOssExpertsMethod.__mro__[1]
    monkeypatch.setattr(upstream, "process_weights_after_loading", lambda *_: steps.append("laid out"))
    monkeypatch.setattr(method.describe, "built_experts", lambda deployment, *_: deployment)
    monkeypatch.setattr(method.device, "detect", lambda: H200)
    monkeypatch.setattr(method.GptOssExpertsMethod, "_projection", lambda *_: None)
    for name in ("reserve", "sample", "prepare"):
        monkeypatch.setattr(method.sm90, name, lambda *_, name=name, **__: steps.append(name))
    of = prepared(None)
    object.__setattr__(of, "moe", SimpleNamespace(experts_per_token=4, num_experts=32))
    for name in ("w13_precision_config", "w2_precision_config"):
        object.__setattr__(of, name, None)
    weights = ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias")
    of.process_weights_after_loading(SimpleNamespace(expert_map=None, **{name: torch.zeros(1) for name in weights}))
    assert steps == ["reserve", "sample", "sample", "laid out", "prepare"]


def test_without_our_kernels_everything_is_upstreams(ran: list[str]) -> None:
    prepared(None).apply_monolithic(None, torch.empty(1, 64), torch.empty(1, 32))
    assert ran == ["upstream"]


def test_the_layers_never_hand_the_experts_more_than_they_take() -> None:
    assert dense.MAX_TOKENS <= 78 // 4


def driver(status: int, value: int) -> Any:
    def attribute(to: Any, which: int, device: int) -> int:
        to._obj.value = value
        return status

    return SimpleNamespace(cuDeviceGetAttribute=attribute)


@pytest.mark.parametrize(("status", "value", "shared"), [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_a_gpu_shared_by_mps_is_told_by_the_driver(
    monkeypatch: pytest.MonkeyPatch, status: int, value: int, shared: bool
) -> None:
    """Two kernels with grid-wide barriers would deadlock; an error of an old driver means False."""
    monkeypatch.setattr(nvrtc, "driver", lambda: driver(status, value))
    assert nvrtc.shared_by_mps(0) is shared


def loaded(**changes: Any) -> SimpleNamespace:
    """One layer of the 20b's rank, in little memory, as vLLM's loader leaves it."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8).expand(32, rows, columns)

    fields = {
        "w13_weight": weight(5760, 1440),
        "w13_weight_scale": weight(5760, 90),
        "w2_weight": weight(2880, 1440),
        "w2_weight_scale": weight(2880, 90),
        "apply_router_weight_on_input": False,
        "expert_map": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def before_loading(monkeypatch: pytest.MonkeyPatch, wish: str = "auto") -> method.GptOssExpertsMethod:
    """A method on a device named H200. vLLM's base class does not convert the weights."""
    of = prepared(None)
    moe = SimpleNamespace(has_bias=True, experts_per_token=4, num_experts=32)
    backend = SimpleNamespace(value="TRITON")
    for name, value in (("mxfp4_backend", backend), ("moe", moe), ("wish", wish)):
        object.__setattr__(of, name, value)
    monkeypatch.setattr(method.GptOssExpertsMethod, "is_monolithic", True)
    monkeypatch.setattr(method.device, "detect", lambda: H200)
    monkeypatch.setattr(method.GptOssExpertsMethod.__mro__[1], "process_weights_after_loading", lambda *_: None)
    return of


def test_experts_under_mps_stay_upstreams_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "driver", lambda: driver(0, 1))
    of = before_loading(monkeypatch)
    with pytest.raises(method.fallback.UnavailableError, match="MPS"):
        of._before(loaded())
    of.process_weights_after_loading(loaded())
    assert of.ours is None
    asked = before_loading(monkeypatch, "gptoss")
    with pytest.raises(ChoiceError, match="experts='gptoss' cannot run here: MPS"):
        asked.process_weights_after_loading(loaded())


def test_one_layer_of_another_shape_or_scale_keeps_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    of = before_loading(monkeypatch)
    narrow = torch.zeros(1, dtype=torch.uint8).expand(32, 32, 16)
    with pytest.raises(method.fallback.UnavailableError, match="32 x 32 are not multiples of 64"):
        of._before(loaded(w13_weight=narrow, w2_weight=narrow))
    large = torch.full((32, 2880, 90), 127, dtype=torch.uint8)
    large[3, 5, 7] = 193
    with pytest.raises(method.fallback.UnavailableError, match="a scale is larger than e8m0 code 192"):
        of._before(loaded(w2_weight_scale=large))
    values, scales = of._before(loaded())[1]
    assert values.numel()
    assert scales.numel()


def test_the_fused_layers_find_the_experts_that_a_method_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they do not, tokens stay right, but a step of one token is no longer one launch."""
    monkeypatch.setattr(experts, "multiprocessors", lambda device: 132)
    few = experts.FewTokenExperts(*projections(), 4, 32, alpha=1.0, limit=7.0)

    def found(quant_method: Any, hidden: int = 64) -> Any:
        runner = torch.nn.Module()
        runner.routed_experts = torch.nn.Module()
        object.__setattr__(runner.routed_experts, "quant_method", quant_method)
        norm = SimpleNamespace(weight=torch.empty(hidden))
        own = addresses.own_experts(SimpleNamespace(mlp=SimpleNamespace(experts=runner), input_layernorm=norm))
        return own and own.few, worker.paths(runner)["own_experts"]

    assert found(prepared(layer(few))) == (few, 1)
    assert found(prepared(layer(few)), 128) == (None, 1), "activations are padded"
    assert found(prepared(None)) == (None, 0)
    assert found(object()) == (None, 0)
