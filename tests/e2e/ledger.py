"""A client that writes down every request that it makes, and what became of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from demo.server import NAME
from tests.support.replicas import SERVED_BY

STYLES = ("whole", "streamed", "background", "followed")
ENDED = ("completed", "failed", "incomplete", "cancelled")
LAST = ("response.completed", "response.failed", "response.incomplete", "error")
NOT_THERE = "not there"
BOUND = 90.0
"""Seconds in which it must be known what became of a request: heartbeats, restarts, two busy cores."""


@dataclass
class Asked:
    """One request. `answered`: an HTTP status, 0 without any; `cut`: the connection ended before the answer did;
    `last`: the type of the stream's last event; `status`: the final result of GET; `error`: how it failed."""

    id: str
    conversation: int
    turn: int
    style: str
    nonce: str
    replica: str = ""
    answered: int = 0
    refused: str = ""
    cut: bool = False
    last: str = ""
    events: int = 0
    status: str = ""
    error: str = ""
    settled_s: float = 0.0

    @property
    def in_background(self) -> bool:
        return self.style in ("background", "followed")


class Script(Protocol):
    """The texts of a conversation. `turns`: their number."""

    turns: int

    def request(self, turn: int, nonce: str) -> dict[str, Any]:
        """`input` and `tools` of a turn, from 1."""
        ...

    def check(self, turn: int, response: dict[str, Any]) -> None:
        """Asserts that a completed turn is right."""
        ...


@dataclass
class Ledger:
    """All requests. `kept` has completed responses as first read."""

    asked: list[Asked] = field(default_factory=list)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    conversations: int = 0

    def counts(self) -> dict[str, int]:
        """Outcomes of requests, by style."""
        found = Counter(f"{asked.style} {asked.status}" for asked in self.asked)
        found["connection cut"] = sum(asked.cut for asked in self.asked)
        for asked in self.asked:
            if asked.refused:
                found[f"refused: {asked.refused}"] += 1
        return dict(sorted(found.items()))


@dataclass
class Talker:
    """Runs one conversation after the other and retries until each turn has a completed response."""

    http: httpx.AsyncClient
    ledger: Ledger
    styles: Sequence[str] = STYLES

    async def converse(self, number: int, script: Script) -> None:
        """By the last response's id, or as a conversation object."""
        chance = random.Random(number)
        where: dict[str, Any] = {}
        if chance.random() < 0.5:
            where = {"conversation": (await self.made())["id"]}
        for turn in range(1, script.turns + 1):
            response = await self.completed(number, turn, script, chance, where)
            script.check(turn, response)
            if "conversation" not in where:
                where = {"previous_response_id": response["id"]}
        self.ledger.conversations += 1

    async def made(self) -> dict[str, Any]:
        async def attempt() -> dict[str, Any] | None:
            answered = await self.http.post("/conversations", json={})
            return dict(answered.json()) if answered.status_code == 200 else None

        return await self.until(attempt)

    async def completed(
        self, number: int, turn: int, script: Script, chance: random.Random, where: dict[str, Any]
    ) -> dict[str, Any]:
        """The turn's completed response. A missing response is requested again with the same id, so that a stored one
        is not created twice; every attempt has its nonce."""
        style, identifier = chance.choice(self.styles), f"turn_{uuid.uuid4().hex}"
        began, attempt = time.monotonic(), 0
        while True:
            assert time.monotonic() - began < 2 * BOUND, f"never completed: {self.ledger.asked[-1]}"
            nonce = f"c{number}t{turn}a{attempt}"
            asked = Asked(identifier, number, turn, style, nonce)
            self.ledger.asked.append(asked)
            body = {"model": NAME, "request_id": identifier, "include": ["code_interpreter_call.outputs"]}
            await self.ask(asked, body | script.request(turn, nonce) | where)
            found = await self.settled(asked)
            if asked.status == "completed":
                self.ledger.kept[identifier] = found
                return found
            if asked.status in ENDED:
                identifier = f"turn_{uuid.uuid4().hex}"
            attempt += 1
            await asyncio.sleep(0.2)

    async def ask(self, asked: Asked, body: dict[str, Any]) -> None:
        """Makes the request, and reads the answer as far as it goes."""
        fields = {"background": asked.in_background, "stream": asked.style in ("streamed", "followed")}
        try:
            if fields["stream"]:
                await self.listen(asked, "POST", "/responses", json=body | fields)
            else:
                answered = await self.http.post("/responses", json=body | fields)
                self.note(asked, answered)
        except httpx.TransportError:
            asked.cut = True
        if asked.style == "followed" and asked.events:
            await self.resume_to_the_end(asked)

    async def resume_to_the_end(self, asked: Asked) -> None:
        began = time.monotonic()
        while asked.last not in LAST[:3]:
            assert time.monotonic() - began < BOUND, asked
            await asyncio.sleep(0.1)
            await self.resume(asked)

    async def resume(self, asked: Asked) -> None:
        """Continues on any replica; no event is missing or repeated."""
        seen = asked.events - 1
        try:
            await self.listen(asked, "GET", f"/responses/{asked.id}", params={"stream": "true", "starting_after": seen})
        except httpx.TransportError:
            asked.cut = True

    async def listen(self, asked: Asked, method: str, path: str, **fields: Any) -> None:
        async for event in self.events(asked, method, path, **fields):
            asked.last = event["type"]
            if event["type"] != "error":  # the store failed; a background response may go on
                assert event["sequence_number"] == asked.events, (asked, event)
                asked.events += 1

    async def events(self, asked: Asked, method: str, path: str, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        async with self.http.stream(method, path, **fields) as answered:
            if answered.status_code != 200:
                await answered.aread()
                self.note(asked, answered)
                return
            self.note(asked, answered)
            async for line in answered.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def note(self, asked: Asked, answered: httpx.Response) -> None:
        asked.replica = answered.headers.get(SERVED_BY, "") or asked.replica
        if asked.answered == 200:  # a resumed stream
            return
        asked.answered = answered.status_code
        if answered.status_code != 200:
            try:
                error = answered.json()["error"]
                asked.refused = f"{answered.status_code} {error.get('code') or error.get('message')}"
            except (ValueError, KeyError):
                asked.refused = f"{answered.status_code} of the balancer"

    async def settled(self, asked: Asked) -> dict[str, Any]:
        """The response once it has ended; its status is `NOT_THERE` if the server does not have it."""

        async def attempt() -> dict[str, Any] | None:
            answered = await self.http.get(f"/responses/{asked.id}")
            if answered.status_code == 404:
                return {"status": NOT_THERE}
            body: dict[str, Any] = answered.json() if answered.status_code == 200 else {}
            return body if body.get("status") in ENDED else None

        began = time.monotonic()
        found = await self.until(attempt)
        asked.settled_s = time.monotonic() - began
        asked.status = found["status"]
        error = found.get("error")
        asked.error = f"{error['code']}: {error['message']}" if error else ""
        return found

    async def until(self, attempt: Callable[[], Any]) -> dict[str, Any]:
        began = time.monotonic()
        while time.monotonic() - began < BOUND:
            try:
                if (found := await attempt()) is not None:
                    return dict(found)
            except (httpx.TransportError, json.JSONDecodeError):
                pass
            await asyncio.sleep(0.1)
        raise AssertionError(f"no answer for {BOUND} s: {self.ledger.asked[-1]}")


def faults(ledger: Ledger) -> list[str]:
    """Outcomes that no request may have after any kill."""
    found = []
    for asked in ledger.asked:
        if not asked.status:
            found.append(f"no known outcome of {asked}")
        streams = asked.style == "streamed" and asked.answered == 200
        if streams and not asked.cut and asked.last not in LAST:
            found.append(f"a stream ended without a last event: {asked}")
        if asked.last == "response.completed" and asked.status != "completed":
            found.append(f"reported as completed, and is not: {asked}")
        if asked.style == "whole" and asked.answered == 200 and asked.status != "completed":
            found.append(f"answered, and is not stored: {asked}")
        if asked.in_background and asked.answered == 200 and asked.status == NOT_THERE:
            found.append(f"taken in the background, and is not there: {asked}")
        if asked.status == "failed" and not asked.error:
            found.append(f"failed without a reason: {asked}")
    return found
