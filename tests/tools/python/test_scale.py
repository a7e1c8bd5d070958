"""Many conversations at once, many in a row, and what is left of them: no process, no descriptor, no file."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from tests.support import scale
from tests.support.notebooks import run_in, started
from tests.support.waiting import alive, until
from vllm_gptoss.tools.python import PythonProvider

pytestmark = pytest.mark.namespaces

MIB = 1 << 20
# Measured 31 MiB per conversation, of which about 25 are the kernel's and the rest its supervisor's; half as much again
# for other library versions.
BUDGET_PER_CONVERSATION = 48 * MIB


def family(pid: int) -> list[int]:
    """`pid`'s descendants."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *family(int(child))]
    return found


def newcomers(before: set[int]) -> list[int]:
    """Our descendants but `before`: a whole test run has a model server among them."""
    return [pid for pid in family(os.getpid()) if pid not in before]


def proportional(pids: list[int]) -> int:
    """Bytes of memory of these processes, each shared page counted once among those that share it."""
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                total += int(line.split()[1]) << 10 if line.startswith("Pss:") else 0
    return total


def own_descriptors() -> list[str]:
    return sorted(os.readlink(p) for p in Path("/proc/self/fd").iterdir() if p.is_symlink())


def own_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def our_files() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("gptoss-python-*"))


async def test_fifty_conversations_at_once_in_their_budget() -> None:
    others = set(family(os.getpid()))
    async with aclosing(await started(max_conversations=50, warm=0)) as provider:
        code = "import numpy as np\nx = {}\nfloat(np.arange(1000).sum())"
        results = await asyncio.gather(*(run_in(provider, code.format(i), f"c{i}") for i in range(50)))
        assert [r.text.strip() for r in results] == ["499500.0"] * 50
        again = await asyncio.gather(*(run_in(provider, "x", f"c{i}") for i in range(50)))
        assert [r.text.strip() for r in again] == [str(i) for i in range(50)]
        used = proportional(newcomers(others))
        assert used < 50 * BUDGET_PER_CONVERSATION + 200 * MIB, used / MIB
    await until(lambda: not newcomers(others))


async def many(provider: PythonProvider, count: int, at_once: int = 4) -> None:
    """`count` conversations of one to three calls, with files, errors and some kills, each ended."""
    queue = iter(range(count))

    async def worker() -> None:
        for i in queue:
            name = f"leak{i}"
            assert "1" in (await run_in(provider, f"x = {i}; open('/mnt/data/f', 'w').write('1')", name)).text
            if i % 10 == 3:
                await run_in(provider, "import os; os.fork() or os._exit(0); 1 / 0", name)
            if i % 50 == 7:
                await run_in(provider, "import os; os._exit(1)", name)
            await provider.forget(name)

    await asyncio.gather(*(worker() for _ in range(at_once)))


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_a_thousand_conversations_leave_nothing_behind() -> None:
    """A sample of 200 shows a process, a descriptor or a file of one conversation; memory only where all run."""
    count = scale.count(1000, 200)
    gc.collect()
    others = set(family(os.getpid()))
    before = own_descriptors()
    files = our_files()
    provider = await started(warm=2, max_conversations=8, preload=[], file_store_mib=1, file_keep_s=1.0)
    await many(provider, 20)
    gc.collect()
    resident = own_memory()
    descriptors = len(own_descriptors())
    await many(provider, count)
    gc.collect()
    grown = own_memory() - resident
    print(f"{count} conversations: {grown / MIB:.1f} MiB more")
    assert grown < 16 * MIB, grown  # a leaked client or channel of 20 kB in each of 1,000 would show
    provider._store.close()
    assert len(own_descriptors()) <= descriptors
    # the fork server's two, and two for each warm kernel, which may just be being replaced
    assert len(newcomers(others)) <= 2 + 3 * 2
    await provider.aclose()
    gc.collect()
    await until(lambda: not newcomers(others))
    assert own_descriptors() == before
    assert our_files() == files


SERVER = """
import asyncio
from tests.support.notebooks import run_in, started

async def main():
    provider = await started(warm=1, preload=[])
    await run_in(provider, "x = 1", "a")
    busy = asyncio.create_task(run_in(provider, "import os\\nif os.fork() == 0: os.setsid()\\nwhile True: pass", "b"))
    while "b" not in provider._containers or not provider._containers["b"].alive:
        await asyncio.sleep(0.01)
    print("up", flush=True)
    await busy
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_server_takes_everything_with_it(number: signal.Signals) -> None:
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER)], cwd=root, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout.readline() == "up\n"
        children = family(server.pid)
        assert len(children) >= 6  # the fork server's two, two conversations' two each
        server.send_signal(number)
        server.wait(10)
    deadline = time.monotonic() + 10
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in children if alive(pid)]
