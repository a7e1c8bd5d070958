"""The two APIs: requests of a dialogue, and parsing of answers, streamed or not.

Only what both `/v1/responses` and `/v1/chat/completions` of any OpenAI-compatible server define is sent; what else a
server should get comes from the user (`--extra-body`) or from the question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_gptoss.cli.eval.answer import Answer, Call, Fate, LostError, Usage

MAX_TEXT = 8 << 20
"""Characters of one answer, reasoning included. 131,072 tokens are about half a million."""

MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class Sampling:
    """What is the same in every request of a run."""

    model: str
    max_tokens: int
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    stream: bool = True
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class Reader(Protocol):
    """Collects one answer."""

    def wants(self, event: str) -> bool:
        """Whether the data of an event of this name has to be read at all."""

    def feed(self, data: Any) -> None:
        """One event. Raises LostError for one that reports a failure."""

    @property
    def answer(self) -> Answer | None:
        """The whole answer, or nothing where the stream has ended too early."""


class Api(Protocol):
    """One way of asking."""

    name: str
    path: str

    def body(
        self, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None, effort: str | None, sampling: Sampling,
    ) -> dict[str, Any]: ...  # fmt: skip

    def reader(self) -> Reader: ...

    def whole(self, data: Any) -> Answer: ...

    def result(self, call: Call, text: str) -> dict[str, Any]: ...


def _common(sampling: Sampling) -> dict[str, Any]:
    known = {
        "model": sampling.model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    return {key: value for key, value in known.items() if value is not None}


class Responses:
    """`/v1/responses`. A stream's deltas are not read: its last event holds the whole response."""

    name = "responses"
    path = "/responses"

    def body(
        self, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None, effort: str | None, sampling: Sampling,
    ) -> dict[str, Any]:  # fmt: skip
        body = {**_common(sampling), "input": list(history), "max_output_tokens": sampling.max_tokens, "store": False}
        if sampling.stream:
            body["stream"] = True
        if effort:
            body["reasoning"] = {"effort": effort}
        if tools:
            body["tools"] = [{**tool} if tool["type"] != "function" else {"strict": False, **tool} for tool in tools]
        if schema is not None:
            body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
        return {**body, **sampling.extra}

    def reader(self) -> Reader:
        return _ResponseEvents(self)

    def result(self, call: Call, text: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call.id, "output": text}

    def whole(self, data: Any) -> Answer:
        """Raises LostError where `data` is no response, or one that failed."""
        if not isinstance(data, dict) or not isinstance(data.get("output"), list):
            raise LostError(Fate.BROKEN, "the answer is JSON, but no response object", again=False)
        if data.get("status") in ("failed", "cancelled"):
            raise _reported(data.get("error") or {"message": f"status {data['status']}"})
        why = (data.get("incomplete_details") or {}).get("reason") if data.get("status") == "incomplete" else None
        items = [item for item in data["output"] if isinstance(item, dict)]
        messages = [part for item in items if item.get("type") == "message" for part in _parts(item)]
        calls = tuple(
            Call(_text(item.get("call_id")), _text(item.get("name")), _text(item.get("arguments")))
            for item in items
            if item.get("type") in ("function_call", "mcp_call")
        )
        return Answer(
            text=_bounded("".join(_text(part.get("text")) for part in messages if part.get("type") == "output_text")),
            reasoning=_bounded(
                "".join(_text(part.get("text")) for item in items if item.get("type") == "reasoning"
                        for part in _parts(item))
            ),
            calls=calls[:MAX_CALLS],
            cut=why is not None and why != "content_filter",
            usage=_usage(data.get("usage"), "input", "output"),
            citations=sum(len(part.get("annotations") or ()) for part in messages),
            items=tuple(items),
        )  # fmt: skip


class _ResponseEvents:
    _LAST = ("response.completed", "response.incomplete", "response.failed")

    def __init__(self, api: Responses) -> None:
        self._api = api
        self.answer: Answer | None = None

    def wants(self, event: str) -> bool:
        return event in (*self._LAST, "error", "")

    def feed(self, data: Any) -> None:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind == "error" or (kind is None and isinstance(data, dict) and "error" in data):
            raise _reported(data.get("error") or data)
        if kind in self._LAST:
            self.answer = self._api.whole(data.get("response"))


class Chat:
    """`/v1/chat/completions`."""

    name = "chat"
    path = "/chat/completions"

    def body(
        self, history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None, effort: str | None, sampling: Sampling,
    ) -> dict[str, Any]:  # fmt: skip
        body = {**_common(sampling), "messages": list(history), "max_completion_tokens": sampling.max_tokens}
        if sampling.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if effort:
            body["reasoning_effort"] = effort
        if tools:
            body["tools"] = [_chat_tool(tool) for tool in tools]
        if schema is not None:
            wanted = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return {**body, **sampling.extra}

    def reader(self) -> Reader:
        return _Chunks()

    def result(self, call: Call, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call.id, "content": text}

    def whole(self, data: Any) -> Answer:
        """Raises LostError where `data` is no chat completion."""
        try:
            choice = data["choices"][0]
            message = choice["message"]
            calls = [
                Call(_text(call.get("id")), _text(call["function"]["name"]), _text(call["function"].get("arguments")))
                for call in message.get("tool_calls") or ()
            ]
            reasoning = _text(message.get("reasoning") or message.get("reasoning_content"))
            return _chat_answer(
                _text(message.get("content")), reasoning, calls, choice.get("finish_reason"), data.get("usage")
            )
        except (KeyError, IndexError, TypeError, AttributeError):
            raise LostError(Fate.BROKEN, "the answer is JSON, but no chat completion", again=False) from None


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        raise ValueError(f"chat completions know functions only, no {tool['type']}: use --api responses")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


class _Chunks:
    """Adds the chunks of a chat stream up."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._size = 0
        self._calls: dict[int, list[str]] = {}
        self._finish: str | None = None
        self._usage: Any = None

    def wants(self, event: str) -> bool:
        return True

    def feed(self, data: Any) -> None:
        try:
            if data.get("error"):
                raise _reported(data["error"])
            self._usage = data.get("usage") or self._usage
            for choice in data["choices"]:
                self._delta(choice.get("delta") or {})
                self._finish = choice.get("finish_reason") or self._finish
        except (KeyError, TypeError, AttributeError):
            raise LostError(Fate.BROKEN, "an event of the stream is no chat completion chunk", again=False) from None

    def _delta(self, delta: Mapping[str, Any]) -> None:
        self._add(self._text, delta.get("content"))
        self._add(self._reasoning, delta.get("reasoning") or delta.get("reasoning_content"))
        for call in delta.get("tool_calls") or ():
            if len(self._calls) >= MAX_CALLS and call["index"] not in self._calls:
                raise LostError(Fate.BROKEN, f"more than {MAX_CALLS} calls in one answer", again=False)
            made = self._calls.setdefault(call["index"], ["", "", ""])
            function = call.get("function") or {}
            for place, piece in enumerate((call.get("id"), function.get("name"), function.get("arguments"))):
                made[place] += _text(piece)
                self._count(piece)

    def _add(self, parts: list[str], piece: Any) -> None:
        if piece:
            parts.append(_text(piece))
            self._count(piece)

    def _count(self, piece: Any) -> None:
        self._size += len(_text(piece))
        if self._size > MAX_TEXT:
            raise LostError(Fate.BROKEN, f"the answer is longer than {MAX_TEXT:,} characters", again=False)

    @property
    def answer(self) -> Answer | None:
        if self._finish is None:
            return None
        calls = [Call(*made) for _, made in sorted(self._calls.items())]
        return _chat_answer("".join(self._text), "".join(self._reasoning), calls, self._finish, self._usage)


def _chat_answer(text: str, reasoning: str, calls: Sequence[Call], finish: Any, usage: Any) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    found = _usage(usage, "prompt", "completion")
    return Answer(_bounded(text), _bounded(reasoning), tuple(calls), finish == "length", found, 0, (message,))


def _parts(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A message's or a reasoning item's parts; reasoning that is only summarised has its summary."""
    return [part for part in item.get("content") or item.get("summary") or () if isinstance(part, dict)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _bounded(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise LostError(Fate.BROKEN, f"the answer is longer than {MAX_TEXT:,} characters", again=False)
    return text


def _usage(usage: Any, read: str, written: str) -> Usage:
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get(f"{written}_tokens_details") or {}
    found = (usage.get(f"{read}_tokens"), usage.get(f"{written}_tokens"), details.get("reasoning_tokens"))
    return Usage(*(value if isinstance(value, int) and 0 <= value < 1 << 32 else 0 for value in found))


def _reported(error: Any) -> LostError:
    """An error inside an answer: the request's fault where the server reports that."""
    error = error if isinstance(error, dict) else {"message": error}
    detail = json.dumps(error)[:500]
    code = error.get("code")
    own = (isinstance(code, int) and 400 <= code < 500 and code != 429) or code == "invalid_prompt"
    return LostError(Fate.REFUSED if own else Fate.FAILED, f"the server reports {detail}", again=not own)


APIS: Mapping[str, type[Responses] | type[Chat]] = {"responses": Responses, "chat": Chat}
