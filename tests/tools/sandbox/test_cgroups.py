"""The kernel's own limits, where the machine has a cgroup v2 that can be delegated; and the message where not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.support.notebooks import run_in, started
from tests.support.waiting import until
from vllm_gptoss.tools.python import PythonOptions, PythonProvider

ROOT = Path("/sys/fs/cgroup")


@pytest.fixture
def delegated() -> Iterator[Path]:
    """A cgroup of the test's own below the root of the hierarchy."""
    try:
        able = {"memory", "pids"} <= set((ROOT / "cgroup.controllers").read_text().split())
    except OSError:
        able = False
    if not able or os.getuid() != 0:
        pytest.skip("needs root and a cgroup v2 hierarchy with memory and pids; docs/testing.md has the last pass")
    directory = ROOT / "gptoss-test"
    try:
        (ROOT / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"cannot delegate a cgroup: {error}")
    yield directory
    directory.rmdir()


def leaves(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()]


@pytest.mark.namespaces
async def test_cgroup_limits_hold_and_leave_nothing(delegated: Path) -> None:
    async with aclosing(
        await started(cgroup=str(delegated), memory_mib=128, processes=32, warm=0, preload=[], timeout_s=20)
    ) as provider:
        await run_in(provider, "x = 1", "c")
        (leaf,) = leaves(delegated)
        assert len((leaf / "cgroup.procs").read_text().split()) == 2
        assert (leaf / "memory.max").read_text().strip() == str((128 + 64) << 20)
        code = """
import os, signal, time
for _ in range(8):
    if os.fork() == 0:
        signal.alarm(8); held = b'x' * (64 << 20); time.sleep(6); os._exit(0)
time.sleep(6)
"""
        result = await run_in(provider, code, "c")
        assert result.error is not None
        assert (await run_in(provider, "40 + 2", "c")).text.strip() == "42"
    await until(lambda: not leaves(delegated))


async def test_unusable_cgroup_turns_the_tool_off(tmp_path: Path) -> None:
    provider = PythonProvider(PythonOptions(cgroup=tmp_path))
    for problem in ("is no usable cgroup v2 directory", "lacks the controllers ['pids']"):
        await provider.start()
        assert f"{tmp_path} {problem}" in (provider.unavailable or "")
        await provider.aclose()
        (tmp_path / "cgroup.controllers").write_text("cpu memory")
