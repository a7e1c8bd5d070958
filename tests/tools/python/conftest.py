"""A provider per module, and what a test needs to look at the machine from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.notebooks import started
from vllm_gptoss.tools.python import PythonProvider


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[PythonProvider]:
    provider = await started(timeout_s=10, memory_mib=512, scratch_mib=64, max_conversations=6)
    yield provider
    await provider.aclose()
