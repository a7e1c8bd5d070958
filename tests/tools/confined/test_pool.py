"""What a payload's parser could do had it been taken over, and what it can do to the server: end its own process.

Every attempt is bounded in size and time, and nothing is sent to an address off this machine.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.confined_workers import kill_workers
from tests.support.loop_watch import shortest_pause, watched
from tests.support.waiting import soon
from tests.tools.confined import hostile_jobs as jobs
from vllm_gptoss.tools.browser.provider import BrowserProvider
from vllm_gptoss.tools.browser.settings import BrowserConfig
from vllm_gptoss.tools.confined import BusyError, ConfinedError, FaultError, Limit, Pool, Refused, Sizes, content, pool
from vllm_gptoss.tools.confined import jobs as registered
from vllm_gptoss.tools.confined.nursery import Nursery
from vllm_gptoss.tools.confined.pool import nursery
from vllm_gptoss.tools.protocol import CALLER

ROOT = Path(__file__).resolve().parents[3]
SHORT = Limit(seconds=1.0, cpu_s=8, memory=128 << 20, answer=1 << 20)


async def test_a_worker_can_compute_and_nothing_else(
    workers: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = secrets.token_hex(8)
    monkeypatch.setenv("GPTOSS_TEST_TOKEN", secret)
    (tmp_path / "secret").write_text(secret)
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = {"path": str(tmp_path / "secret"), "port": server.getsockname()[1], "pid": os.getpid()}
        outcome = (await workers.run(jobs.escape, b"", **options)).outcome
    environment = outcome.pop("environment")
    assert len(outcome) == 24
    assert not {name: said for name, said in outcome.items() if "ESCAPED" in said}
    assert secret not in environment
    assert {said.split()[-1] for name, said in outcome.items() if name != "tcp"} <= {"1", "38"}  # EPERM, ENOSYS


async def test_a_worker_has_one_descriptor(workers: Pool) -> None:
    assert len(set(await workers.run(jobs.descriptors, b"")) - {0, 1, 2}) == 1


async def test_every_payload_has_a_process_of_its_own(workers: Pool) -> None:
    seen = {await workers.run(jobs.sleep, b"", seconds=0) for _ in range(4)}
    assert len(seen) == 4


async def test_payload_and_answer_arrive_whole(workers: Pool) -> None:
    data = secrets.token_bytes(3 << 20)
    assert await workers.run(jobs.echo, data) == data


@pytest.mark.parametrize(
    ("job", "options", "said"),
    [
        (jobs.spin, {"seconds": 20.0}, "within 1 s"),
        (jobs.sleep, {"seconds": 20.0}, "within 1 s"),
        (jobs.allocate, {"size": 1 << 30}, "MemoryError"),
        (jobs.crash, {}, "was killed"),
        (jobs.lie, {}, "not of its type"),
        (jobs.flood, {}, "larger than|was killed"),
        (jobs.forge, {}, "larger than"),
    ],
    ids=["spin", "sleep", "allocate", "crash", "lie", "flood", "forge"],
)
async def test_a_hostile_payload_costs_its_own_process(workers: Pool, job: object, options: dict, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfinedError, match=said):
        await workers.run(job, b"", SHORT, **options)
    assert time.monotonic() - began < 20
    assert await workers.run(jobs.echo, b"after") == b"after"


async def test_a_worker_beyond_its_time_is_killed(hostile: Nursery) -> None:
    def alive() -> set[int]:
        return {child.pid for child in psutil.Process(hostile.pid).children(recursive=True)}

    workers = Pool(hostile)
    assert await workers.run(jobs.echo, b"before") == b"before"
    running = asyncio.create_task(workers.run(jobs.sleep, b"", Limit(seconds=0.5), seconds=20.0))
    seen: set[int] = set()
    while not running.done():
        seen = alive()
        await asyncio.sleep(0.05)
    with pytest.raises(ConfinedError, match="within"):
        await running
    await asyncio.to_thread(soon, lambda: bool(seen - alive()))


async def test_processor_time_is_limited_by_the_kernel_too(workers: Pool) -> None:
    with pytest.raises(FaultError, match="was killed"):
        await workers.run(jobs.spin, b"", Limit(seconds=30.0, cpu_s=1), seconds=20.0)


async def test_processor_time_that_is_used_up_is_a_verdict(workers: Pool) -> None:
    with pytest.raises(ConfinedError, match="processor time") as found:
        await workers.run(jobs.count, b"", Limit(seconds=30.0, cpu_s=1), seconds=20.0)
    assert not isinstance(found.value, FaultError)


@pytest.mark.parametrize("kills", [1, 2])
async def test_a_killed_worker_is_replaced_once(hostile: Nursery, kills: int) -> None:
    workers = Pool(hostile)
    running = asyncio.create_task(workers.run(jobs.sleep, b"", seconds=1.0))
    for _ in range(kills):
        await asyncio.sleep(0.5)  # the worker sleeps for a second
        assert kill_workers(hostile)
    if kills == 1:
        assert await running
    else:
        with pytest.raises(FaultError, match="was killed"):
            await running
    assert await workers.run(jobs.echo, b"after") == b"after"


async def test_a_jobs_own_word_is_passed_on_and_cut(workers: Pool) -> None:
    with pytest.raises(Refused) as refused:
        await workers.run(jobs.refuse, b"")
    assert len(str(refused.value)) == 500


async def test_too_large_a_payload_is_not_sent(workers: Pool) -> None:
    with pytest.raises(ConfinedError, match="more than 10"):
        await workers.run(jobs.echo, b"x" * 11, Limit(payload=10))


async def test_queues_are_bounded_and_one_caller_does_not_hold_up_another(hostile: Nursery) -> None:
    workers = Pool(hostile, Sizes(1, caller_queue=8))

    async def one(caller: str, seconds: float) -> str:
        CALLER.set(caller)
        await workers.run(jobs.sleep, b"", seconds=seconds)
        return caller

    many = [asyncio.create_task(one("greedy", 0.05)) for _ in range(9)]
    await asyncio.sleep(0)
    with pytest.raises(BusyError, match="of this caller"):
        await one("greedy", 0)
    done: list[str] = []
    other = asyncio.create_task(one("other", 0))
    other.add_done_callback(lambda task: done.append("other"))
    for task in many:
        task.add_done_callback(lambda task: done.append("greedy"))
    await asyncio.wait([other, *many])
    assert done.index("other") <= 3


async def test_jobs_of_one_caller_delay_no_other(workers: Pool) -> None:
    """Six documents of another key delayed a schema by 44 s. Measured with both kinds of workers, by one caller."""

    async def greedy(limit: Limit) -> None:
        CALLER.set("greedy")
        await workers.run(jobs.count, b"", limit, seconds=30.0)

    async def asked() -> float:
        CALLER.set("other")
        began = time.monotonic()
        await workers.run(jobs.echo, b"x")
        return time.monotonic() - began

    async def best() -> float:
        return min([await asyncio.create_task(asked()) for _ in range(10)])

    await workers.start()
    alone = await best()
    pages = [asyncio.create_task(greedy(Limit(seconds=30.0, cpu_s=15, memory=1 << 30))) for _ in range(6)]
    schemas = [asyncio.create_task(greedy(Limit(seconds=30.0, cpu_s=5))) for _ in range(6)]
    await asyncio.sleep(1.0)  # until they run
    async with watched() as loop:
        beside = await best()
    assert not any(task.done() for task in pages + schemas)
    for task in pages + schemas:
        task.cancel()
    await asyncio.gather(*pages, *schemas, return_exceptions=True)
    assert loop.longest < 0.1
    assert beside < alone + 0.1, (alone, beside)


async def test_a_cancelled_wait_gives_its_place_back(hostile: Nursery) -> None:
    workers = Pool(hostile, Sizes(1))
    running = asyncio.create_task(workers.run(jobs.sleep, b"", seconds=0.5))
    waiting = asyncio.create_task(workers.run(jobs.sleep, b"", seconds=0))
    await asyncio.sleep(0.05)
    waiting.cancel()
    running.cancel()
    await asyncio.wait([running, waiting])
    async with asyncio.timeout(60):
        assert await workers.run(jobs.echo, b"x") == b"x"


async def test_a_dead_fork_server_is_replaced(hostile: Nursery) -> None:
    workers = Pool(hostile)
    await workers.start()
    hostile._process.kill()
    hostile._process.wait()
    assert await workers.run(jobs.echo, b"x") == b"x"


async def test_workers_find_what_the_server_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that PYTHONPATH names, as a cluster's modules do."""
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("vllm_gptoss.tools.confined.jobs.REGISTERED", {})
    nursery = Nursery(["elsewhere"])
    assert await Pool(nursery).run(importlib.import_module("elsewhere").upper, b"found") == "FOUND"
    nursery.close()


ELSEWHERE = """
from vllm_gptoss.tools.confined import job

@job
def upper(payload: bytes) -> str:
    return payload.decode().upper()
"""


async def test_a_fork_server_that_cannot_start_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, browser = Pool(Nursery([])), BrowserProvider(BrowserConfig(), environ={})
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfinedError, match="with the reason in the log"):
        await workers.start()
    monkeypatch.setattr("vllm_gptoss.tools.browser.provider.pool", lambda: workers)
    await browser.start()
    assert "no process can be had that reads pages: " in (browser.unavailable or "")


@pytest.mark.alone
async def test_the_loop_runs_on_while_workers_are_busy(workers: Pool) -> None:
    await workers.start()

    async def busy() -> None:
        tries = (workers.run(jobs.spin, b"", SHORT, seconds=20.0) for _ in range(4))
        await asyncio.gather(*tries, return_exceptions=True)
        await workers.run(jobs.echo, b"x" * (7 << 20))

    pause, _ = await shortest_pause(busy, 0.1)
    assert pause < 0.1


WITHOUT_NAMESPACES = """
import asyncio, logging, os, sys
from tests.tools.confined import hostile_jobs as jobs
from vllm_gptoss.tools.confined import Pool
from vllm_gptoss.tools.confined.nursery import Nursery
from vllm_gptoss.tools.sandbox import linux
uid, gid = os.getuid(), os.getgid()
linux.unshare(linux.CLONE_NEWUSER)
linux.write_id_maps(1000, uid, gid)
open('/proc/sys/user/max_user_namespaces', 'w').write('0')
linux.drop_capabilities()
logging.basicConfig()
async def main():
    pool = Pool(Nursery(["tests.tools.confined.hostile_jobs"]))
    for _ in range(2):
        outcome = (await pool.run(jobs.escape, b"", path=sys.argv[1], port=1, pid=os.getpid())).outcome
    outcome.pop("environment")
    print(len(outcome), sum("ESCAPED" in said for said in outcome.values()))
asyncio.run(main())
"""


def test_without_namespaces_the_other_walls_hold_and_one_line_says_so() -> None:
    """In a user namespace that allows no further one, as in a container."""
    command = [sys.executable, "-c", WITHOUT_NAMESPACES, __file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["24", "0"], done
    said = [line for line in done.stderr.splitlines() if "workers run without namespaces" in line]
    assert len(said) == 1, done.stderr


async def test_jobs_of_a_module_that_is_imported_later_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server imports what was registered when it started: a later module gets one that has it too."""
    monkeypatch.setattr("vllm_gptoss.tools.confined.jobs.REGISTERED", {})
    monkeypatch.setattr(sys.modules["vllm_gptoss.tools.confined.pool"], "_nurseries", [])
    registered.job(content.json_content)
    assert await pool().run(content.json_content, b"[]", max_bytes=10) == b"[]"
    first = nursery()
    registered.job(jobs.echo)
    assert await pool().run(jobs.echo, b"later") == b"later"
    assert nursery() is not first
    assert await pool().run(content.json_content, b"[]", max_bytes=10) == b"[]"
    for each in (first, nursery()):
        each.close()
