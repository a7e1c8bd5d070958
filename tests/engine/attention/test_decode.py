"""Which steps our attention takes from FlashAttention 3, and that FA3 has everything it needs for the others."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from tests.support.plans import Common, builder
from tests.support.vllm_log import lines
from vllm_gptoss import startup_line
from vllm_gptoss.engine.attention import decode, sm90
from vllm_gptoss.engine.kernels import attention_many, nvrtc

pytestmark = pytest.mark.vllm
MADE = inspect.signature(FlashAttentionImpl.__init__)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 as a name: without a GPU vLLM has none and cannot make its attention."""

    def built(self: Any, *arguments: Any, **named: Any) -> None:
        given = MADE.bind(self, *arguments, **named)
        given.apply_defaults()
        vars(self).update({name: value for name, value in given.arguments.items() if name != "self"})
        self.sliding_window = (-1, -1) if self.sliding_window is None else (self.sliding_window - 1, 0)
        self.logits_soft_cap = self.logits_soft_cap or 0
        self.vllm_flash_attn_version, self.dcp_world_size, self.batch_invariant_enabled = 3, 1, False

    monkeypatch.setattr(FlashAttentionImpl, "__init__", built)
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *_: "upstream")
    monkeypatch.setattr(sm90.worker, "flash_attention_version", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def impl(kind: type[FlashAttentionImpl], window: int | None = None, **other: Any) -> Any:
    given = {"sinks": torch.zeros(64, dtype=torch.bfloat16), "kv_cache_dtype": "auto", **other}
    return kind(64, 64, 0.125, 8, None, window, **given)


def enabled(window: int | None = None, most: int = 1) -> Any:
    """Our attention of a layer, after `set_up`. most: tokens of one request."""
    made = impl(sm90.GptOssFlashAttentionImpl, window)
    made.most_per_request = most
    return made


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, float, int]]:
    """What the kernel was given: tokens of queries and output, scale and window."""
    calls: list[tuple[int, int, float, int]] = []

    def attend(q: Any, cache: Any, sinks: Any, table: Any, lens: Any, starts: Any, out: Any, *rest: Any) -> None:
        *given, tuned = rest
        assert tuned == attention_many.plan(q.shape[0], given[-1])
        calls.append((q.shape[0], out.shape[0], *given))

    monkeypatch.setattr(attention_many, "attend", attend)
    return calls


def step(of: Any, tokens: int, longest: int = 1, padded: int | None = None, **other: Any) -> Any:
    """What `of` answers to a step."""
    rows = torch.zeros(padded or tokens, 64, 64, dtype=torch.bfloat16)
    metadata = SimpleNamespace(
        num_actual_tokens=tokens, max_query_len=longest, causal=True, block_table=None, seq_lens=None,
        query_start_loc=None,
    )  # fmt: skip
    cache = torch.zeros(2, 8, 16, 128, dtype=torch.bfloat16)
    given = {"metadata": metadata, "output_scale": None, **other}
    return of.forward(None, rows, None, None, cache, given["metadata"], rows.clone(), given["output_scale"])


@pytest.mark.parametrize(
    ("most", "tokens", "longest", "ours"),
    [
        *((1, 16, 1, False), (1, 17, 1, True), (1, 512, 1, True), (1, 513, 1, False), (1, 64, 2, False)),
        *((1, 17, 17, False), (8, 16, 4, False), (8, 17, 4, True), (8, 512, 8, True), (8, 512, 9, False)),
        *((8, 516, 4, False), (8, 64, 1, True)),
    ],
)
def test_steps_of_the_band_are_ours_up_to_a_limit_of_each_request(
    launched: list[tuple[int, int, float, int]], most: int, tokens: int, longest: int, ours: bool
) -> None:
    answer = step(enabled(most=most), tokens, longest)
    assert bool(launched) is ours
    assert isinstance(answer, torch.Tensor) is ours


@pytest.mark.parametrize(("given", "window"), [(None, 0), (128, 128)])
def test_the_kernel_gets_the_layers_window_and_scale(
    launched: list[tuple[int, int, float, int]], given: int | None, window: int
) -> None:
    step(enabled(given), 30)
    assert launched == [(30, 30, 0.125, window)]


def test_rows_past_the_step_are_not_computed(launched: list[tuple[int, int, float, int]]) -> None:
    step(enabled(), 30, padded=32)
    assert launched == [(30, 32, 0.125, 0)]


def test_what_is_not_plain_is_upstreams(launched: list[tuple[int, int, float, int]]) -> None:
    of = enabled()
    assert step(of, 30, metadata=None) == "upstream"  # profiling
    assert step(of, 30, output_scale=torch.ones(1)) == "upstream"
    assert of.most_per_request == 1
    assert not launched


def test_a_fault_leaves_the_layer_to_upstream_with_one_line(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise nvrtc.NvrtcError("no such kernel")

    monkeypatch.setattr(attention_many, "attend", broken)
    of = enabled()
    assert [step(of, 30) for _ in range(2)] == ["upstream", "upstream"]
    assert lines(said) == ["attention: upstream from here on (NvrtcError: no such kernel)"]
    assert of.most_per_request == 0


def test_a_cache_that_it_cannot_read_leaves_the_layer_to_upstream(
    launched: list[tuple[int, int, float, int]], said: pytest.LogCaptureFixture
) -> None:
    of, rows = enabled(), torch.zeros(30, 64, 64, dtype=torch.bfloat16)
    cache = torch.zeros(2, 8, 48, 128, dtype=torch.bfloat16)
    metadata = SimpleNamespace(num_actual_tokens=30, max_query_len=1, causal=True)
    assert of.forward(None, rows, None, None, cache, metadata, rows.clone()) == "upstream"
    assert not launched
    assert lines(said) == [
        "attention: upstream from here on (cache blocks of 48 tokens, not a power of two from 16 on)"
    ]


# The plan


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether upstream's builder was to plan, of each step."""
    calls: list[bool] = []
    upstream = sm90.FlashAttentionMetadataBuilder
    monkeypatch.setattr(upstream, "build", lambda self, prefix, common, fast: calls.append(not fast))
    return calls


def own(of: Any, *aside_now: str, most: int = 1) -> Any:
    """The builder `of`, with our attention in its layers except the disabled ones; most: tokens of a request there."""
    for name, layer in of.compilation_config.static_forward_context.items():
        layer.impl.most_per_request = 0 if name in aside_now else most
    return of


@pytest.mark.parametrize(
    ("tokens", "longest", "plans"),
    [(16, 1, False), (17, 1, False), (512, 1, False), (513, 1, True), (30, 2, True), (512, 300, True)],
)
def test_what_the_kernel_takes_needs_no_plan(planned: list[bool], tokens: int, longest: int, plans: bool) -> None:
    own(builder((127, 0), (127, 0), largest=512)).build(0, Common(tokens, longest))
    assert planned == [plans]


def test_one_layer_that_stepped_aside_has_its_plan(planned: list[bool]) -> None:
    own(builder((127, 0), (127, 0)), "1").build(0, Common(30))
    assert planned == [True]


@pytest.mark.parametrize(
    ("mode", "drafts"),
    [(CUDAGraphMode.FULL, 0), (CUDAGraphMode.FULL_AND_PIECEWISE, 3), (CUDAGraphMode.FULL_DECODE_ONLY, 3)],
)
def test_graphs_that_also_serve_several_tokens_a_request_are_planned(
    planned: list[bool], mode: CUDAGraphMode, drafts: int
) -> None:
    """FA3 is in them, for every step that replays one."""
    own(builder((-1, -1), mode=mode, drafts=drafts)).build(0, Common(64, 1))
    assert planned == [True]


@pytest.mark.parametrize(
    ("mode", "drafts", "plans"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, 3, False),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 7, False),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 8, True),
        (CUDAGraphMode.FULL_DECODE_ONLY, 3, False),
        (CUDAGraphMode.FULL, 3, True),
    ],
)
@pytest.mark.parametrize("longest", [1, 2, None])
def test_a_step_of_drafts_is_planned_if_and_only_if_fa3_is_in_its_graph(
    planned: list[bool], mode: CUDAGraphMode, drafts: int, plans: bool, longest: int | None
) -> None:
    """Whatever the step's longest request has (None: as the capture, one more than the drafts)."""
    of = own(builder((-1, -1), mode=mode, drafts=drafts), most=8)
    of.build(0, Common(64, longest or 1 + drafts))
    assert planned == [plans]


# The layers


def layers(*windows: int | None, **other: Any) -> list[Any]:
    """As many of vLLM's `Attention`, built while our backend is registered."""
    backend = sm90.GptOssFlashAttentionBackend
    return [
        SimpleNamespace(attn_backend=backend, dtype=torch.bfloat16, impl=impl(backend.get_impl_cls(), window, **other))
        for window in windows
    ]


def model(attention: list[Any]) -> Any:
    of = [SimpleNamespace(attn=SimpleNamespace(attn=layer)) for layer in attention]
    return SimpleNamespace(model=SimpleNamespace(layers=[*of, SimpleNamespace()]))  # a layer of another stage


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int, str, str]]:
    calls: list[tuple[int, int, int, str, str]] = []
    monkeypatch.setattr(attention_many, "load", lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize("most", [1, 8])
def test_layers_take_decode_steps_once_their_kernels_are_compiled(
    loaded: list[tuple[int, int, int, str, str]], most: int
) -> None:
    attention = layers(128, None, 128)
    assert [step(layer.impl, 30) for layer in attention] == ["upstream"] * 3
    assert decode.set_up(model(attention), most)
    assert sorted(loaded) == [(0, 8, 0, "Bf16", "sm_90"), (0, 8, 128, "Bf16", "sm_90")]
    assert [layer.impl.most_per_request for layer in attention] == [most] * 3


def test_layers_that_vllm_built_with_another_backend_are_not_ours(loaded: list[tuple[int, int, int, str, str]]) -> None:
    attention = layers(128)
    attention[0].attn_backend = FlashAttentionBackend
    assert not decode.set_up(model(attention))
    assert not loaded
    assert step(attention[0].impl, 30) == "upstream"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"kv_cache_dtype": "fp8"}, "queries are torch.bfloat16, the KV cache fp8"),
        ({"sinks": None}, "no sinks in bfloat16"),
        ({"logits_soft_cap": 30.0}, "ALiBi, a soft cap, or an encoder"),
        ({"attn_type": "encoder"}, "ALiBi, a soft cap, or an encoder"),
    ],
)
def test_what_the_kernel_does_not_compute_stays_upstreams(
    loaded: list[tuple[int, int, int, str, str]], said: pytest.LogCaptureFixture, other: dict[str, Any], why: str
) -> None:
    attention = layers(128, None, **other)
    assert decode.set_up(model(attention))
    assert [step(layer.impl, 30) for layer in attention] == ["upstream"] * 2
    startup_line.say()
    choices = startup_line.WorkerChoices().gptoss_choices()
    assert choices == {"attention of vLLM's layers": f"FlashAttention 3 ({why})"}
    assert lines(said) == [], "the fused layers may run, so no warning names attention"


def test_a_kernel_that_does_not_compile_leaves_upstreams(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise nvrtc.NvrtcError("NVRTC failed")

    monkeypatch.setattr(attention_many, "load", refused)
    attention = layers(128, None)
    assert decode.set_up(model(attention))
    assert [step(layer.impl, 30) for layer in attention] == ["upstream"] * 2
    assert lines(said) == ["attention: upstream from here on (NvrtcError: NVRTC failed)"]
