"""A provider per module, and what a test needs to look at the machine from outside."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.notebooks import started
from vllm_gptoss.tools.protocol import ToolResult
from vllm_gptoss.tools.python import PythonProvider

Run = Callable[..., Awaitable[ToolResult]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[PythonProvider]:
    provider = await started(timeout_s=10, memory_mib=512, scratch_mib=64, max_conversations=6)
    yield provider
    await provider.aclose()


@pytest.fixture
def sandbox_processes() -> Callable[[], list[int]]:
    """Counts processes of the fork server and everything below it, by this test's process as ancestor."""

    def count() -> list[int]:
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    command = (path / "cmdline").read_bytes()
                except OSError:
                    continue
                if b"gptoss_sandbox" in command and str(os.getpid()).encode() in _ancestors(int(path.name)):
                    found.append(int(path.name))
        return found

    return count


def _ancestors(pid: int) -> list[bytes]:
    chain = []
    while pid > 1:
        chain.append(str(pid).encode())
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return chain
