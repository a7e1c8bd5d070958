"""Texts that a constrained turn may and may not contain, checked by xgrammar with the o200k_harmony vocabulary."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import xgrammar

from tests.support.harmony_streams import tokens
from vllm_gptoss.server.harmony.events import EndedBy, MessageEnded
from vllm_gptoss.server.harmony.grammar import EBNF, Call, FreeText, JSONArguments, structural_tag
from vllm_gptoss.server.harmony.held import Held
from vllm_gptoss.server.harmony.offered import OfferedTools
from vllm_gptoss.server.harmony.parser import HarmonyParser
from vllm_gptoss.server.harmony.tokens import CALL, ENDOFTEXT, RETURN, VOCABULARY, encode, token_bytes

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
LONG = {**CITY, "properties": {"city": {"type": "string", "minLength": 2}}}
WEATHER = Call("functions.get_weather", JSONArguments(CITY))
PYTHON = Call("python", FreeText())
THINK = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
SAY = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>It rains.<|return|>"
ASK = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'
ASK_FIRST = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>'


@cache
def _compiler() -> Any:
    vocabulary = [token_bytes(token) for token in range(VOCABULARY)]
    stops = [RETURN, ENDOFTEXT, CALL]
    raw = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=raw, vocab_size=VOCABULARY, stop_token_ids=stops)
    return xgrammar.GrammarCompiler(info, max_threads=1)


def accepts(tag: str | None, ids: list[int] | str) -> bool:
    """Whether a whole turn, stop token included, passes: by the mask that sampling sees and by the matcher."""
    assert tag is not None
    matcher = xgrammar.GrammarMatcher(_compiler().compile_structural_tag(tag))
    mask = xgrammar.allocate_token_bitmask(1, VOCABULARY)
    for token in tokens(ids) if isinstance(ids, str) else ids:
        matcher.fill_next_token_bitmask(mask)
        is_allowed = bool(mask[0, token // 32].item() >> (token % 32) & 1)
        assert matcher.accept_token(token) == is_allowed, "the mask and the matcher disagree"
        if not is_allowed:
            return False
    return bool(matcher.is_terminated())


AUTO = structural_tag([WEATHER, PYTHON])


@pytest.mark.parametrize(
    "turn",
    [
        ANSWER,
        THINK + ANSWER,
        THINK + SAY + ANSWER,
        THINK + SAY + THINK + ASK,
        THINK + ASK,
        ASK_FIRST,
        ASK.replace(" <|constrain|>", "<|constrain|>"),
        ASK.replace(" <|constrain|>json", ""),
        ASK.replace("commentary", "analysis"),
        "<|channel|>analysis to=python code<|message|>print('hi')\n<|call|>",
        " to=python<|channel|>analysis code<|message|>1 + 1<|call|>",
    ],
)
def test_auto_allows_answers_and_offered_calls(turn: str) -> None:
    assert accepts(AUTO, turn)


@pytest.mark.parametrize(
    "turn",
    [
        "Hello<|return|>",
        "<|channel|>answer<|message|>Hello<|return|>",
        ASK.replace("get_weather", "get_whether"),
        ASK.replace('"Ulm"', "7"),
        ASK.replace("city", "town"),
        ASK.replace(" to=functions.get_weather", " to=functions.get_weather to=functions.get_weather"),
        ASK.replace('"Ulm"}', '"Ulm'),
        "<|channel|>analysis to=browser.search code<|message|>{}<|call|>",
        "<|channel|>final to=user<|message|>Hello<|return|>",
        "<|channel|>analysis<|message|>thinking<|return|>",
        THINK + "<|start|>assistant" + ANSWER,
        THINK + ASK.replace("get_weather", "get_whether"),
        THINK.replace("think.", "think.<|channel|>") + ANSWER,
        ANSWER.replace("rains.", "rains.<|message|>"),
    ],
)
def test_auto_refuses_what_the_parser_would_have_to_repair(turn: str) -> None:
    assert not accepts(AUTO, turn)


def test_text_that_looks_like_a_control_token_is_text() -> None:
    ids = tokens("<|channel|>final<|message|>") + encode("The token <|end|> ends a message.") + [RETURN]
    assert accepts(AUTO, ids)


def test_required_forbids_an_answer_and_endless_pauses() -> None:
    tag = structural_tag([WEATHER], must_call=True)
    assert accepts(tag, THINK + SAY + ASK)
    assert accepts(tag, ASK_FIRST)
    assert not accepts(tag, THINK + ANSWER)
    assert accepts(tag, THINK * 4 + ASK)
    assert not accepts(tag, THINK * 5 + ASK)
    assert not accepts(tag, THINK + ASK.replace("get_weather", "get_whether"))


def test_a_named_choice_is_the_only_call() -> None:
    tag = structural_tag([PYTHON], must_call=True)
    assert not accepts(tag, ASK)
    assert not accepts(tag, THINK + SAY + ASK)


def test_no_call_can_be_all_that_is_said() -> None:
    tag = structural_tag(answer=FreeText())
    for header in ("", " code", " <|constrain|>code"):
        assert accepts(tag, THINK + SAY + ANSWER.replace("<|message|>", header + "<|message|>"))
    assert not accepts(tag, THINK + ASK)


def test_the_answer_can_be_a_schema_and_calls_stay_possible() -> None:
    tag = structural_tag([WEATHER], answer=JSONArguments(CITY))
    assert accepts(tag, THINK + '<|channel|>final<|message|>{"city": "Ulm"}<|return|>')
    assert accepts(tag, '<|channel|>final <|constrain|>json<|message|>{"city": "Ulm"}<|return|>')
    assert accepts(tag, ASK)
    assert not accepts(tag, ANSWER)


def test_nothing_but_reasoning_comes_before_an_answer_of_a_form() -> None:
    """Chat, /v1/messages and `output_text` join preambles to the answer."""
    tag = structural_tag([WEATHER], answer=JSONArguments(CITY))
    answer = '<|channel|>final<|message|>{"city": "Ulm"}<|return|>'
    assert accepts(tag, THINK + THINK + answer)
    assert not accepts(tag, SAY + answer)
    assert not accepts(structural_tag(answer=JSONArguments()), SAY + answer)


@pytest.mark.parametrize("schema", [None, CITY, LONG])
def test_no_control_token_stands_in_a_string(schema: Any) -> None:
    """The parser reads `<|end|>` as the message's end: what the grammar lets through, it must be able to read."""
    tag = structural_tag([Call("functions.get_weather", JSONArguments(schema))])
    for name in ("<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"):
        assert not accepts(tag, ASK.replace("Ulm", f"Ulm{name}"))
    head, tail = ASK.split("Ulm")
    for text in ("a <| b |> c", "<|", "x<y", r"\u003c|end|>"):
        assert accepts(tag, [*tokens(head), *encode(text), *tokens(tail)])


COUNTED = [
    {"type": "string", "maxLength": 40},
    {"type": "string", "pattern": "^.{1,40}$"},
    {"type": "string", "pattern": "^[A-Za-z <|>]{3,40}$"},
]


@pytest.mark.parametrize("city", COUNTED, ids=str)
def test_what_a_count_lets_through_the_parser_reads_as_text(city: Any) -> None:
    """A counting grammar cannot forbid control tokens: the token is accepted, and the string continues after it."""
    tag = structural_tag([Call("functions.get_weather", JSONArguments({**CITY, "properties": {"city": city}}))])
    ids = tokens(ASK_FIRST.replace("Ulm", "Ulm<|end|>x"))
    assert accepts(tag, ids)
    parser = HarmonyParser(OfferedTools.of(functions=["get_weather"]), held=Held(calls=True))
    events = parser.feed(ids)
    (ended,) = [event for event in events if isinstance(event, MessageEnded)]
    assert ended.text == '{"city": "Ulm<|end|>x"}'
    assert ended.ended_by is EndedBy.CALL


@pytest.mark.parametrize("city", COUNTED, ids=str)
def test_a_count_holds_on_the_real_vocabulary(city: Any) -> None:
    tag = structural_tag([Call("functions.get_weather", JSONArguments({**CITY, "properties": {"city": city}}))])
    assert accepts(tag, ASK.replace("Ulm", "a long name of forty letters and no more"))
    assert not accepts(tag, ASK.replace("Ulm", "a long name of forty letters and one more"))


def test_function_level_leaves_arguments_free_but_an_object() -> None:
    tag = structural_tag([Call("functions.get_weather")])
    assert accepts(tag, ASK.replace('"city": "Ulm"', '"anything": [1, null]'))
    assert accepts(tag, ASK.replace('{"city": "Ulm"}', "{}"))
    assert not accepts(tag, ASK.replace('{"city": "Ulm"}', "Ulm"))


def test_json_is_not_padded_for_ever() -> None:
    tag = structural_tag([WEATHER])
    assert accepts(tag, ASK.replace('{"', "{\n" + " " * 12 + '"'))
    assert not accepts(tag, ASK.replace('{"', "{" + " " * 40 + '"'))


def test_custom_tools_follow_their_grammar() -> None:
    tag = structural_tag([Call("functions.sql", EBNF('root ::= "SELECT " [a-z]+ ";"'))])
    assert accepts(tag, "<|channel|>commentary to=functions.sql<|message|>SELECT name;<|call|>")
    assert not accepts(tag, "<|channel|>commentary to=functions.sql<|message|>DROP name;<|call|>")


def test_nothing_to_constrain_is_no_grammar() -> None:
    assert structural_tag() is None
    with pytest.raises(ValueError, match="must_call"):
        structural_tag([], must_call=True, answer=JSONArguments(CITY))


@pytest.mark.vllm
def test_vllm_accepts_the_tag() -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=AUTO)))
