"""A stop string ends the answer and nothing else, for every cut of the tokens and every output kind of vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.harmony_streams import tokens
from vllm_gptoss.server.chat.chat import ChatReader
from vllm_gptoss.server.harmony.offered import OfferedTools
from vllm_gptoss.server.harmony.stops import StopFinder

THOUGHT = "<|channel|>analysis<|message|>STOP is only thought.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f<|message|>{"a": "STOP"}<|end|><|start|>assistant'
ANSWER = "<|channel|>final<|message|>one STOP two<|return|>"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_any_cut_of_a_text_stops_where_the_whole_text_does(text: str, stops: list[str], data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    finder, told = StopFinder(stops), ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        told += finder.feed(text[start:end])
        assert not any(stop in told for stop in stops)
    told += finder.flush()
    places = [text.find(stop) for stop in stops if stop in text]
    # A stop string that is complete earlier may hide one that begins before it; neither is returned.
    assert told == text if not places else text.startswith(told) and finder.found in stops and len(told) >= min(places)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_and_calls_may_contain_a_stop_string(size: int) -> None:
    reader = ChatReader(OfferedTools({"functions": frozenset({"f"})}), ["STOP"])
    ids = tokens(THOUGHT + CALL + ANSWER)
    deltas = [reader.feed(ids[at : at + size]) for at in range(0, len(ids), size)] + [reader.finish()]
    assert "".join(delta.reasoning for delta in deltas) == "STOP is only thought."
    assert "".join(call.arguments for delta in deltas for call in delta.calls) == '{"a": "STOP"}'
    assert "".join(delta.content for delta in deltas) == "one "
    assert reader.stopped == "STOP"


def test_a_stop_string_among_the_first_min_tokens_is_text() -> None:
    reader = ChatReader(OfferedTools(), ["STOP"], min_tokens=len(tokens("<|channel|>final<|message|>one STOP two")))
    assert reader.feed(tokens("<|channel|>final<|message|>one STOP two STOP three")).content == "one STOP two "


class Engine:
    """Streams `texts` as vLLM does, a token an output and a choice after the other, until it is closed."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.params: Any = None
        self.sent = 0
        self.closed = False

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncGenerator[Any, None]:
        from vllm.outputs import CompletionOutput, RequestOutput

        self.params = params
        try:
            streams = [tokens(text) for text in self.texts]
            for at in range(max(map(len, streams))):
                for index, ids in enumerate(streams):
                    if at < len(ids):
                        self.sent += 1
                        reason = "stop" if at + 1 == len(ids) else None
                        choice = CompletionOutput(index, "", ids[at : at + 1], 0.0, None, finish_reason=reason)
                        ended = all(at + 1 >= len(other) for other in streams)
                        yield RequestOutput(request_id, None, prompt, None, [choice], ended)
        finally:
            self.closed = True


def generate(engine: Engine, makes_text: bool = True, **fields: Any) -> list[Any]:
    from vllm.sampling_params import SamplingParams

    from vllm_gptoss.server.chat.vllm_stops import AnswerStops

    async def run() -> list[Any]:
        params = SamplingParams(n=len(engine.texts), max_tokens=500, **fields)
        return [output async for output in AnswerStops(engine, makes_text=makes_text).generate([1], params, "r")]

    return asyncio.run(run())


def kinds() -> Sequence[Any]:
    from vllm.sampling_params import RequestOutputKind

    return (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)


@pytest.mark.vllm
@pytest.mark.parametrize("kind", [0, 1], ids=["deltas", "whole"])
def test_the_engine_is_stopped_by_the_answer_only(kind: int) -> None:
    engine = Engine(THOUGHT + CALL + ANSWER * 20)
    outputs = generate(engine, stop=["STOP"], output_kind=kinds()[kind])
    ids = [token for output in outputs for token in output.outputs[0].token_ids]
    assert ids == tokens(THOUGHT + CALL + ANSWER)[: len(ids)]
    assert len(ids) == engine.sent, "not a token more was generated"
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason, outputs[-1].finished) == ("stop", "STOP", True)
    assert engine.closed
    assert engine.params.stop == []
    if kind == 1:
        assert len(outputs) == 1


@pytest.mark.vllm
@pytest.mark.parametrize("kind", [0, 1], ids=["deltas", "whole"])
def test_each_choice_has_its_own_end(kind: int) -> None:
    long = "<|channel|>final<|message|>" + "word " * 40 + "<|return|>"
    outputs = generate(Engine(ANSWER, long), stop="STOP", output_kind=kinds()[kind])
    ends = {choice.index: choice.stop_reason for output in outputs for choice in output.outputs if choice.finish_reason}
    assert ends == {0: "STOP", 1: None}
    assert sum(len(c.token_ids) for o in outputs for c in o.outputs if c.index == 1) == len(tokens(long))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("fields", "makes_text"),
    [({}, False), ({"stop": ["STOP"]}, False), ({"logprobs": 1}, True), ({"prompt_logprobs": 1}, True)],
)
def test_text_is_made_only_where_somebody_reads_it(fields: dict[str, Any], makes_text: bool) -> None:
    """Logprobs contain the text of their tokens."""
    for asked in (True, False):
        engine = Engine(ANSWER)
        assert generate(engine, asked, output_kind=kinds()[0], **fields)
        assert engine.params.detokenize is (asked or makes_text)


@pytest.mark.vllm
def test_a_request_without_stop_strings_goes_through_as_it_is() -> None:
    engine = Engine(ANSWER)
    assert len(generate(engine, output_kind=kinds()[1])) == engine.sent
