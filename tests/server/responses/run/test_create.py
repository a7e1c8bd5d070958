"""Creating responses, streamed and not: text, reasoning, function calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.responses.events import check_response, kinds, stream
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import MODEL, Script, Start, create, harmony, running
from tests.support.responses.turns import CALL, HELLO, WEATHER
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.run.engine import Chunk, Sampling, TokenLogprob
from vllm_gptoss.server.streaming.direct_send import Direct


def test_plain_answer_is_a_whole_response(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        body = http.post("/responses", json={"model": MODEL, "input": "hi"}).raise_for_status().json()
    response = check_response(body)
    assert response.output_text == "Hello there!"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.status == "completed"
    assert response.usage.input_tokens == len(server.engine.prompts[0])
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == len(harmony("The user greets."))


def test_stream_has_the_documented_order(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        events = stream(http, {"model": MODEL, "input": "hi"})
    names = [name for name in kinds(events) if not name.endswith(".delta")]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_function_call_and_its_output(start: Start) -> None:
    server = start(CALL, HELLO)
    with server.http() as http:
        events = stream(http, {"model": MODEL, "input": "weather?", "tools": [WEATHER]})
        call = events[-1]["response"]["output"][-1]
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get_weather", '{"city":"Rome"}')
        answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        second = {
            "model": MODEL,
            "previous_response_id": events[-1]["response"]["id"],
            "input": [answer],
            "tools": [WEATHER],
        }
        assert stream(http, second)[-1]["response"]["status"] == "completed"
    prompt = server.prompt()
    assert "Look it up." in prompt, "reasoning stays while its tool call is open"
    assert prompt.endswith("to=assistant<|channel|>commentary<|message|>sunny<|end|><|start|>assistant")


@pytest.mark.parametrize("allowed", [None, True, False])
def test_several_calls_in_one_turn_are_for_clients_that_allow_them(start: Start, allowed: bool | None) -> None:
    """gpt-oss was trained to make one; where it makes two all the same, none is lost that the client wants."""
    more = (
        CALL.replace("<|call|>", "<|end|>")
        + "<|start|>assistant"
        + CALL.split("assistant", 1)[1].replace("Rome", "Oslo")
    )
    server = start(more, HELLO)
    fields = {"model": MODEL, "input": "weather?", "tools": [WEATHER], "parallel_tool_calls": allowed}
    with server.http() as http:
        response = stream(http, fields)[-1]["response"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        assert response["parallel_tool_calls"] is (allowed is not False)
        cities = [call["arguments"] for call in calls]
        assert cities == (['{"city":"Rome"}'] if allowed is False else ['{"city":"Rome"}', '{"city":"Oslo"}'])
        answers = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in calls]
        create(http, input=answers, previous_response_id=response["id"], tools=[WEATHER])
    assert server.prompt().count("<|message|>sunny<|end|>") == len(calls)


def test_obfuscation_pads_deltas_when_asked_for(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        body = {"model": MODEL, "input": "hi", "stream_options": {"include_obfuscation": True}}
        events = stream(http, body, strict=False)
        deltas = [event for event in events if event["type"].endswith(".delta")]
        assert deltas
        assert all(event["obfuscation"] for event in deltas)


def test_open_responses_names_by_path_or_header(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        version = {"OpenResponses-Version": "2026-04-24"}
        for path, headers in (("/openresponses/responses", {}), ("/responses", version)):
            body = {"model": MODEL, "input": "hi", "stream": True}
            text = http.post(path, json=body, headers=headers).raise_for_status().text
            assert "response.reasoning.delta" in text
            assert "reasoning_text.delta" not in text


class Unlikely(ReplayEngine):
    """Gives log-probabilities as vLLM does for tokens that a processor or a grammar has masked."""

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, request_id: str, direct: Direct | None = None
    ) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(prompt, sampling, request_id, direct):
            logprobs = [TokenLogprob(t, float("-inf"), [(t, float("-inf"))]) for t in chunk.token_ids]
            yield replace(chunk, logprobs=logprobs)


@pytest.mark.parametrize("streams", [False, True])
def test_a_probability_of_zero_is_a_number(tmp_path: Path, streams: bool) -> None:
    options = ResponsesOptions(store=str(tmp_path / "store.sqlite"))
    body = {"model": MODEL, "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    with running(Unlikely(Script(HELLO)), options) as server, server.http() as http:
        response = stream(http, body)[-1]["response"] if streams else create(http, **body)
    (entry, *_) = response["output"][-1]["content"][0]["logprobs"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
