"""The soak's schedule: however long the load takes, each part is killed, and the old server comes back on the new one's
schema."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import OLD, UPGRADED, Chaos, Cluster
from tests.support.watched import Watch


@dataclass
class Stub:
    """A part that writes down what is done to it."""

    starts: int = 0
    later: bool = False

    def kill(self) -> None: ...

    def start(self) -> None:
        self.starts += 1


def stubs() -> Cluster:
    node: Any = Stub()
    database: Any = Stub()
    replicas: Any = [Stub(), Stub()]
    return Cluster("", replicas, node, database, str(Path()), Watch({}, lambda: 0))


async def killed(cluster: Cluster, plan: Chaos, half: int, enough: int) -> None:
    """The load is over behind so many deaths, its half behind fewer."""
    running = asyncio.create_task(cluster.chaos(plan))
    while not running.done():
        await asyncio.sleep(0)
        plan.half.set() if len(cluster.returned) >= half else None
        plan.enough.set() if len(cluster.returned) >= enough else None
    await running


@pytest.mark.parametrize(("half", "enough"), [(0, 0), (1, 2), (3, 40), (30, 31)])
async def test_the_upgrade_comes_before_the_end_and_the_old_server_after_it(half: int, enough: int) -> None:
    cluster = stubs()
    await killed(cluster, Chaos(0, 0, upgrades=True), half, enough)
    at = cluster.returned.index(UPGRADED)
    assert {part.name for part in cluster.parts} == {name for _, name in cluster.killed}
    assert set(cluster.returned[:at]) == {part.name for part in cluster.parts}, "each came back before, as it was"
    assert at >= half
    assert OLD in cluster.returned[at:]
    assert len(cluster.returned) >= enough
    assert (cluster.replicas[0].later, cluster.replicas[1].later) == (False, True)


async def test_without_an_upgrade_each_part_is_killed_at_least_once() -> None:
    cluster = stubs()
    await killed(cluster, Chaos(0, 0, upgrades=False), 0, 0)
    assert cluster.returned == [part.name for part in cluster.parts]


async def test_a_load_that_failed_ends_the_killing_with_the_part_that_is_down_started() -> None:
    cluster, plan = stubs(), Chaos(0, 0, upgrades=True)
    plan.broken_off.set()
    await cluster.chaos(plan)
    assert cluster.replicas[0].starts == 1  # type: ignore[attr-defined]
    assert len(cluster.killed) == 1
