"""Replicas behind a load balancer that knows no affinity: what was reported complete is there, whoever is killed.

Two servers on one PostgreSQL, an hour apart by their clocks, and HAProxy, which sends every request to either. Both
servers and the database are killed and started again, in turn, all the time.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from demo.server import NAME
from tests.support import scale
from tests.support.places import ROOT
from tests.support.replicas import HAPROXY, NO_HAPROXY, Replica, balancer
from tests.support.responses.postgres import Postgres

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(HAPROXY is None, reason=NO_HAPROXY),
]
HOUR = 3600.0
ANSWER = "user message {users} of this conversation, and some words more that take their time to come"
TURNS, AT_ONCE = 6, 8
ENDED = ("completed", "failed", "incomplete", "cancelled")


@dataclass
class Cluster:
    api: str
    replicas: list[Replica]
    database: Postgres

    async def chaos(self, seen: Counter[str], over: asyncio.Event) -> None:
        """Kills and starts each part in turn, until it is `over`."""
        while not over.is_set():
            for number, replica in enumerate(self.replicas):
                await asyncio.to_thread(replica.kill)
                await asyncio.to_thread(replica.start)
                seen[f"replica {number} killed"] += 1
                await asyncio.sleep(0.3)
            await asyncio.to_thread(self.database.stop)
            await asyncio.to_thread(self.database.start)
            seen["database killed"] += 1
            await asyncio.sleep(0.3)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    tools = tmp_path / "tools.yaml"
    tools.write_text(yaml.safe_dump({"browser": {"documents": str(ROOT / "demo" / "documents")}}))
    database = Postgres()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, database.home)
        stack.callback(database.stop)
        replicas = [Replica(database.url, str(tools), tmp_path / "log", clock) for clock in (0.0, HOUR)]
        for replica in replicas:
            stack.callback(replica.kill)
            replica.start()
        yield Cluster(stack.enter_context(balancer(replicas, tmp_path)), replicas, database)


class RefusedError(Exception):
    """An answer without a stream."""


@dataclass
class Client:
    """One conversation at a time, as a careful client holds it: every request has an id of its choice.

    `kept`: what was reported complete; `seen`: how requests ended.
    """

    http: httpx.AsyncClient
    random: random.Random
    kept: dict[str, dict[str, Any]]
    seen: Counter[str]

    async def converse(self) -> None:
        """A conversation of `TURNS` turns, by the last response's id or as a conversation object."""
        where: dict[str, Any] = {}
        if self.random.random() < 0.5:
            where = {"conversation": (await self.until(self.make_conversation))["id"]}
        for turn in range(1, TURNS + 1):
            script = [f"<|channel|>final<|message|>{ANSWER}<|return|>"]
            response = await self.complete({"model": NAME, "input": json.dumps(script), **where})
            assert response["output"][-1]["content"][0]["text"] == ANSWER.format(users=turn)
            self.kept[response["id"]] = response
            if "conversation" not in where:
                where = {"previous_response_id": response["id"]}

    async def make_conversation(self) -> dict[str, Any] | None:
        made = await self.http.post("/conversations", json={})
        return made.json() if made.status_code == 200 else None

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Asks until there is a completed response, and never for one that there is already."""
        style = self.random.choice(("whole", "streamed", "background", "followed"))
        identifier = f"turn_{uuid.uuid4().hex}"
        while True:
            ask = getattr(self, f"ask_{style}")
            try:
                await ask(body | {"request_id": identifier})
            except httpx.TransportError:
                self.seen["connection lost"] += 1
            except RefusedError as refused:  # a conversation that a dead server's response still has
                self.seen[str(refused)] += 1
            found = await self.until(partial(self.find, identifier))
            if found["status"] == "completed":
                self.seen[f"{style} completed"] += 1
                return found
            self.seen[f"{style} {found['status']}"] += 1
            if found["status"] in ENDED:  # it is told what became of it, and asked for again
                identifier = f"turn_{uuid.uuid4().hex}"
            await asyncio.sleep(0.2)

    async def find(self, identifier: str) -> dict[str, Any] | None:
        """The response as it is kept once it has ended, or is not there; None while that cannot be said."""
        answered = await self.http.get(f"/responses/{identifier}")
        if answered.status_code == 404:
            return {"status": "not there"}
        body: dict[str, Any] = answered.json() if answered.status_code == 200 else {}
        return body if body.get("status") in ENDED else None

    async def until(self, attempt: Any, patience: float = 60.0) -> dict[str, Any]:
        began = time.monotonic()
        while time.monotonic() - began < patience:
            try:
                if (found := await attempt()) is not None:
                    return dict(found)
            except (httpx.TransportError, json.JSONDecodeError):
                self.seen["connection lost"] += 1
            await asyncio.sleep(0.1)
        raise AssertionError(f"no answer for {patience} s: {self.seen}")

    async def ask_whole(self, body: dict[str, Any]) -> None:
        await self.http.post("/responses", json=body)

    async def ask_streamed(self, body: dict[str, Any]) -> None:
        async for event in self.events("POST", "/responses", json=body | {"stream": True}):
            last = event
        if last["type"] == "response.completed":
            assert (await self.until(partial(self.find, body["request_id"])))["status"] == "completed"

    async def ask_background(self, body: dict[str, Any]) -> None:
        await self.http.post("/responses", json=body | {"background": True})

    async def ask_followed(self, body: dict[str, Any]) -> None:
        """A background response, streamed, and resumed wherever the connection ends."""
        seen, made = -1, False
        while True:
            path = f"/responses/{body['request_id']}"
            events = (
                self.events("GET", path, params={"stream": "true", "starting_after": seen})
                if made
                else self.events("POST", "/responses", json=body | {"background": True, "stream": True})
            )
            try:
                async for event in events:
                    if event["type"] == "error":  # the store failed; the response may go on
                        break
                    assert event["sequence_number"] == seen + 1, f"after {seen}: {event}"
                    seen, made = event["sequence_number"], True
                    if event["type"] in ("response.completed", "response.failed", "response.incomplete"):
                        return
            except (httpx.TransportError, RefusedError):
                self.seen["stream resumed"] += made
            if not made:
                return
            await asyncio.sleep(0.1)

    async def events(self, method: str, path: str, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        async with self.http.stream(method, path, **fields) as answered:
            if answered.status_code != 200:
                raise RefusedError(f"refused with {answered.status_code}")
            async for line in answered.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_nothing_that_was_reported_complete_is_lost_whoever_is_killed(cluster: Cluster) -> None:
    seen, kept = Counter[str](), dict[str, dict[str, Any]]()
    count = scale.count(1000, 50)
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=cluster.api, timeout=60) as http:
        over = asyncio.Event()
        chaos = asyncio.create_task(cluster.chaos(seen, over))
        queue = iter(range(count))

        async def worker() -> None:
            for number in queue:
                await Client(http, random.Random(number), kept, seen).converse()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(worker())
        took = time.monotonic() - began
        over.set()
        await chaos
    print(f"{count} conversations of {TURNS} turns in {took:.0f} s: {dict(seen)}")
    kills = [seen[name] for name in ("replica 0 killed", "replica 1 killed", "database killed")]
    assert min(kills) > 0
    assert len(kept) == count * TURNS
    for replica in cluster.replicas:
        await same_on(replica, kept)


async def test_a_server_whose_clock_is_wrong_gives_up_no_others_response(cluster: Cluster) -> None:
    """Neither a background response that another runs, nor a conversation that another's works on."""
    here, there = cluster.replicas
    script = json.dumps([f"<|channel|>final<|message|>{ANSWER}<|return|>"])
    async with httpx.AsyncClient(base_url=here.api) as one, httpx.AsyncClient(base_url=there.api) as other:
        for runs, looks in ((one, other), (other, one)):
            conversation = (await runs.post("/conversations", json={})).json()["id"]
            body = {"model": NAME, "input": script, "background": True, "conversation": conversation}
            identifier, seen = (await runs.post("/responses", json=body)).json()["id"], Counter[str]()
            locked = await looks.post("/responses", json=body)
            assert locked.json()["error"]["code"] == "conversation_locked"
            while not seen["completed"]:
                seen[(await looks.get(f"/responses/{identifier}")).json()["status"]] += 1
                assert not seen["failed"]
            assert seen["in_progress"] > 1


async def same_on(replica: Replica, kept: dict[str, dict[str, Any]]) -> None:
    async with httpx.AsyncClient(base_url=replica.api, timeout=60) as http:
        for identifier, response in kept.items():
            assert (await http.get(f"/responses/{identifier}")).json() == response
