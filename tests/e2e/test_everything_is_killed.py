"""Every part of a deployment is killed in turn: two servers, the tools service, the database. Nothing is lost unsaid.

HAProxy sends each request to either server; files of python calls go to S3-compatible storage (moto). A ledger has
every request. In the middle one of the servers comes back as one of the next release, with a newer schema, and the
other works on, and comes back as it was. In the last quarter nothing is killed: what is held there must stay flat.
However few conversations there are, all of that happens: more are held until it has.

`GPTOSS_SOAK_REPORT`: the file that gets the figures, as JSON; they are printed too.

There is no sample in `make test`: the parts by themselves are in `test_replicas.py` and `test_tools_service.py`.
"""

from __future__ import annotations

import asyncio
import itertools
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
from tests.e2e.deployment import Chaos, Cluster, cluster, schema_of, transactions
from tests.e2e.ledger import Ledger, Script, Talker, faults
from tests.support import scale
from tests.support.machine import without_namespaces
from tests.support.replicas import HAPROXY, NO_HAPROXY, Replica, VllmReplica
from tests.support.responses import upgrading
from tests.support.s3 import IS_HERE
from tests.support.watched import Watch, median
from vllm_gptoss.tools.python.kept import KeptFiles

CONVERSATIONS = int(os.environ.get("GPTOSS_SOAK_CONVERSATIONS", "1000"))
MINUTES = float(os.environ.get("GPTOSS_SOAK_MINUTES", "60"))
REPORT = os.environ.get("GPTOSS_SOAK_REPORT")
POOL = 15
"""Connections that one server may open: SQLAlchemy's pool of 5, and 10 more under load."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.namespaces,
    pytest.mark.timeout(60 * (MINUTES + 60)),
    pytest.mark.skipif(not scale.SOAK, reason="GPTOSS_SOAK=1 runs it; its parts have separate tests"),
    pytest.mark.skipif(HAPROXY is None, reason=NO_HAPROXY),
    pytest.mark.skipif(without_namespaces() is not None, reason=str(without_namespaces())),
    pytest.mark.skipif(not IS_HERE, reason="moto and s3fs are in the group `test` and the extra `s3`"),
]
MIB = 1 << 20
QUIET_ROUNDS = 3
"""Least number of conversations of each client in the middle, when no part is killed."""
TOLD = (
    "This python session is new",
    "may have run",
    "Nothing was run",
    "not the one that earlier calls ran in",
    "closed to make room",
    "are lost",
)
"""Notes to the model that a call or the results of earlier calls are lost or may be lost."""
UNSEEN = "Calls that you do not see ran in this python session"
"""Notes to the model that a failed attempt left results."""


@dataclass(frozen=True)
class Load:
    """It ends with `count` conversations, or after `seconds`; those that were begun are held to their end. Longer where
    not each part was killed by then, or the quiet part was too short to see anything grow."""

    count: int
    at_once: int
    seconds: float = MINUTES * 60

    def reached(self, share: float, held: int, took: float) -> bool:
        return held >= share * self.count or took >= share * self.seconds


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
        """Calls of completed turns are in the notebook once, in order, or their loss is reported."""
        told = any(note in text for note in TOLD)
        found = re.search(r"runs: (.*)", text)
        self.seen["calls with a reported loss" if told else "calls that went on"] += 1
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
    """Conversations of the bundled model. The first conversation's second turn needs the first one's variable."""

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


async def run(cluster: Cluster, script: Callable[[int], Script], load: Load, plan: Chaos) -> Ledger:
    """Three quarters of the conversations while parts are killed, or of the time, until the first of both ends; then
    the rest."""
    ledger, numbers, began = Ledger(), itertools.count(), time.monotonic()
    looking = asyncio.create_task(cluster.look())
    chaos = asyncio.create_task(cluster.chaos(plan))

    def is_noisy() -> bool:
        for share, event in ((0.5, plan.half), (0.75, plan.enough)):
            if load.reached(share, ledger.conversations, time.monotonic() - began):
                event.set()
        return not chaos.done()

    try:
        await hold(ledger, script, load, numbers, cluster.api, is_noisy)
        await chaos
        before, asked, held = await transactions(cluster.database), len(ledger.asked), ledger.conversations
        whole = held + max(load.count // 4, QUIET_ROUNDS * load.at_once)
        least = held + QUIET_ROUNDS * load.at_once

        def is_quiet() -> bool:
            late = time.monotonic() - began > load.seconds
            return ledger.conversations < (least if late else whole)

        await hold(ledger, script, load, numbers, cluster.api, is_quiet)
        cluster.quiet_responses = len(ledger.asked) - asked
        cluster.quiet_transactions = await transactions(cluster.database) - before
    finally:
        plan.broken_off.set()  # a part that is being started would be left behind
        looking.cancel()
        await asyncio.gather(chaos, looking, return_exceptions=True)
    return ledger


async def hold(
    ledger: Ledger,
    script: Callable[[int], Script],
    load: Load,
    numbers: Iterator[int],
    api: str,
    goes_on: Callable[[], bool],
) -> None:
    """Conversations, several at once, as long as `goes_on`; those that were begun to their end."""

    async def talk() -> None:
        async with httpx.AsyncClient(base_url=api, timeout=120) as http:
            while goes_on():
                number = next(numbers)
                await Talker(http, ledger).converse(number, script(number))

    async with asyncio.TaskGroup() as group:
        for _ in range(load.at_once):
            group.create_task(talk())


def runs_by_nonce(files: str) -> Counter[str]:
    """How often each nonce's call wrote its file, over all containers."""
    kept = KeptFiles(files)
    kept.open()
    containers = {container for container, *_ in kept.every()}
    named = [file.filename for container in containers for file in kept.listing(container)]
    return Counter(name.rpartition("/")[2].partition(".")[0] for name in named)


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
    """Figures of the run, for the record."""
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
        "until_it_was_known_s": {"median": round(settled[len(settled) // 2], 2), "longest": round(settled[-1], 1)},
        "quiet": {
            "responses": cluster.quiet_responses,
            "transactions_per_response": round(cluster.quiet_transactions / cluster.quiet_responses, 1),
        },
        "by_quarter_of_the_time": held,
        "database_connections": [{"median": median(c), "most": max(c, default=0)} for c in connections],
    }


def is_flat(cluster: Cluster) -> None:
    """After the warm-up and without kills, memory and descriptors do not grow, and the database's connections stay
    within the pools."""
    watch, quiet = cluster.watch, cluster.killed[-1][0]
    warm = quiet + (watch.samples[-1].at - quiet) * 0.4
    for name in watch.parts:
        samples = watch.of(name, warm)
        third = len(samples) // 3
        assert third, f"{name} was seen {len(samples)} times only without kills"
        early, late = samples[:third], samples[-third:]
        grown = median([s.resident for s in late]) - median([s.resident for s in early])
        assert grown < 24 * MIB, f"{name} has grown by {grown / MIB:.0f} MiB while nobody died"
        more = median([s.descriptors for s in late]) - median([s.descriptors for s in early])
        assert more < 16, f"{name} holds {more} descriptors more"
    assert max(count for _, count in watch.connected) <= 2 * POOL + 1
    end = watch.samples[-1].at
    first, last = watch.connections_between(0, end / 4), watch.connections_between(end * 3 / 4, end)
    assert median(last) <= median(first) + 6


async def gone(watch: Watch, patience: float = 30) -> list[int]:
    """Processes that are still alive after a waiting time, of all that were seen."""
    began = time.monotonic()
    while (left := watch.left()) and time.monotonic() - began < patience:
        await asyncio.sleep(0.2)
    return left


def summary(record: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
    """Figures of a run for docs/scale.md. lost: completed and not stored, or not reported."""
    ends, held = record["requests_that_ended"], record["by_quarter_of_the_time"]
    told = {name: count for name, count in ends.items() if not name.endswith("completed")}
    return {
        "conversations": ledger.conversations,
        "turns": len(ledger.kept),
        "kills": sum(record["kills"].values()),
        "lost": len(faults(ledger)),
        "told": told | {"calls": record.get("calls", {}).get("calls with a reported loss", 0)},
        "resident_mib": {name: (part["resident_mib"][0], part["resident_mib"][-1]) for name, part in held.items()},
        "database_connections": record["database_connections"][-1],
    }


def report(record: dict[str, Any], ledger: Ledger) -> None:
    """Before anything is asserted of the run: a red one has figures, too."""
    text = json.dumps({"summary": summary(record, ledger)} | record, indent=1)
    print(text)
    if REPORT:
        Path(REPORT).write_text(f"{text}\n")


async def test_a_thousand_conversations_while_each_part_is_killed_in_turn(tmp_path: Path) -> None:
    """The model is a replay, so that the text of each turn is known; everything else is real."""
    seen = Counter[str]()
    async with cluster(tmp_path, Replica) as deployed:
        began = time.monotonic()
        script = lambda number: Replayed(random.Random(-number), seen)  # noqa: E731
        ledger = await run(deployed, script, Load(CONVERSATIONS, 20), Chaos(1.5, 4.0, upgrades=True))
        record = figures(deployed, ledger, time.monotonic() - began) | {"calls": dict(seen)}
        runs = runs_by_nonce(deployed.files)
        record["transactions_by_style"] = await transactions_by_style(deployed, script)
        record["calls"] |= {"that left a file": len(runs), "run twice": [n for n, c in runs.items() if c > 1]}
        report(record, ledger)
        for replica in deployed.replicas:
            await replica.has(ledger.kept)
        assert not faults(ledger), "\n".join(faults(ledger)[:20])
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
    """`vllm serve` with its engine: memorised answers are right after any kill, or their loss is reported."""
    count = max(8, CONVERSATIONS // 10)
    async with cluster(tmp_path, VllmReplica, model=model_dir) as deployed:
        began = time.monotonic()
        plan = Chaos(2.0, 5.0, upgrades=False)
        ledger = await run(deployed, lambda n: ByHeart(n % 2 == 0, 2), Load(count, 8), plan)
        report(figures(deployed, ledger, time.monotonic() - began), ledger)
        for replica in deployed.replicas:
            await replica.has(ledger.kept)
        assert not faults(ledger), "\n".join(faults(ledger)[:20])
        assert len(ledger.kept) == ledger.conversations * 2
    assert not await gone(deployed.watch)
