"""Every part of a deployment is killed in turn: two servers, the tools service, the database. Nothing is lost unsaid.

HAProxy sends each request to either server; files of python calls go to S3-compatible storage (moto). A ledger has
every request. In the middle one of the servers comes back as one of the next release, with a newer schema, and the
other works on. In the last quarter nothing is killed: what is held there must stay flat.

There is no sample in `make test`: the parts by themselves are in `test_replicas.py` and `test_tools_service.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import PYTHON
from tests.e2e.deployment import Cluster, cluster, schema_of, transactions
from tests.e2e.ledger import Ledger, Script, Talker, faults
from tests.support import scale
from tests.support.machine import without_namespaces
from tests.support.replicas import HAPROXY, NO_HAPROXY, Replica, VllmReplica
from tests.support.responses import upgrading
from tests.support.s3 import IS_HERE
from tests.support.watched import Watch, median
from vllm_gptoss.tools.python.kept import KeptFiles

pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.namespaces,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not scale.SOAK, reason="GPTOSS_SOAK=1 runs it; its parts have tests of their own"),
    pytest.mark.skipif(HAPROXY is None, reason=NO_HAPROXY),
    pytest.mark.skipif(without_namespaces() is not None, reason=str(without_namespaces())),
    pytest.mark.skipif(not IS_HERE, reason="moto and s3fs are in the group `test` and the extra `s3`"),
]
CONVERSATIONS = int(os.environ.get("GPTOSS_SOAK_CONVERSATIONS", "1000"))
MINUTES = float(os.environ.get("GPTOSS_SOAK_MINUTES", "60"))
MIB = 1 << 20
TOLD = (
    "This python session is new",
    "may have run",
    "Nothing was run",
    "not the one that earlier calls ran in",
    "closed to make room",
    "are lost",
)
"""What the model reads where a call, or what earlier ones left, is lost or may be."""
UNSEEN = "Calls that you do not see ran in this python session"
"""What it reads where an attempt that died left something behind."""


@dataclass(frozen=True)
class Load:
    """It ends with `count` conversations, or after `seconds`; those that were begun are held to their end."""

    count: int
    at_once: int
    seconds: float = MINUTES * 60


CODE = """
import time, uuid
runs = globals().setdefault('runs', [])
runs.append('NONCE')
open(f'/mnt/data/NONCE.{uuid.uuid4().hex}', 'w').write('run')
time.sleep(SECONDS)
print('runs:', *runs)
"""


@dataclass
class Replayed:
    """Two turns of five call python, which leaves a file of its nonce and prints the nonces that this notebook ran."""

    chance: random.Random
    seen: Counter[str]
    turns: int = 5
    ran: list[str] = field(default_factory=list)

    def request(self, turn: int, nonce: str) -> dict[str, Any]:
        words = " and words more" * self.chance.randrange(3, 40)
        said = [f"<|channel|>final<|message|>{nonce}: user message {{users}},{words}<|return|>"]
        if self.chance.random() < 0.4:
            code = CODE.replace("NONCE", nonce).replace("SECONDS", self.chance.choice(("0", "0", "2")))
            said.insert(0, f"<|channel|>analysis to=python code<|message|>{code}<|call|>")
        return {"input": json.dumps(said), "tools": [PYTHON]}

    def check(self, turn: int, response: dict[str, Any]) -> None:
        said = response["output"][-1]["content"][0]["text"]
        assert f"user message {turn}," in said, (turn, said)
        nonce = said.split(":")[0]
        for call in response["output"]:
            if call["type"] == "code_interpreter_call":
                self.read(nonce, "".join(o["logs"] for o in call["outputs"] or () if o["type"] == "logs"))

    def read(self, nonce: str, text: str) -> None:
        """Whatever a notebook had run for completed turns is there once, in order, or its loss is told."""
        told = any(note in text for note in TOLD)
        found = re.search(r"runs: (.*)", text)
        self.seen["calls told of a loss" if told else "calls that went on"] += 1
        if told:
            self.ran = []
        if not found:
            assert told, text
            return
        runs = found[1].split()
        assert len(set(runs)) == len(runs), f"twice in one notebook: {runs}"
        self.ran.append(nonce)
        if not told:
            assert [run for run in runs if run in self.ran] == self.ran, (text, self.ran)


@dataclass
class ByHeart:
    """What the bundled model knows. The first conversation's second turn needs the first one's variable."""

    python: bool
    turns: int
    is_lost: bool = False

    PYTHON_TURNS = ("Set x to 20 in Python, then double it.", "Add one to it.")
    TEXT_TURNS = (("What is the capital of France?", "Paris"), ("And of Germany?", "Berlin"))

    def request(self, turn: int, nonce: str) -> dict[str, Any]:
        asks = self.PYTHON_TURNS[turn - 1] if self.python else self.TEXT_TURNS[turn - 1][0]
        return {"input": asks, "temperature": 0, **({"tools": [PYTHON]} if self.python else {})}

    def check(self, turn: int, response: dict[str, Any]) -> None:
        if not self.python:
            assert self.TEXT_TURNS[turn - 1][1] in response["output"][-1]["content"][0]["text"]
            return
        calls = [item for item in response["output"] if item["type"] == "code_interpreter_call"]
        texts = ["".join(o["logs"] for o in call["outputs"] or () if o["type"] == "logs") for call in calls]
        self.is_lost = self.is_lost or any(note in text for note in (*TOLD, UNSEEN) for text in texts)
        if not self.is_lost:
            assert [text.strip() for text in texts] == (["(no output)", "40"] if turn == 1 else ["41"]), texts


async def run(
    cluster: Cluster, script: Callable[[int], Script], pace: tuple[float, float], load: Load, upgrade: bool
) -> Ledger:
    """Three quarters of the conversations while parts die, or of the time, whichever is over first."""
    ledger, over = Ledger(), asyncio.Event()
    looking = asyncio.create_task(cluster.look())
    chaos = asyncio.create_task(cluster.chaos(over, *pace))
    began = time.monotonic()

    async def talk(numbers: Iterator[int], until: float) -> None:
        async with httpx.AsyncClient(base_url=cluster.api, timeout=120) as http:
            for number in numbers:
                await Talker(http, ledger).converse(number, script(number))
                half = time.monotonic() - began > load.seconds / 2 or ledger.conversations >= load.count // 2
                cluster.replicas[1].later = upgrade and half
                if time.monotonic() - began > until:
                    return

    async def all_of(numbers: range, until: float) -> None:
        queue = iter(numbers)
        async with asyncio.TaskGroup() as group:
            for _ in range(load.at_once):
                group.create_task(talk(queue, until))

    noisy = 3 * load.count // 4
    await all_of(range(noisy), load.seconds * 0.75)
    over.set()
    await chaos
    before, asked = await transactions(cluster.database), len(ledger.asked)
    await all_of(range(noisy, load.count), load.seconds)
    cluster.quiet_responses = len(ledger.asked) - asked
    cluster.quiet_transactions = await transactions(cluster.database) - before
    looking.cancel()
    return ledger


def runs_by_nonce(files: str) -> Counter[str]:
    """How often each nonce's call left its file, in whatever container."""
    kept = KeptFiles(files)
    kept.open()
    containers = {container for container, *_ in kept.every()}
    named = [file.filename for container in containers for file in kept.listing(container)]
    return Counter(name.rpartition("/")[2].partition(".")[0] for name in named)


async def same_on(replica: Replica, kept: dict[str, dict[str, Any]]) -> None:
    async with httpx.AsyncClient(base_url=replica.api, timeout=60) as http:
        for identifier, response in kept.items():
            assert (await http.get(f"/responses/{identifier}")).json() == response


async def transactions_by_style(cluster: Cluster, script: Callable[[int], Script]) -> dict[str, float]:
    """Of the database for one response, and one look at it, in conversations of five turns."""
    found = {}
    async with httpx.AsyncClient(base_url=cluster.replicas[0].api, timeout=120) as http:
        for style in ("whole", "streamed", "followed"):
            ledger, before = Ledger(), await transactions(cluster.database)
            for number in range(4):
                await Talker(http, ledger, (style,)).converse(number, script(number))
            made = await transactions(cluster.database) - before
            found[style] = round(made / len(ledger.asked), 1)
    return found


def figures(cluster: Cluster, ledger: Ledger, took: float) -> dict[str, Any]:
    """What the run was like, for the record."""
    watch, end = cluster.watch, cluster.watch.samples[-1].at
    last_death = cluster.killed[-1][0]
    held = {}
    for name in watch.parts:
        quarters = [watch.of(name, end * n / 4, end * (n + 1) / 4) for n in range(4)]
        held[name] = {
            "resident_mib": [round(median([s.resident for s in q]) / MIB, 1) for q in quarters],
            "descriptors": [median([s.descriptors for s in q]) for q in quarters],
            "children": [median([s.children for s in q]) for q in quarters],
        }
    connections = [watch.connections_between(end * n / 4, end * (n + 1) / 4) for n in range(4)]
    settled = sorted(asked.settled_s for asked in ledger.asked)
    return {
        "conversations": ledger.conversations,
        "completed_responses": len(ledger.kept),
        "requests": len(ledger.asked),
        "seconds": round(took),
        "kills": Counter(name for _, name in cluster.killed),
        "killing_ended_at_s": round(last_death),
        "by_replica": Counter(asked.replica for asked in ledger.asked),
        "requests_that_ended": ledger.counts(),
        "reasons_of_failures": Counter(asked.error for asked in ledger.asked if asked.status == "failed"),
        "until_it_was_known_s": {
            "median": round(settled[len(settled) // 2], 2),
            "longest": round(settled[-1], 1),
        },
        "quiet": {
            "responses": cluster.quiet_responses,
            "transactions_per_response": round(cluster.quiet_transactions / cluster.quiet_responses, 1),
        },
        "by_quarter_of_the_time": held,
        "database_connections": [{"median": median(c), "most": max(c, default=0)} for c in connections],
    }


def is_flat(cluster: Cluster) -> None:
    """In the quiet quarter nobody dies and nothing grows; the database's connections stay within the pools."""
    watch, end = cluster.watch, cluster.watch.samples[-1].at
    quiet = cluster.killed[-1][0]
    warm = end - (end - quiet) * 0.6
    for name in watch.parts:
        early, late = watch.of(name, warm, warm + (end - warm) / 3), watch.of(name, end - (end - warm) / 3)
        grown = median([s.resident for s in late]) - median([s.resident for s in early])
        assert grown < 24 * MIB, f"{name} has grown by {grown / MIB:.0f} MiB while nobody died"
        more = median([s.descriptors for s in late]) - median([s.descriptors for s in early])
        assert more < 16, f"{name} holds {more} descriptors more"
    assert max(count for _, count in watch.connected) <= 2 * 15 + 1
    first, last = watch.connections_between(0, end / 4), watch.connections_between(end * 3 / 4, end)
    assert median(last) <= median(first) + 6


async def gone(watch: Watch, patience: float = 30) -> list[int]:
    """What is left of all processes that were ever seen, once it had time to go."""
    began = time.monotonic()
    while (left := watch.left()) and time.monotonic() - began < patience:
        await asyncio.sleep(0.2)
    return left


async def test_a_thousand_conversations_while_each_part_is_killed_in_turn(tmp_path: Path) -> None:
    """The model is a replay, so that each turn knows what it must say; all else is real."""
    seen = Counter[str]()
    async with cluster(tmp_path, Replica) as deployed:
        began = time.monotonic()
        script = lambda number: Replayed(random.Random(-number), seen)  # noqa: E731
        ledger = await run(deployed, script, (1.5, 4.0), Load(CONVERSATIONS, 20), upgrade=True)
        record = figures(deployed, ledger, time.monotonic() - began) | {"calls": dict(seen)}
        runs = runs_by_nonce(deployed.files)
        record["transactions_by_style"] = await transactions_by_style(deployed, script)
        record["calls"] |= {"that left a file": len(runs), "run twice": [n for n, c in runs.items() if c > 1]}
        print(json.dumps(record, indent=1))
        for replica in deployed.replicas:
            await same_on(replica, ledger.kept)
        assert not faults(ledger), "\n".join(faults(ledger)[:20])
        assert set(record["kills"]) == {part.name for part in deployed.parts}
        assert len(ledger.kept) == ledger.conversations * 5
        assert runs
        assert max(runs.values()) == 1, "a call ran twice"
        assert await schema_of(deployed.database) == upgrading.NEXT
        assert "newer version; this server knows" in deployed.replicas[0].log.read_text()
        is_flat(deployed)
    assert not await gone(deployed.watch)


@pytest.mark.vllm
@pytest.mark.serve
async def test_two_real_servers_of_the_small_model_while_each_part_is_killed(tmp_path: Path, model_dir: Path) -> None:
    """`vllm serve` with its engine: what it has learned by heart is right whoever was killed, or its loss is told."""
    count = max(8, CONVERSATIONS // 10)
    async with cluster(tmp_path, VllmReplica, model=model_dir) as deployed:
        began = time.monotonic()
        ledger = await run(deployed, lambda n: ByHeart(n % 2 == 0, 2), (2.0, 5.0), Load(count, 8), upgrade=False)
        print(json.dumps(figures(deployed, ledger, time.monotonic() - began), indent=1))
        for replica in deployed.replicas:
            await same_on(replica, ledger.kept)
        assert not faults(ledger), "\n".join(faults(ledger)[:20])
        assert len(ledger.kept) == ledger.conversations * 2
    assert not await gone(deployed.watch)
