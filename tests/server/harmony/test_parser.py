"""How each kind of malformed output is read: the table of docs/harmony.md, row by row."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from tests.support.harmony_streams import TOOLS, tokens
from vllm_gptoss.server.harmony.events import (
    Channel,
    ContentDelta,
    EndedBy,
    HarmonyEvent,
    MessageEnded,
    MessageStarted,
    Repair,
    Repaired,
)
from vllm_gptoss.server.harmony.held import Held
from vllm_gptoss.server.harmony.offered import OfferedTools
from vllm_gptoss.server.harmony.parser import HarmonyParser
from vllm_gptoss.server.harmony.tokens import RETURN, token_bytes

A, C, F = Channel.ANALYSIS, Channel.COMMENTARY, Channel.FINAL
END, CALL, RET, NEXT, CUT = EndedBy.END, EndedBy.CALL, EndedBy.RETURN, EndedBy.NEXT, EndedBy.CUT
WEATHER = "functions.get_weather"
Read = tuple[Channel, str | None, str | None, str, EndedBy]


def messages_of(events: list[HarmonyEvent]) -> list[Read]:
    started = [event for event in events if isinstance(event, MessageStarted)]
    ended = [event for event in events if isinstance(event, MessageEnded)]
    pairs = zip(started, ended, strict=True)
    return [(s.channel, s.recipient, s.content_type, e.text, e.ended_by) for s, e in pairs]


def read(text: str, cut: bool = False) -> tuple[list[Read], set[Repair]]:
    parser = HarmonyParser(TOOLS)
    events = parser.feed(tokens(text)) + parser.finish(cut)
    return messages_of(events), {event.kind for event in events if isinstance(event, Repaired)}


ASK = f"<|channel|>commentary to={WEATHER} <|constrain|>json<|message|>{{}}<|call|>"
SAID = "<|channel|>analysis<|message|>a<|end|>"

WELL_FORMED: dict[str, tuple[str, list[Read]]] = {
    "answer": ("<|channel|>final<|message|>b<|return|>", [(F, None, None, "b", RET)]),
    "reasoned answer": (
        SAID + "<|start|>assistant<|channel|>final<|message|>b<|return|>",
        [(A, None, None, "a", END), (F, None, None, "b", RET)],
    ),
    "call": (ASK, [(C, WEATHER, "json", "{}", CALL)]),
    "recipient in the role": (
        f" to={WEATHER}<|channel|>commentary json<|message|>{{}}<|call|>",
        [(C, WEATHER, "json", "{}", CALL)],
    ),
    "constraint without a space": (ASK.replace(" <|con", "<|con"), [(C, WEATHER, "json", "{}", CALL)]),
    "python": ("<|channel|>analysis to=python code<|message|>1<|call|>", [(A, "python", "code", "1", CALL)]),
    "python without code": ("<|channel|>analysis to=python<|message|><|call|>", [(A, "python", None, "", CALL)]),
    "mcp": ("<|channel|>commentary to=my_mcp.lookup<|message|>{}<|call|>", [(C, "my_mcp.lookup", None, "{}", CALL)]),
    "json answer": ("<|channel|>final json<|message|>{}<|return|>", [(F, None, "json", "{}", RET)]),
    "end of text": ("<|channel|>final<|message|>b<|endoftext|>", [(F, None, None, "b", RET)]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("name", WELL_FORMED)
def test_what_the_format_allows_is_read_without_repairs(name: str) -> None:
    text, expected = WELL_FORMED[name]
    assert read(text) == (expected, set())


REPAIRED: dict[str, tuple[str, list[Read], set[Repair]]] = {
    "recipient twice": (
        ASK.replace(" <|c", f" to={WEATHER}<|c"),
        [(C, WEATHER, "json", "{}", CALL)],
        {Repair.DUPLICATE_RECIPIENT},
    ),
    "recipient before and after the channel": (
        f" to=functions.now<|channel|>commentary to={WEATHER} json<|message|>{{}}<|call|>",
        [(C, WEATHER, "json", "{}", CALL)],
        {Repair.DUPLICATE_RECIPIENT},
    ),
    "the last offered recipient": (
        f"<|channel|>commentary to={WEATHER} to=user<|message|>{{}}<|call|>",
        [(C, WEATHER, None, "{}", CALL)],
        {Repair.DUPLICATE_RECIPIENT},
    ),
    "no message": (
        "<|channel|>final I'm sorry.<|return|>",
        [(F, None, None, "I'm sorry.", RET)],
        {Repair.MISSING_MESSAGE},
    ),
    "no message, glued": ("<|channel|>finalHello<|return|>", [(F, None, None, "Hello", RET)], {Repair.MISSING_MESSAGE}),
    "no message, a call": (
        f"<|channel|>commentary to={WEATHER}<|call|>",
        [(C, WEATHER, None, "{}", CALL)],
        {Repair.MISSING_MESSAGE, Repair.EMPTY_ARGUMENTS},
    ),
    "no start": (
        SAID + "<|channel|>final<|message|>b<|return|>",
        [(A, None, None, "a", END), (F, None, None, "b", RET)],
        {Repair.MISSING_START},
    ),
    "no start token but a role": (
        SAID + "assistant<|channel|>final<|message|>b<|return|>",
        [(A, None, None, "a", END), (F, None, None, "b", RET)],
        {Repair.MISSING_START},
    ),
    "no end": (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b<|return|>",
        [(A, None, None, "a", NEXT), (F, None, None, "b", RET)],
        {Repair.MISSING_END},
    ),
    "no end and no start": (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>",
        [(A, None, None, "a", NEXT), (F, None, None, "b", RET)],
        {Repair.MISSING_END, Repair.MISSING_START},
    ),
    "a channel token in content": (
        "<|channel|>analysis<|message|>a <|channel|>is a token that opens the channel of a message<|end|>",
        [(A, None, None, "a is a token that opens the channel of a message", END)],
        {Repair.CONTROL_TOKEN_IN_CONTENT},
    ),
    "a message token in content": (
        "<|channel|>final<|message|>a<|message|>b<|return|>",
        [(F, None, None, "ab", RET)],
        {Repair.CONTROL_TOKEN_IN_CONTENT},
    ),
    "a reserved token in content": (
        "<|channel|>final<|message|>a<|reserved_200013|>b<|return|>",
        [(F, None, None, "ab", RET)],
        {Repair.UNKNOWN_CONTROL_TOKEN},
    ),
    "role twice": (
        SAID + "<|start|>assistant<|start|>assistant<|channel|>final<|message|>b<|return|>",
        [(A, None, None, "a", END), (F, None, None, "b", RET)],
        {Repair.REPEATED_ROLE},
    ),
    "no role": (
        SAID + "<|start|><|channel|>final<|message|>b<|return|>",
        [(A, None, None, "a", END), (F, None, None, "b", RET)],
        {Repair.MISSING_ROLE},
    ),
    "another role": (
        SAID + "<|start|>user<|message|>b<|end|>",
        [(A, None, None, "a", END), (F, None, None, "b", END)],
        {Repair.UNEXPECTED_ROLE, Repair.MISSING_CHANNEL},
    ),
    "a made-up tool result": (
        SAID + f"<|start|>{WEATHER} to=assistant<|channel|>commentary<|message|>b<|end|>",
        [(A, None, None, "a", END), (C, None, None, "b", END)],
        {Repair.UNEXPECTED_ROLE, Repair.UNKNOWN_RECIPIENT},
    ),
    "no channel": ("<|message|>b<|return|>", [(F, None, None, "b", RET)], {Repair.MISSING_CHANNEL}),
    "no channel for a call": (
        f" to={WEATHER}<|message|>{{}}<|call|>",
        [(C, WEATHER, None, "{}", CALL)],
        {Repair.MISSING_CHANNEL},
    ),
    "no channel token": ("analysis<|message|>a<|end|>", [(A, None, None, "a", END)], {Repair.MISSING_CHANNEL}),
    "unknown channel": (
        "<|channel|>thoughts<|message|>b<|return|>",
        [(F, None, None, "b", RET)],
        {Repair.UNKNOWN_CHANNEL},
    ),
    "two channels": (
        "<|channel|>analysis<|channel|>final<|message|>b<|return|>",
        [(F, None, None, "b", RET)],
        {Repair.REPEATED_CHANNEL},
    ),
    "a tool that was not offered": (
        "<|channel|>commentary to=functions.rm json<|message|>{}<|call|>",
        [(C, None, "json", "{}", CALL)],
        {Repair.UNKNOWN_RECIPIENT},
    ),
    "a tool without its namespace": (
        "<|channel|>commentary to=get_weather json<|message|>{}<|call|>",
        [(C, WEATHER, "json", "{}", CALL)],
        {Repair.INEXACT_RECIPIENT},
    ),
    "a tool in the wrong namespace": (
        "<|channel|>analysis to=functions.browser.search<|message|>{}<|call|>",
        [(A, "browser.search", None, "{}", CALL)],
        {Repair.INEXACT_RECIPIENT},
    ),
    "channel and recipient glued": (
        f"<|channel|>commentaryto={WEATHER}<|message|>{{}}<|call|>",
        [(C, WEATHER, None, "{}", CALL)],
        set(),
    ),
    "stray words": (
        "<|channel|>final one two three<|message|>b<|return|>",
        [(F, None, None, "b", RET)],
        {Repair.STRAY_WORDS},
    ),
    "no header": ("Hello there.<|return|>", [(F, None, None, "Hello there.", RET)], {Repair.NO_HEADER}),
    "no header and no end": ("Hello", [(F, None, None, "Hello", RET)], {Repair.NO_HEADER}),
    "end tokens again": (
        "<|channel|>final<|message|>b<|return|><|return|><|end|>",
        [(F, None, None, "b", RET)],
        {Repair.STRAY_END},
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.now json<|message|><|call|>",
        [(C, "functions.now", "json", "{}", CALL)],
        {Repair.EMPTY_ARGUMENTS},
    ),
}


@pytest.mark.parametrize("name", REPAIRED)
def test_what_the_format_forbids_is_read_and_reported(name: str) -> None:
    text, expected, repairs = REPAIRED[name]
    assert read(text) == (expected, repairs)


@pytest.mark.parametrize(
    ("text", "expected", "repairs"),
    [
        ("<|channel|>final<|message|>b", [(F, None, None, "b", CUT)], set()),
        (ASK.removesuffix("}<|call|>"), [(C, WEATHER, "json", "{", CUT)], set()),
        (ASK.removesuffix("{}<|call|>"), [(C, WEATHER, "json", "", CUT)], set()),
        (f"<|channel|>commentary to={WEATHER}", [], {Repair.TRUNCATED_HEADER}),
        ("<|channel|>fin", [], {Repair.TRUNCATED_HEADER}),
        (SAID + "<|start|>assis", [(A, None, None, "a", END)], {Repair.TRUNCATED_HEADER}),
        ("Half an ans", [(F, None, None, "Half an ans", CUT)], {Repair.NO_HEADER}),
        (
            "<|channel|>final<|message|>b<|start|>assis",
            [(F, None, None, "b", CUT)],
            {Repair.MISSING_END, Repair.TRUNCATED_HEADER},
        ),
    ],
)
def test_a_cut_is_never_taken_for_an_end(text: str, expected: list[Read], repairs: set[Repair]) -> None:
    assert read(text, cut=True) == (expected, repairs)


def test_text_without_a_header_streams_before_it_ends() -> None:
    parser = HarmonyParser(TOOLS)
    events = parser.feed(tokens("This answer has no header at all, yet it must not wait for its end"))
    assert any(isinstance(event, ContentDelta) for event in events)


def test_a_header_that_was_forced_into_the_prompt_is_read_first() -> None:
    parser = HarmonyParser(TOOLS, prefix=tokens("<|channel|>final <|constrain|>json<|message|>"))
    events = parser.feed([*tokens('{"a": 1}'), RETURN]) + parser.finish(False)
    assert messages_of(events) == [(F, None, "json", '{"a": 1}', RET)]
    assert [event.first for event in events if isinstance(event, ContentDelta)] == [0]

    half = HarmonyParser(TOOLS, prefix=tokens(f" to={WEATHER}<|channel|>commentary"))
    events = half.feed(tokens(" json<|message|>{}<|call|>")) + half.finish(False)
    assert messages_of(events) == [(C, WEATHER, "json", "{}", CALL)]


def test_a_character_split_over_tokens_comes_whole() -> None:
    parser, ids = HarmonyParser(TOOLS), tokens("<|channel|>final<|message|>👩‍🚀!")
    texts = [e.text for token in ids for e in parser.feed([token]) if isinstance(e, ContentDelta)]
    assert "".join(texts) == "👩‍🚀!"
    first, second, third = (next(t for t in range(999) if token_bytes(t) == bytes([byte])) for byte in "€".encode())
    events = [e for part in ([*tokens("a"), first], [second], [third, *tokens("!")]) for e in parser.feed(part)]
    assert [(e.text, e.tokens) for e in events if isinstance(e, ContentDelta)] == [("a", 1), ("€!", 4)]


HELD_CALL = f' to={WEATHER}<|channel|>commentary json<|message|>{{"a": "x\\"%sy"}}%s'


@pytest.mark.parametrize("name", ["<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"])
def test_a_control_token_in_a_string_that_a_grammar_holds_is_text(name: str) -> None:
    parser = HarmonyParser(TOOLS, held=Held(calls=True))
    events = parser.feed(tokens(HELD_CALL % (name, "<|call|>"))) + parser.finish(False)
    assert messages_of(events) == [(C, WEATHER, "json", f'{{"a": "x\\"{name}y"}}', CALL)]
    answer = HarmonyParser(TOOLS, held=Held(answer=True))
    events = answer.feed(tokens(f'<|channel|>final<|message|>["{name}"]<|return|>'))
    assert messages_of(events) == [(F, None, None, f'["{name}"]', RET)]


def test_outside_of_strings_and_at_stop_tokens_a_held_call_ends() -> None:
    """An engine that does not keep to the grammar loses nothing by it."""
    half = (HELD_CALL % ("", "<|call|>")).replace('y"}', "")
    for text, ended_by in ((HELD_CALL % ("", "<|end|>"), END), (half, CALL)):
        parser = HarmonyParser(TOOLS, held=Held(calls=True))
        assert messages_of(parser.feed(tokens(text)))[0][4] is ended_by
    for held in (Held(), Held(answer=True)):
        events = HarmonyParser(TOOLS, held=held).feed(tokens(HELD_CALL % ("<|end|>", "<|call|>")))
        assert messages_of(events)[0][3:] == ('{"a": "x\\"', END)


def test_free_text_tools_get_no_empty_object() -> None:
    tools = OfferedTools({"functions": frozenset({"patch"})}, frozenset({"functions.patch"}))
    parser = HarmonyParser(tools)
    events = parser.feed(tokens("<|channel|>commentary to=functions.patch<|message|><|call|>"))
    assert messages_of(events)[0][3] == ""


def test_names_with_dots_and_the_most_fitting_tool() -> None:
    tools = OfferedTools(
        {"functions": frozenset({"a.b", "search"}), "browser": frozenset({"search"}), "x.y": frozenset("z")}
    )
    assert tools.resolve("functions.a.b") == "functions.a.b"
    assert tools.resolve("a.b") == "functions.a.b"
    assert tools.resolve("x.y.z") == "x.y.z"
    assert tools.resolve("search") is None  # two tools fit
    assert tools.resolve("functions") is None
    assert tools.resolve("") is None


def test_every_repair_is_counted() -> None:
    def count() -> float:
        return REGISTRY.get_sample_value("gptoss_harmony_repairs_total", {"kind": "unknown_channel"}) or 0.0

    before = count()
    read("<|channel|>thoughts<|message|>b<|return|>")
    assert count() == before + 1
