"""Replicas behind a load balancer that knows no affinity: completed responses survive any kill.

Two servers on one PostgreSQL, an hour apart by their clocks, and HAProxy, which sends every request to either. Both
servers and the database are killed and started again, in turn, all the time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml

from demo.server import NAME
from tests.e2e.ledger import Ledger, Talker, faults
from tests.support import scale
from tests.support.places import ROOT
from tests.support.replicas import HAPROXY, NO_HAPROXY, Replica, balancer
from tests.support.responses.postgres import Postgres

pytestmark = [pytest.mark.slow, pytest.mark.skipif(HAPROXY is None, reason=NO_HAPROXY)]
HOUR = 3600.0
ANSWER = "user message {users} of this conversation, and some words more that take their time to come"
TURNS, AT_ONCE = 6, 8


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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("cluster")
    tools = home / "tools.yaml"
    tools.write_text(yaml.safe_dump({"browser": {"documents": str(ROOT / "demo" / "documents")}}))
    database = Postgres()
    with ExitStack() as stack:
        stack.callback(database.remove)
        replicas = [Replica(database.url, str(tools), home / "log", clock) for clock in (0.0, HOUR)]
        for replica in replicas:
            stack.callback(replica.kill)
            replica.start()
        yield Cluster(stack.enter_context(balancer(replicas, home)), replicas, database)


class Counting:
    """Each answer has the number of user messages in its prompt, which shows lost and repeated turns."""

    turns = TURNS

    def request(self, turn: int, nonce: str) -> dict[str, Any]:
        del turn, nonce
        return {"input": json.dumps([f"<|channel|>final<|message|>{ANSWER}<|return|>"])}

    def check(self, turn: int, response: dict[str, Any]) -> None:
        assert response["output"][-1]["content"][0]["text"] == ANSWER.format(users=turn)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_nothing_that_was_reported_complete_is_lost_whoever_is_killed(cluster: Cluster) -> None:
    seen, ledger = Counter[str](), Ledger()
    count = scale.count(1000, 20)
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=cluster.api, timeout=60) as http:
        over = asyncio.Event()
        chaos = asyncio.create_task(cluster.chaos(seen, over))
        queue = iter(range(count))

        async def worker() -> None:
            for number in queue:
                await Talker(http, ledger).converse(number, Counting())

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(worker())
        took = time.monotonic() - began
        over.set()
        await chaos
    print(f"{count} conversations of {TURNS} turns in {took:.0f} s: {dict(seen)} {ledger.counts()}")
    kills = [seen[name] for name in ("replica 0 killed", "replica 1 killed", "database killed")]
    assert min(kills) > 0
    assert not faults(ledger)
    assert len(ledger.kept) == count * TURNS
    for replica in cluster.replicas:
        await replica.has(ledger.kept)


async def test_a_server_whose_clock_is_wrong_gives_up_no_others_response(cluster: Cluster) -> None:
    """Neither a background response that another runs, nor a conversation that another's works on."""
    here, there = cluster.replicas
    script = json.dumps([f"<|channel|>final<|message|>{ANSWER * 20}<|return|>"])  # some 4 s
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
                await asyncio.sleep(0.1)
            assert seen["in_progress"] > 1
