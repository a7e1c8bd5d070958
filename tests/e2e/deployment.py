"""A deployment of parts that can be killed: two servers behind HAProxy, a tools service, PostgreSQL, S3 (moto)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.support.replicas import Replica, balancer
from tests.support.responses import earlier
from tests.support.responses.postgres import Postgres
from tests.support.responses.stores import opened
from tests.support.s3 import storage
from tests.support.tools_nodes import ToolsNode
from tests.support.watched import Watch
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.state.database import connect
from vllm_gptoss.server.responses.state.upgrade import VERSION

KERNELS = 16
KEY = "key of these replicas"


OLD, OTHER, UPGRADED = "replica 0", "replica 1", "replica 1, upgraded"


@dataclass(frozen=True)
class Chaos:
    """Kills and restarts the parts of a cluster while the load runs.

    down, between: seconds that a part is down before it is started, and that all are there between two deaths
    upgrades: in a round that begins behind `half` of the load, not the first, one replica comes back as the next
    release's; in the round after it the other one comes back as it was
    enough: the load may end; broken_off: it has failed
    """

    down: float
    between: float
    upgrades: bool
    half: asyncio.Event = field(default_factory=asyncio.Event)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    broken_off: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Part:
    name: str
    kill: Callable[[], None]
    start: Callable[[], None]


@dataclass
class Cluster:
    """`chaos` kills and starts the parts in turn. `killed`: when, in seconds since the watch began, and what;
    `returned`: the parts as they came back, in order, an upgraded one as `UPGRADED`."""

    api: str
    replicas: list[Replica]
    node: ToolsNode
    database: Postgres
    files: str
    watch: Watch
    quiet_responses: int = 0
    quiet_transactions: int = 0
    killed: list[tuple[float, str]] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        servers = [Part(f"replica {n}", r.kill, r.start) for n, r in enumerate(self.replicas)]
        tools = Part("tools service", self.node.kill, self.node.start)
        return [*servers, tools, Part("database", self.database.kill, self.database.start)]

    async def chaos(self, plan: Chaos) -> None:
        """Round by round, until the load is long enough and every step was taken, or until it is broken off."""
        for number in itertools.count():
            is_upgrade = plan.upgrades and number > 0 and plan.half.is_set()
            for part in self.parts:
                if part.name == OTHER and is_upgrade:
                    self.replicas[1].later = True
                self.killed.append((time.monotonic() - self.watch.began, part.name))
                await asyncio.to_thread(part.kill)
                await asyncio.sleep(plan.down)
                await asyncio.to_thread(part.start)
                self.returned.append(UPGRADED if part.name == OTHER and self.replicas[1].later else part.name)
                await asyncio.sleep(plan.between)
                if plan.broken_off.is_set() or (plan.enough.is_set() and self.has_had(plan)):
                    return

    def has_had(self, plan: Chaos) -> bool:
        """Whether each part restarted, and an old part after an upgraded one."""
        if {name for _, name in self.killed} != {part.name for part in self.parts}:
            return False
        after = self.returned[self.returned.index(UPGRADED) :] if UPGRADED in self.returned else []
        return not plan.upgrades or OLD in after

    async def look(self) -> None:
        while True:
            await asyncio.to_thread(self.watch.look)
            await asyncio.sleep(1.0)


@asynccontextmanager
async def cluster(home: Path, make: Callable[..., Replica], **fields: Any) -> AsyncIterator[Cluster]:
    """`make`: the class of the servers, with `fields`. The database has what servers before schema versions wrote."""
    keys = home / "keys"
    keys.write_text(f"{KEY}\n")
    database = Postgres()
    write_as_earlier(database)
    async with AsyncExitStack() as stack:
        stack.callback(database.remove)
        files = stack.enter_context(storage())
        options = {"files": files, "file_keep_s": 86_400, "max_conversations": KERNELS, "timeout_s": 100}
        node = ToolsNode(home, keys, options)
        stack.callback(node.kill)
        node.spawn()
        settings = {"GPTOSS_TOOLS_KEY": KEY, "XDG_STATE_HOME": str(home)}
        replicas = [
            make(
                database.url,
                f"service:{node.url}",
                home / f"replica-{n}.log",
                environment=settings,
                heartbeat=5.0,
                **fields,
            )
            for n in range(2)
        ]
        for replica in replicas:
            stack.callback(replica.kill)
            replica.spawn()
        node.wait()
        for replica in replicas:
            replica.wait()
        pids = {f"replica {n}": (lambda r=r: r.pid) for n, r in enumerate(replicas)}
        pids["tools service"] = lambda: node.process.pid if node.process else None
        watch = Watch(pids, database.connections)
        yield Cluster(stack.enter_context(balancer(replicas, home)), replicas, node, database, files, watch)


def engine_of(database: Postgres) -> sa.Engine:
    return connect(sa.make_url(ResponsesOptions(store=database.url).url or ""))


async def transactions(database: Postgres) -> int:
    """Number of transactions that the database has committed since its start."""
    await asyncio.sleep(1.5)  # its processes report once a second
    engine = engine_of(database)
    with engine.begin() as connection:
        query = "select xact_commit from pg_stat_database where datname = 'postgres'"
        found = int(connection.scalar(sa.text(query)) or 0)
    engine.dispose()
    return found


def write_as_earlier(database: Postgres) -> None:
    """Tables and rows of servers from before there were schema versions."""
    engine = engine_of(database)
    with engine.begin() as connection:
        earlier.fill(connection, time.time())
        connection.execute(sa.delete(earlier.settings))  # its key is none
    engine.dispose()


async def schema_of(database: Postgres) -> int:
    """The schema; rows of the earliest servers are still read."""
    async with opened(database.url) as store:
        assert await store.get("alice", "mine")
        return int(await store.setting(VERSION) or 0)
