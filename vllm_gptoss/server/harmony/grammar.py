"""The grammar of one turn as an xgrammar structural tag.

A turn is any number of reasoning messages and preambles, then one call or the answer. Free text is matched by token, so
it cannot contain control tokens. Headers are matched as text, because xgrammar 0.2.8 masks tokens wrongly where a token
and text may both come next. The engine ends the turn: xgrammar allows stop tokens (`<|call|>`, `<|return|>`) exactly
where the grammar is complete. Formats: xgrammar `structural_tag.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.server.harmony.enforce.compiling import MAX_WHITESPACE, grammar_of
from vllm_gptoss.server.harmony.enforce.json_grammar import any_object
from vllm_gptoss.server.harmony.events import Channel
from vllm_gptoss.server.harmony.tokens import CALL, END, FIRST_CONTROL

GRAMMAR_BACKENDS = ("auto", "xgrammar")
"""Structured output backends that know token-level structural tags."""

MAX_PAUSES = 4
"""Messages before a required call. Without a bound a model may reason until it is cut instead of calling."""

_Format = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JSONArguments:
    """JSON of `schema`; any JSON object if none is given.

    Raises `NotEnforceableError` if the schema has no grammar: see `enforce/compiling.py`.
    """

    schema: Mapping[str, Any] | None = None


def any_json(schema: Mapping[str, Any]) -> JSONArguments:
    """The replacement of a schema that cannot be enforced: JSON, an object if the schema has that type."""
    return JSONArguments() if schema.get("type") == "object" else JSONArguments({})


@dataclass(frozen=True, slots=True)
class FreeText:
    """Anything: source code, a patch."""


@dataclass(frozen=True, slots=True)
class EBNF:
    """Text of a grammar in xgrammar's EBNF; its start rule is `root`."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Format:
    """A format of xgrammar's structural tags, used unchanged."""

    value: Mapping[str, Any]


Content = JSONArguments | FreeText | EBNF | Format


@dataclass(frozen=True, slots=True)
class Call:
    """A call that may be made: `recipient` is the full name (`functions.get_weather`, `python`)."""

    recipient: str
    content: Content = JSONArguments()


def structural_tag(calls: Sequence[Call] = (), *, must_call: bool = False, answer: Content | None = None) -> str | None:
    """The constraint as JSON for `StructuredOutputsParams(structural_tag=…)`, or None if there is nothing to constrain.

    `calls` are the calls this request may make: those of a named or allowed choice only, none for choice "none".
    `must_call` forbids an answer without a call. `answer` constrains the final message, by default to any text; with
    another form the turn has no preambles. A turn has at most one call, because `<|call|>` ends it; parallel calls
    come in successive turns.
    """
    if not calls and answer is None:
        return None
    if must_call and not calls:
        raise ValueError("must_call needs at least one call")
    ends = [_call(call) for call in calls]
    if not must_call:
        ends.append(_message(_text("<|channel|>final"), answer or FreeText()))
    # Clients join preambles to the answer, which would break its form: only reasoning comes before such an answer.
    speaks = answer is None or isinstance(answer, FreeText)
    channels = (_text("analysis"), _text("commentary")) if speaks else (_text("analysis"),)
    pause = _sequence(_text("<|channel|>"), _either(*channels), _text("<|message|>"))
    pause["elements"] += [_FREE_TEXT, {"type": "token", "token": END}, _text("<|start|>assistant")]
    turn = _sequence(_up_to(MAX_PAUSES, pause) if must_call else {"type": "star", "content": pause}, _either(*ends))
    return json.dumps({"type": "structural_tag", "format": turn}, ensure_ascii=False)


def _text(value: str) -> _Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: _Format) -> _Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: _Format) -> _Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _up_to(times: int, content: _Format) -> _Format:
    # Not the `repeat` format: xgrammar 0.2.8 forgets `exclude_tokens` inside it.
    more = [_up_to(times - 1, content)] if times > 1 else []
    return {"type": "optional", "content": _sequence(content, *more)}


# The control tokens that have a meaning; the 1,074 reserved ids after them only make the tag 20 KB longer.
_FREE_TEXT: _Format = {"type": "any_tokens", "exclude_tokens": list(range(FIRST_CONTROL, CALL + 2))}


def _content(content: Content) -> _Format:
    match content:
        case JSONArguments(schema=schema):
            text = any_object(MAX_WHITESPACE) if schema is None else grammar_of(schema)
            return {"type": "grammar", "grammar": text}
        case FreeText():
            return _FREE_TEXT
        case EBNF(grammar=grammar):
            return {"type": "grammar", "grammar": grammar}
        case Format(value=value):
            return dict(value)


def _message(header: _Format, content: Content) -> _Format:
    return _sequence(header, _types(content), _text("<|message|>"), _content(content))


def _types(content: Content) -> _Format:
    """The optional content type, in all variants that models write."""
    kind = "json" if isinstance(content, JSONArguments | Format) else "code"
    other = "code" if kind == "json" else "text"
    ways = (f" <|constrain|>{kind}", f"<|constrain|>{kind}", f" {kind}", f" {other}")
    return {"type": "optional", "content": _either(*map(_text, ways))}


def _call(call: Call) -> _Format:
    """Both orders of the header and both channels; functions belong on commentary, built-in tools on analysis."""
    to = f" to={call.recipient}"
    channels = [f"<|channel|>{channel.value}" for channel in (Channel.COMMENTARY, Channel.ANALYSIS)]
    headers = [channel + to for channel in channels] + [to + channel for channel in channels]
    return _message(_either(*map(_text, headers)), call.content)
