"""vLLM's own request and parser objects, fed with what the model generates: what a chat client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.chat_requests import ASK, NOW, THINK, WEATHER, request_of
from tests.support.harmony_streams import tokens

pytestmark = pytest.mark.vllm


def parser_of(request: Any, level: str | None = None, **names: Any) -> Any:
    """The parser that vLLM would build for this request on a gpt-oss server."""
    from vllm.parser.parser_manager import ParserManager

    from vllm_gptoss.server.chat.vllm_parser import install

    assert install()
    options = {"reasoning_parser_name": "openai_gptoss", "is_harmony": True, "model_name": "m", **names}
    if level:
        options["tool_strict_level"] = level
    cls = ParserManager.get_parser(**options)
    assert cls is not None
    return cls(None, request.tools)


def whole(text: str, **fields: Any) -> tuple[Any, Any, Any]:
    request = request_of(**fields)
    reasoning, content, calls = parser_of(request).parse("", request, model_output_token_ids=tokens(text))
    return reasoning, content, [(call.name, call.arguments) for call in calls or ()]


def streamed(text: str, size: int = 1, **fields: Any) -> tuple[Any, Any, Any]:
    request = request_of(stream=True, **fields)
    parser, ids = parser_of(request), tokens(text)
    reasoning, content, calls = "", "", {}
    for at in range(0, len(ids), size):
        finished = at + size >= len(ids)
        delta = parser.parse_delta("", ids[at : at + size], request, finished=finished)
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for call in delta.tool_calls:
            name, arguments = calls.get(call.index, (None, ""))
            assert (call.id is not None) == (name is None)
            calls[call.index] = (name or call.function.name, arguments + (call.function.arguments or ""))
    return reasoning or None, content or None, list(calls.values())


REPLAYS = {
    "well formed": (THINK + ASK, ("Let me think.", None, [("get_weather", '{"city": "Ülm"}')])),
    "plain answer": (THINK + "<|channel|>final<|message|>Rain.<|return|>", ("Let me think.", "Rain.", [])),
    # Everything below is empty or wrong in vLLM 0.33.0's parser.
    "duplicated recipient": (
        "<|channel|>commentary to=functions.get_weather to=functions.get_weather json<|message|>{}<|call|>",
        (None, None, [("get_weather", "{}")]),
    ),
    "refusal without message": ("<|channel|>final I'm sorry, I can't.<|return|>", (None, "I'm sorry, I can't.", [])),
    "missing start": ("<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b<|return|>", ("a", "b", [])),
    "start twice": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|start|>assistant<|channel|>final<|message|>b<|return|>",
        ("a", "b", []),
    ),
    "stray words": ("<|channel|>final one two three<|message|>b<|return|>", (None, "b", [])),
    "json answer": ('<|channel|>final json<|message|>{"a": 1}<|return|>', (None, '{"a": 1}', [])),
    "json commentary": ('<|channel|>commentary json<|message|>{"a": 1}<|return|>', (None, '{"a": 1}', [])),
    "to user": ("<|channel|>final to=user<|message|>b<|return|>", (None, "b", [])),
    "no channel": ("<|message|>b<|return|>", (None, "b", [])),
    "unknown channel": ("<|channel|>answer<|message|>b<|return|>", (None, "b", [])),
    "no header": ("Just text.<|return|>", (None, "Just text.", [])),
    "tool not offered": (
        '<|channel|>commentary to=functions.rm_rf json<|message|>{"path": "/"}<|call|>',
        (None, '{"path": "/"}', []),
    ),
    "no arguments": ("<|channel|>commentary to=functions.now json<|message|><|call|>", (None, None, [("now", "{}")])),
    "ends before message": ("<|channel|>commentary to=functions.now<|call|>", (None, None, [("now", "{}")])),
    "preamble": (
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant" + ASK,
        (None, "I will look.", [("get_weather", '{"city": "Ülm"}')]),
    ),
    "two calls": (
        ASK.replace("<|call|>", "<|end|><|start|>assistant") + ASK,
        (None, None, [("get_weather", '{"city": "Ülm"}')] * 2),
    ),
    "an answer in two parts": (
        '<|channel|>final<|message|>{"a":<|end|><|start|>assistant<|channel|>final<|message|> 1}<|return|>',
        (None, '{"a": 1}', []),
    ),
    "beyond the answer": ("<|channel|>final<|message|>b<|return|><|channel|>final<|message|>c", (None, "b", [])),
    "a made-up result": (
        ASK + "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>sunny<|end|>",
        (None, None, [("get_weather", '{"city": "Ülm"}')]),
    ),
    "cut in a call": (ASK.split("Ülm")[0], (None, None, [("get_weather", '{"city": "')])),
    "cut in a header": (THINK + "<|channel|>fin", ("Let me think.", None, [])),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_nothing_is_lost_whole_or_streamed(name: str) -> None:
    text, expected = REPLAYS[name]
    assert whole(text, tools=[WEATHER, NOW]) == expected
    assert streamed(text, tools=[WEATHER, NOW]) == expected
    assert streamed(text, size=5, tools=[WEATHER, NOW]) == expected


def test_tool_choice_none_makes_a_call_content() -> None:
    fields = {"tools": [WEATHER], "tool_choice": "none"}
    assert whole(ASK, **fields) == streamed(ASK, **fields) == (None, '{"city": "Ülm"}', [])


def test_who_ignores_the_end_reads_on() -> None:
    text = "<|channel|>final<|message|>b<|return|><|channel|>commentary<|message|>c<|end|>"
    assert whole(text, ignore_eos=True) == streamed(text, ignore_eos=True) == (None, "b\nc", [])


def test_hidden_reasoning_is_not_streamed_but_counted() -> None:
    text = THINK + "<|channel|>final<|message|>Rain.<|return|>"
    assert streamed(text, include_reasoning=False) == (None, "Rain.", [])
    request = request_of()
    parser = parser_of(request)
    parser.parse("", request, model_output_token_ids=tokens(text))
    assert parser.count_reasoning_tokens(tokens(text)) == len(tokens("Let me think."))
    assert parser_of(request).count_reasoning_tokens(tokens(text)) == len(tokens("Let me think."))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings_are_not_part_of_the_answer(size: int) -> None:
    """The engine stops after the token that completes one; earlier parts of it must not have been streamed."""
    text = THINK + "<|channel|>final<|message|>one two END_OF"
    for fields, content in (({"stop": ["END_OF"]}, "one two "), ({"stop": "two END"}, "one "), ({}, "one two END_OF")):
        assert streamed(text, size, **fields) == ("Let me think.", content, [])
        assert whole(text, **fields) == ("Let me think.", content, [])
    kept = {"stop": ["END_OF"], "include_stop_str_in_output": True}
    assert streamed(text, size, **kept)[1] == "one two END_OF"
    finished = text.replace("END_OF", "END") + "<|return|>"
    assert streamed(finished, size, stop=["END_OF"])[1] == "one two END"


def adjusted(level: str = "function", **fields: Any) -> Any:
    request = request_of(**fields)
    return parser_of(request, level).adjust_request(request)


def test_calls_are_constrained_at_function_level_only() -> None:
    tag = adjusted(tools=[WEATHER]).structured_outputs.structural_tag
    assert "functions.get_weather" in tag
    assert "city" not in tag
    assert "city" in adjusted("parameter", tools=[WEATHER]).structured_outputs.structural_tag
    assert adjusted("auto", tools=[WEATHER]).structured_outputs is None
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    assert "city" in adjusted("auto", tools=[strict]).structured_outputs.structural_tag


def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_name_and_another_is_let_be() -> None:
    from vllm.exceptions import VLLMValidationError

    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": "(?<=a)b"}}}
    function = {**WEATHER["function"], "parameters": schema}
    with pytest.raises(VLLMValidationError, match="'get_weather': 'pattern'"):
        adjusted(tools=[{**WEATHER, "function": {**function, "strict": True}}])
    assert adjusted("parameter", tools=[{**WEATHER, "function": function}]).structured_outputs.structural_tag
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert adjusted(response_format=form).structured_outputs.structural_tag
    form["json_schema"]["strict"] = True
    with pytest.raises(VLLMValidationError, match="'n': 'pattern'"):
        adjusted(response_format=form)


def test_tool_choice_decides_which_calls_and_whether() -> None:
    named = {"type": "function", "function": {"name": "now"}}
    tag = adjusted(tools=[WEATHER, NOW], tool_choice=named).structured_outputs.structural_tag
    assert "functions.now" in tag
    assert "get_weather" not in tag
    assert "channel|>final" not in tag
    assert "channel|>final" not in adjusted(tools=[NOW], tool_choice="required").structured_outputs.structural_tag
    none = adjusted(tools=[NOW], tool_choice="none").structured_outputs.structural_tag
    assert "functions.now" not in none
    assert "channel|>final" in none


def test_a_response_format_becomes_the_final_message_and_stays_for_the_prompt() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "shape", "schema": schema}}
    request = adjusted(response_format=response_format, tools=[NOW])
    tag = json.loads(request.structured_outputs.structural_tag)
    assert any("::= integer" in grammar for grammar in _grammars(tag))
    assert request.response_format is None
    assert request.gptoss_response_format.name == "shape"
    for field, value in (("regex", "a+"), ("choice", ["a", "b"]), ("json_object", True), ("grammar", 'root ::= "a"')):
        assert adjusted(structured_outputs={field: value}).structured_outputs.structural_tag


def test_upstreams_responses_requests_are_constrained_too() -> None:
    """They come when GPTOSS_ENDPOINT=0 leaves /v1/responses to vLLM."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    function = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    tools = [function, {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "web_search_preview"}]
    request = ResponsesRequest(model="m", input="hi", tools=tools)
    parser = parser_of(request, "function")
    tag = parser.adjust_request(request).structured_outputs.structural_tag
    for recipient in ("functions.now", "python", "browser.search"):
        assert f"to={recipient}<|channel|>" in tag


def _grammars(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if node.get("type") == "grammar":
            yield node["grammar"]
        for inner in node.values():
            yield from _grammars(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _grammars(inner)


def test_install_twice_is_one_class_and_leaves_other_parsers_alone() -> None:
    from vllm.parser import harmony
    from vllm.parser.parser_manager import ParserManager

    from vllm_gptoss.server.chat.vllm_parser import install, parser_class

    assert install()
    assert install()
    assert harmony.HarmonyParser is parser_class()
    other = ParserManager.get_parser(reasoning_parser_name="qwen3", model_name="m")
    assert other is not None
    assert not issubclass(other, parser_class())


def test_the_seam_is_still_an_import_by_name() -> None:
    """`install` works only while ParserManager looks the class up in its module at each use."""
    import inspect

    from vllm.parser.parser_manager import ParserManager

    source = inspect.getsource(ParserManager._compose_parser)
    assert "from vllm.parser.harmony import HarmonyParser" in source
    assert "return HarmonyParser" in source
