"""The two APIs of an OpenAI-compatible server: requests of a dialogue, and their answers, streamed or not.

A request has the fields that `/v1/responses` and `/v1/chat/completions` of every such server define, those of
`--extra-body`, and those of the question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_TEXT = 8 << 20
"""Characters of one answer, reasoning included. 131,072 tokens are about half a million."""

MAX_CALLS = 128


class Fate(StrEnum):
    """The end of one sample. The first five are answers, which count in the accuracy; the others were lost."""

    RIGHT = "right"
    WRONG = "wrong"
    CUT = "cut"  # the server ended it at its token limit
    EMPTY = "empty"  # neither text nor a call
    UNPARSED = "unparsed"  # text without an answer of the expected kind
    REFUSED = "refused"  # a 4xx, or 429 until the tries were used up
    FAILED = "failed"  # a 5xx, or an error that the server reported inside its answer
    TIMED_OUT = "timed_out"
    BROKEN = "broken"  # no connection, a stream without its end, no JSON, or more bytes than allowed


LOST = frozenset({Fate.REFUSED, Fate.FAILED, Fate.TIMED_OUT, Fate.BROKEN})
"""No answer came: the next run sends it again; it is never scored as wrong."""


class LostSampleError(Exception):
    """No answer came. again: a retry may succeed; wait_s: the server's Retry-After."""

    def __init__(self, fate: Fate, detail: str, *, again: bool = False, wait_s: float | None = None) -> None:
        super().__init__(detail)
        self.fate, self.detail, self.again, self.wait_s = fate, detail, again, wait_s
        self.tries = 1


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function call as the server reported it; `arguments` is the text, JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ModelAnswer:
    """One whole answer, of one request.

    tokens: input, output and reasoning tokens, 0 where the server does not report them. items: what the next request of
    the same dialogue repeats, in the form of the API. cut: ended by the token limit.
    """

    text: str
    reasoning: str
    calls: tuple[FunctionCall, ...]
    cut: bool
    tokens: tuple[int, int, int]
    items: tuple[Mapping[str, Any], ...]
    citations: int = 0
    tries: int = 1
    seconds: float = 0.0
    first_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT or len(self.reasoning) > MAX_TEXT:
            raise _too_long()


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What is the same in every request of a run."""

    model: str
    max_tokens: int
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    stream: bool = True
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The fields that both APIs name alike."""
        known = {"model": self.model, "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        known["stream"] = self.stream or None
        return {key: value for key, value in known.items() if value is not None}


class Responses:
    """`/v1/responses`. A stream's deltas are not read: its last event holds the whole response."""

    path, form = "/responses", "response object"

    def body(
        self, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None, effort: str | None, settings: RequestSettings,
    ) -> dict[str, Any]:  # fmt: skip
        """The request that continues `history`."""
        body = {**settings.fields(), "input": list(history), "max_output_tokens": settings.max_tokens, "store": False}
        if effort:
            body["reasoning"] = {"effort": effort}
        if tools:
            body["tools"] = [{**tool} if tool["type"] != "function" else {"strict": False, **tool} for tool in tools]
        if schema is not None:
            body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
        return {**body, **settings.extra}

    def result(self, call: FunctionCall, text: str) -> dict[str, Any]:
        """The history item of a function's result."""
        return {"type": "function_call_output", "call_id": call.id, "output": text}

    def add(self, whole: dict[str, Any], event: Any) -> None:
        """Adds an event of a stream to `whole`, which is read when the stream has ended."""
        if event.get("error") or event.get("type") == "error":
            raise _reported(event.get("error") or event)
        if isinstance(event.get("response"), dict) and event["type"] in LAST_EVENTS:
            whole |= event["response"]

    def whole(self, data: Any) -> ModelAnswer:
        """Reads a response object. Raises LostSampleError where it failed, or is none."""
        if data.get("status") in ("failed", "cancelled"):
            raise _reported(data.get("error") or {"message": f"status {data['status']}"})
        why = (data.get("incomplete_details") or {}).get("reason") if data.get("status") == "incomplete" else None
        items = [item for item in data["output"] if item.get("type")]
        spoken = [part for item in items if item["type"] == "message" for part in _parts(item)]
        thought = [part for item in items if item["type"] == "reasoning" for part in _parts(item)]
        return ModelAnswer(
            text="".join(part.get("text") or "" for part in spoken if part.get("type") == "output_text"),
            reasoning="".join(part.get("text") or "" for part in thought),
            calls=tuple(
                FunctionCall(*(str(item.get(key) or "") for key in ("call_id", "name", "arguments")))
                for item in items
                if item["type"] in ("function_call", "mcp_call")
            )[:MAX_CALLS],
            cut=why is not None and why != "content_filter",
            tokens=_tokens(data, "input", "output"),
            citations=sum(len(part.get("annotations") or ()) for part in spoken),
            items=tuple(items),
        )


LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")


class Chat:
    """`/v1/chat/completions`."""

    path, form = "/chat/completions", "chat completion"

    def body(
        self, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None, effort: str | None, settings: RequestSettings,
    ) -> dict[str, Any]:  # fmt: skip
        """The request that continues `history`."""
        body = {**settings.fields(), "messages": list(history), "max_completion_tokens": settings.max_tokens}
        if settings.stream:
            body["stream_options"] = {"include_usage": True}
        if effort:
            body["reasoning_effort"] = effort
        if tools:
            functions = [{key: value for key, value in tool.items() if key != "type"} for tool in tools]
            body["tools"] = [{"type": "function", "function": function} for function in functions]
        if schema is not None:
            wanted = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return {**body, **settings.extra}

    def result(self, call: FunctionCall, text: str) -> dict[str, Any]:
        """The history item of a function's result."""
        return {"role": "tool", "tool_call_id": call.id, "content": text}

    def add(self, whole: dict[str, Any], chunk: Any) -> None:
        """Adds a chunk of a stream to `whole`, a completion whose texts are lists of pieces."""
        if chunk.get("error"):
            raise _reported(chunk["error"])
        whole["usage"] = chunk.get("usage") or whole.get("usage")
        for choice in chunk["choices"]:
            kept = whole.setdefault("choices", [{"message": {"content": [], "reasoning": [], "tool_calls": []}}])[0]
            kept["finish_reason"] = choice.get("finish_reason") or kept.get("finish_reason")
            message, delta = kept["message"], choice.get("delta") or {}
            pieces = [(message["content"], delta.get("content"))]
            pieces.append((message["reasoning"], delta.get("reasoning") or delta.get("reasoning_content")))
            for call in delta.get("tool_calls") or ():
                pieces += self._call(message["tool_calls"], call)
            for texts, piece in pieces:
                if piece:
                    texts.append(str(piece))
                    whole["size"] = whole.get("size", 0) + len(texts[-1])
            if whole.get("size", 0) > MAX_TEXT:
                raise _too_long()

    def _call(self, calls: list[dict[str, Any]], delta: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
        """The lists of a call's texts, with the pieces to append."""
        kept = next((one for one in calls if one["index"] == delta["index"]), None)
        if kept is None:
            if len(calls) >= MAX_CALLS:
                raise LostSampleError(Fate.BROKEN, f"more than {MAX_CALLS} calls in one answer")
            kept = {"index": delta["index"], "id": [], "function": {"name": [], "arguments": []}}
            calls.append(kept)
        function = delta.get("function") or {}
        return [
            (kept["id"], delta.get("id")),
            *((kept["function"][key], function.get(key)) for key in kept["function"]),
        ]

    def whole(self, data: Any) -> ModelAnswer:
        """Reads a chat completion, or what `add` made of a stream."""
        choice = data["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        if not finish:
            raise LostSampleError(Fate.BROKEN, "the stream ended before its answer", again=True)
        text = "".join(message.get("content") or ())
        reasoning = "".join(message.get("reasoning") or message.get("reasoning_content") or ())
        calls = tuple(
            FunctionCall(*("".join(each or ()) for each in (call.get("id"), call["function"]["name"],
                                                            call["function"].get("arguments"))))
            for call in message.get("tool_calls") or ()
        )  # fmt: skip
        item: dict[str, Any] = {"role": "assistant", "content": text or None}
        if reasoning:
            item["reasoning"] = reasoning
        if calls:
            item["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        tokens = _tokens(data, "prompt", "completion")
        return ModelAnswer(text, reasoning, calls, finish == "length", tokens, (item,))


def _parts(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A message's or a reasoning item's parts; reasoning that is only summarised has its summary."""
    return [part for part in item.get("content") or item.get("summary") or () if isinstance(part, dict)]


def _tokens(data: Mapping[str, Any], read: str, written: str) -> tuple[int, int, int]:
    usage = data.get("usage") or {}
    details = usage.get(f"{written}_tokens_details") or {}
    counts = (usage.get(f"{read}_tokens"), usage.get(f"{written}_tokens"), details.get("reasoning_tokens"))
    one, two, three = (value if isinstance(value, int) and 0 <= value < 1 << 32 else 0 for value in counts)
    return one, two, three


def _too_long() -> LostSampleError:
    return LostSampleError(Fate.BROKEN, f"the answer is longer than {MAX_TEXT:,} characters")


def _reported(error: Any) -> LostSampleError:
    """An error inside an answer: the request's fault where the server reports that."""
    code = error.get("code") if isinstance(error, dict) else None
    own = (isinstance(code, int) and 400 <= code < 500 and code != 429) or code == "invalid_prompt"
    detail = f"the server reports {json.dumps(error)[:500]}"
    return LostSampleError(Fate.REFUSED if own else Fate.FAILED, detail, again=not own)


APIS: Mapping[str, type[Responses] | type[Chat]] = {"responses": Responses, "chat": Chat}
