"""Attention for decode steps of many tokens against the float64 oracle, on the GPU it is made for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu import cases
from tests.gpu.cases import EDGES, PARALLEL, ragged
from tests.gpu.marks import SM90
from vllm_gptoss.engine.choose import bands
from vllm_gptoss.engine.kernels import attention_many, nvrtc

pytestmark = SM90

STEPS: dict[str, list[int]] = {
    "edges": EDGES,
    "17": [576] * 17,
    "32": ragged(32, 2000),
    "64": [576] * 64,
    "100": ragged(100, 1500),
    "511": ragged(511, 700),  # and one of padding, as every case has
    "one long": [200] * 31 + [30_000] + [200] * 32,
    "16k": [16_384, 3, 9_000, *ragged(20, 300)],
    "all of one key": [1] * 40,
}


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_decode_step_of_any_lengths(step: str, strided: bool, window: int) -> None:
    lengths = STEPS[step]
    cases.attention(attention_many.attend, 8, window, lengths, [1] * len(lengths), strided)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_heads_of_a_rank(parallel: int, window: int) -> None:
    lengths = ragged(40, 3000)
    cases.attention(attention_many.attend, 8 // parallel, window, lengths, [1] * 40, strided=True)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_cache_blocks_of_any_power_of_two(block: int, window: int) -> None:
    cases.attention(attention_many.attend, 8, window, EDGES, [1] * len(EDGES), strided=True, block=block)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("lengths", "queries"), cases.BATCHES)
def test_requests_of_several_tokens_or_none(lengths: list[int], queries: list[int], window: int) -> None:
    cases.attention(attention_many.attend, 8, window, lengths, queries, strided=True)
    cases.attention(attention_many.attend, 8, window, [*lengths, 5000], [*queries, 3], strided=False)


@pytest.mark.parametrize("window", [0, 128])
def test_a_graph_serves_lengths_that_it_was_not_captured_with(window: int) -> None:
    """Of a step of one length each: one long request, then all short, then fewer requests than tokens."""
    steps = ([19_000] + [100] * 47, ragged(48, 300), [7_000] * 24 + [0] * 24, [576] * 48)
    cases.attention_in_a_graph(attention_many.attend, 8, window, steps)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("each", range(1, bands.MOST_PER_REQUEST + 1))
def test_drafts_of_every_request(each: int, strided: bool, window: int) -> None:
    """The last tokens of a request on both sides of a block, of a chunk of keys and of the window; one is split."""
    lengths = [max(length, each) for length in (16, 17, 128, 129, 143, 144, 145, 512, 1023, 5000, *ragged(8, 900))]
    lengths += [each, 16 + each, 127 + each, 128 + each]
    cases.attention(attention_many.attend, 8, window, lengths, [each] * len(lengths), strided)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("requests", "each"), [(127, 4), (63, 8), (170, 3), (255, 2)])
def test_drafts_fill_the_largest_step(requests: int, each: int, window: int) -> None:
    """Up to 511 tokens and one of padding."""
    lengths = [max(length, each) for length in ragged(requests, 1200)]
    cases.attention(attention_many.attend, 8, window, lengths, [each] * requests, strided=True)


@pytest.mark.parametrize("window", [0, 128])
def test_drafts_beside_ends_of_prompts_and_requests_without_any(window: int) -> None:
    queries = [4, 1, 8, 2, 0, 3, 4, 7, 1, 0, 5, 6, 4, 0, 0]
    lengths = [300, 1, 8, 129, 50, 130, 20_000, 7, 4000, 0, 133, 128, 576, 0, 0]
    cases.attention(attention_many.attend, 8, window, lengths, queries, strided=True)


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("each", [2, 4, 8])
def test_a_graph_of_drafts_serves_other_lengths_and_fewer_requests(each: int, window: int) -> None:
    steps = ([19_000] + [100] * 15, ragged(16, 300), [7_000] * 9 + [0] * 7, [each] * 16, [600] + [0] * 15)
    cases.attention_in_a_graph(
        attention_many.attend, 8, window, [[length and max(length, each) for length in step] for step in steps], each
    )


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    attention_many.kernel.cache_clear()
    yield
    attention_many.kernel.cache_clear()


FAULTS = {
    "a piece is left out": (0, "from + i < p.pieces ?", "from + i < p.pieces - 1 ?"),
    "a key too many": (128, "p.low = max(0, keys - T::window)", "p.low = max(0, keys - T::window - 1)"),
    "a row of the ring": (0, "(at ^ (n & 7) * 16)", "(at ^ (n & 3) * 16)"),
    "a draft sees those after it": (0, "keys = max(0, len - after)", "keys = len"),
    "a draft's window is the last one's": (128, "keys = max(0, len - after)", "keys = len"),
    "a draft is of the request before": (128, "[r + tid + 1] <= token", "[r + tid + 1] < token"),
    "pieces of drafts overlap": (0, " + (p.token - a.query_start[p.request]) * (p.pieces - 1)", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("compiled_anew")
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, (window, there, instead) = nvrtc.source(attention_many.SOURCE), FAULTS[fault]
    assert whole.count(there) == 1
    monkeypatch.setattr(nvrtc, "source", lambda path: whole.replace(there, instead))
    with pytest.raises(AssertionError):
        cases.attention(attention_many.attend, 8, window, [5000, 300] + [40] * 20, [4, 1] * 11, strided=True)
