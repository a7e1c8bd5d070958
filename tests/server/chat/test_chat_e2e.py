"""Chat completions of a real `vllm serve` without tool flags, with normal and with forced malformed output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.server import NAME, Server
from tests.support.harmony_streams import tokens

pytestmark = [pytest.mark.vllm, pytest.mark.serve]

ROOT = Path(__file__).parents[3]
QUESTION = "What is the weather in Paris?"


def function(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function(
    "get_weather", "Get the current weather for a location", {"city": {"type": "string", "description": "The city"}}
)
TIME = function("get_time", "Get the current time.", {})


def post(server: Server, **fields: Any) -> httpx.Response:
    body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, **fields}
    return httpx.post(f"{server.api}/chat/completions", json={"max_completion_tokens": 200, **body}, timeout=120)


def ask(server: Server, **fields: Any) -> tuple[Any, ...]:
    """Reasoning, content, calls and finish reason; the same streamed and not."""
    answer = whole(server, **fields)
    assert streamed(server, **fields) == answer
    return answer


def whole(server: Server, **fields: Any) -> tuple[Any, ...]:
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return message.get("reasoning") or None, message.get("content") or None, calls, choice["finish_reason"]


def streamed(server: Server, **fields: Any) -> tuple[Any, ...]:
    reasoning, content, finish = "", "", None
    calls: dict[int, list[str]] = {}
    for line in post(server, stream=True, **fields).text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning") or ""
            content += delta.get("content") or ""
            finish = choice["finish_reason"] or finish
            for call in delta.get("tool_calls") or ():
                made = calls.setdefault(call["index"], ["", ""])
                made[0] += call["function"].get("name") or ""
                made[1] += call["function"].get("arguments") or ""
    return reasoning or None, content or None, [tuple(call) for call in calls.values()], finish


def test_a_call_needs_no_server_flag(served: Server) -> None:
    reasoning, content, calls, finish = ask(served, tools=[WEATHER])
    assert calls == [("get_weather", '{"city":"Paris"}')]
    assert (content, finish) == (None, "tool_calls")
    assert reasoning


def test_a_result_is_answered(served: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    history = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "reasoning": "I need the weather in Paris. Call get_weather.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    _, content, calls, finish = ask(served, messages=history, tools=[WEATHER])
    assert (content, calls, finish) == ("It is sunny in Paris.", [], "stop")


@pytest.mark.parametrize("answer", [whole, streamed])
def test_tool_choice_is_kept_whatever_the_model_wants(served: Server, answer: Callable[..., tuple[Any, ...]]) -> None:
    """Where the small model has learnt nothing its tokens nearly tie, so two answers may differ in their text."""
    named = {"type": "function", "function": {"name": "get_time"}}
    _, _, calls, finish = answer(served, tools=[WEATHER, TIME], tool_choice=named)
    assert [name for name, _ in calls] == ["get_time"]
    assert finish == "stop"
    assert len(answer(served, tools=[WEATHER], tool_choice="required")[2]) == 1
    assert answer(served, tools=[WEATHER], tool_choice="none")[2] == []


def test_reasoning_can_be_hidden_and_is_counted(served: Server) -> None:
    shown = ask(served)
    assert shown[0]
    hidden = ask(served, include_reasoning=False)
    assert hidden == (None, *shown[1:])
    usage = post(served).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(tokens(shown[0]))


def test_two_choices_are_two_whole_answers(served: Server) -> None:
    choices = post(served, n=2, temperature=0.5).json()["choices"]
    assert len(choices) == 2
    assert all(choice["message"]["content"] for choice in choices)


def test_a_stop_string_is_not_in_the_answer(served: Server) -> None:
    reasoning, content, _, finish = ask(served)
    word = content.split()[2]
    cut = ask(served, stop=[word])
    assert cut == (reasoning, content.split(word)[0], [], finish)


def test_a_stop_string_in_the_reasoning_does_not_end_the_turn(forced: Server) -> None:
    thought = "<|channel|>analysis<|message|>Say blue.<|end|><|start|>assistant"
    ids = tokens(thought + "<|channel|>final<|message|>It is blue, and blue it stays.<|return|>")
    fields = {"stop": ["blue"], "vllm_xargs": {"forced": " ".join(map(str, ids))}}
    assert ask(forced, **fields) == ("Say blue.", "It is ", [], "stop")
    body = post(forced, **fields).json()
    assert body["choices"][0]["stop_reason"] == "blue"
    assert body["usage"]["completion_tokens"] == len(tokens(thought + "<|channel|>final<|message|>It is blue"))
    two = post(forced, **fields, n=2, temperature=1).json()["choices"]
    assert [choice["message"]["content"] for choice in two] == ["It is ", "It is "]


def test_allowed_tools_are_the_only_ones(served: Server) -> None:
    only = {"type": "function", "function": {"name": "get_time"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [only]}}
    assert [name for name, _ in ask(served, tools=[WEATHER, TIME], tool_choice=choice)[2]] == ["get_time"]
    refused = post(served, tools=[WEATHER], tool_choice=choice)
    assert refused.status_code == 400
    assert "get_time" in refused.text


THOUGHT = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
SAID = THOUGHT + "<|channel|>final<|message|>It is 👩‍🚀 blue.<|return|>"
HIDDEN = {"include_reasoning": False}


def logprobs_of(server: Server, stream: bool, **fields: Any) -> tuple[str, str]:
    """The answer, and what the tokens of its logprobs spell."""
    answer = post(server, logprobs=True, top_logprobs=1, stream=stream, **fields)
    if not fields.get("include_reasoning", True):
        assert "Think" not in answer.text
        assert '"token_ids":[' not in answer.text.replace(" ", "")
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.text]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    content = "".join(choice.get("delta", choice.get("message")).get("content") or "" for choice in choices)
    entries = [entry for choice in choices for entry in (choice.get("logprobs") or {"content": []})["content"]]
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
    return content, b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace")


@pytest.mark.parametrize("hidden", [{}, HIDDEN, {**HIDDEN, "return_token_ids": True}])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_cover_the_answer_alone(forced: Server, stream: bool, hidden: dict[str, Any]) -> None:
    ids = tokens(SAID)
    fields = {**hidden, "vllm_xargs": {"forced": " ".join(map(str, ids))}}
    content, spelled = logprobs_of(forced, stream, **fields)
    assert content == "It is 👩‍🚀 blue."
    assert "".join(character for character in spelled if character.isascii()) == "It is  blue."
    cut, spelled = logprobs_of(forced, stream, stop=["ue"], **fields)
    assert cut == "It is 👩‍🚀 bl"
    assert spelled.endswith(" blue"), "the token that the stop string cut"
    asked = {**fields, "vllm_xargs": {"forced": " ".join(map(str, tokens(ASK)))}, "tools": [WEATHER]}
    assert logprobs_of(forced, stream, **asked) == ("", "")


@pytest.mark.parametrize("shown", [False, True])
def test_a_batch_hides_reasoning_in_every_field(forced: Server, shown: bool) -> None:
    body = {
        "model": NAME,
        "messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
        "logprobs": True,
        "return_token_ids": True,
        "include_reasoning": shown,
        "vllm_xargs": {"forced": " ".join(map(str, tokens(SAID)))},
        "max_completion_tokens": len(tokens(SAID)),
    }
    for choice in httpx.post(f"{forced.api}/chat/completions/batch", json=body, timeout=120).json()["choices"]:
        assert choice["message"]["reasoning"] == ("Think." if shown else None)
        assert (choice["token_ids"] is not None) == shown
        assert choice["logprobs"]["content"][0]["token"] == "It"


def test_a_schema_is_followed(served: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"sunny": {"type": "boolean"}, "scale": {"enum": ["celsius"]}},
        "required": ["sunny", "scale"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    _, content, _, finish = ask(served, response_format=wanted)
    assert finish == "stop"
    assert json.loads(content) in ({"sunny": value, "scale": "celsius"} for value in (True, False))


def test_what_a_text_model_cannot_read_is_refused_by_name(served: Server) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    response = post(served, messages=image)
    assert response.status_code == 400
    assert "messages[0].content[0]" in response.text


ASK = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ülm"}<|call|>'
FORCED = {
    "missing start": (
        "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b<|return|>",
        ("a", "b", [], "stop"),
    ),
    "no header": ("Plain words 👩‍🚀.<|return|>", (None, "Plain words 👩‍🚀.", [], "stop")),
    "no arguments": (
        "<|channel|>commentary to=functions.get_time<|message|><|call|>",
        (None, None, [("get_time", "{}")], "tool_calls"),
    ),
}
"""Of the answers in `test_vllm_parser.py`: one of each kind of message."""


@pytest.mark.parametrize("name", FORCED)
def test_malformed_output_reaches_the_client(forced: Server, name: str) -> None:
    text, expected = FORCED[name]
    ids = tokens(text)
    got = ask(forced, tools=[WEATHER, TIME], vllm_xargs={"forced": " ".join(map(str, ids))})
    assert got == expected


def test_a_cut_call_keeps_its_text(forced: Server) -> None:
    ids = tokens(ASK.split("Ülm")[0])
    fields = {"tools": [WEATHER], "vllm_xargs": {"forced": " ".join(map(str, ids))}, "max_completion_tokens": len(ids)}
    assert streamed(forced, **fields)[2:] == ([("get_weather", '{"city": "')], "length")
    # finish_reason is "tool_calls" in vLLM 0.32 and "length" in 0.33.
    (choice,) = post(forced, **fields).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


def message(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    """The answer of `/v1/messages` when the model generates `text`."""
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in (WEATHER, TIME)
    ]
    forced = {"forced": " ".join(map(str, tokens(text)))}
    body = {"model": NAME, "max_tokens": 200, "messages": [{"role": "user", "content": QUESTION}], "tools": tools}
    answer = httpx.post(f"{server.url}/v1/messages", json={**body, "vllm_xargs": forced, **fields}, timeout=120)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_a_cut_call_of_a_message_is_left_out_and_its_thoughts_stay(forced: Server) -> None:
    """vLLM's handler decodes arguments: the whole answer was a 400, "Unterminated string"."""
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + ASK.split("Ülm")[0]
    made = message(forced, text, max_tokens=len(tokens(text)))
    assert [block["type"] for block in made["content"]] == ["thinking"]
    assert made["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", ['{"city": "Paris"', "[1]", "Paris"])
def test_arguments_that_are_no_object_reach_a_message_as_they_are(forced: Server, arguments: str) -> None:
    made = message(forced, ASK.replace('{"city": "Ülm"}', arguments))
    (block,) = made["content"]
    assert (block["name"], block["input"]) == ("get_weather", {"INVALID_JSON": arguments})
    assert made["stop_reason"] == "tool_use"


TWO = ASK.replace("<|call|>", "<|end|><|start|>assistant") + ASK.replace("get_weather", "get_time").replace(
    '{"city": "Ülm"}', "{}"
)


def test_two_calls_in_one_turn_are_both_there_where_the_client_allows(forced: Server) -> None:
    """gpt-oss was trained to make one; one that does otherwise loses nothing."""
    made = message(forced, TWO)
    assert [(block["name"], block["input"]) for block in made["content"]] == [
        ("get_weather", {"city": "Ülm"}),
        ("get_time", {}),
    ]
    one = message(forced, TWO, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["name"] for block in one["content"]] == ["get_weather"]
    fields = {"tools": [WEATHER, TIME], "vllm_xargs": {"forced": " ".join(map(str, tokens(TWO)))}}
    assert [name for name, _ in ask(forced, **fields)[2]] == ["get_weather", "get_time"]
    assert [name for name, _ in ask(forced, **fields, parallel_tool_calls=False)[2]] == ["get_weather"]


def test_repairs_are_counted_and_logged_once(forced: Server) -> None:
    ids = tokens("<|message|>b<|return|>")
    for _ in range(3):
        post(forced, vllm_xargs={"forced": " ".join(map(str, ids))})
    metrics = httpx.get(f"{forced.url}/metrics").text
    (line,) = [row for row in metrics.splitlines() if row.startswith("gptoss_harmony_repairs_total{") and "g_ch" in row]
    assert float(line.rsplit(" ", 1)[1]) >= 3
    assert forced.log.read_text().count("read anyway: missing_channel") == 1
