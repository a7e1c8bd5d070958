"""A server of both APIs on a real socket that answers as a test specifies: correctly, wrongly, slowly, in pieces or
never."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from tests.support.sockets import listening

MODEL = "openai/gpt-oss-20b"


@dataclass(frozen=True)
class Words:
    """A well-formed answer."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()
    cut: bool = False
    tokens: int = 20
    citations: int = 0


@dataclass(frozen=True)
class Raw:
    """An answer. end: what follows `parts`; pause_s: before each part."""

    parts: Sequence[bytes] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    pause_s: float = 0.0
    end: str = "whole"  # or "cut": the connection breaks; "hang": nothing comes any more; "drip": bytes for ever


Reply = Words | Raw
Plan = Callable[[dict[str, Any], int], Reply]
"""The answer for a request's body and the number of earlier requests with its last user message."""


def asked(body: Mapping[str, Any]) -> str:
    """The last user message of a request of either API."""
    messages = body.get("input") or body.get("messages") or ()
    return next((m["content"] for m in reversed(messages) if m.get("role") == "user"), "")


def results(body: Mapping[str, Any]) -> list[str]:
    """What functions have answered since the last user message."""
    messages = body.get("input") or body.get("messages") or []
    last = max((place for place, m in enumerate(messages) if m.get("role") == "user"), default=-1)
    return [m.get("output") or m.get("content") for m in messages[last + 1 :] if _is_result(m)]


def _is_result(message: Mapping[str, Any]) -> bool:
    return message.get("type") == "function_call_output" or message.get("role") == "tool"


def response(words: Words) -> dict[str, Any]:
    """A response object."""
    thought = [{"type": "reasoning_text", "text": words.reasoning}]
    part = {"type": "output_text", "text": words.text, "annotations": [{"type": "url_citation"}] * words.citations}
    items: list[dict[str, Any]] = [{"type": "reasoning", "id": "rs", "content": thought}] if words.reasoning else []
    items += [
        {"type": "function_call", "call_id": f"c{number}", "name": name, "arguments": arguments}
        for number, (name, arguments) in enumerate(words.calls)
    ]
    items += [{"type": "message", "role": "assistant", "content": [part]}] if words.text else []
    status = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}} if words.cut else {}
    usage = {"output_tokens": words.tokens}
    return {"id": "r", "object": "response", "status": "completed", "output": items, "usage": usage, **status}


def events(words: Words, chat: bool) -> list[bytes]:
    """The answer as a stream, text in pieces of three characters."""
    pieces = [words.text[at : at + 3] for at in range(0, len(words.text), 3)]
    if not chat:
        named = [("response.created", {})]
        named += [("response.output_text.delta", {"delta": piece}) for piece in pieces]
        last = "response.incomplete" if words.cut else "response.completed"
        named.append((last, {"response": response(words)}))
        return [f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode() for name, data in named]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "reasoning": words.reasoning or None}]
    deltas += [{"content": piece} for piece in pieces]
    for index, (name, arguments) in enumerate(words.calls):
        call = {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        deltas.append({"tool_calls": [{**call, "index": index}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": one}}]} for one in arguments]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    finish = "length" if words.cut else "tool_calls" if words.calls else "stop"
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({"choices": [], "usage": {"completion_tokens": words.tokens}})
    return [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + [b"data: [DONE]\n\n"]


def rendered(reply: Reply, body: Mapping[str, Any], chat: bool) -> Raw:
    if isinstance(reply, Raw):
        return reply
    assert body["stream"]
    return Raw(events(reply, chat), headers={"content-type": "text/event-stream"})


class App:
    """The ASGI application; `bodies` holds all requests."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.bodies: list[dict[str, Any]] = []
        self.busiest = 0
        self._busy = 0
        self._seen: dict[str, int] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError
        if scope["path"].endswith("/models"):
            await self._send(Raw([json.dumps({"data": [{"id": MODEL}]}).encode()]), send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        try:
            await self._answer(json.loads(body), scope["path"].endswith("/chat/completions"), send)
        finally:
            self._busy -= 1

    async def _answer(self, body: dict[str, Any], chat: bool, send: Any) -> None:
        self.bodies.append(body)
        before = self._seen.get(asked(body), 0)
        self._seen[asked(body)] = before + 1
        await self._send(rendered(self.plan(body, before), body, chat), send)

    async def _send(self, raw: Raw, send: Any) -> None:
        headers = [(name.encode(), value.encode()) for name, value in raw.headers.items()]
        await send({"type": "http.response.start", "status": raw.status, "headers": headers})
        async for part in _parts(raw):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _parts(raw: Raw) -> AsyncIterator[bytes]:
    for part in raw.parts:
        if raw.pause_s:
            await asyncio.sleep(raw.pause_s)
        yield part
    if raw.end == "cut":
        raise ConnectionError("the test wants a broken answer")
    while raw.end == "hang":
        await asyncio.sleep(0.05)
        yield b""
    while raw.end == "drip":
        await asyncio.sleep(0.02)
        yield b":\n"


@dataclass(frozen=True)
class Served:
    """A server in a thread."""

    api: str
    app: App


@contextmanager
def serving(plan: Plan) -> Iterator[Served]:
    app, listener = App(plan), listening()
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", app)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


SUM = re.compile(r"What is (\d+) \+ (\d+)\?")


def sums(body: Mapping[str, Any], before: int) -> Words:
    """Adds, as a model that reasons for a while would."""
    del before
    found = SUM.search(asked(body))
    assert found, asked(body)
    return Words(f"The answer is \\boxed{{{int(found[1]) + int(found[2])}}}.", "I add. " * 200, tokens=400)
