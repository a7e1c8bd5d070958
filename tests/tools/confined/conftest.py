"""Workers that also know hostile jobs, and a watch of the event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_gptoss.tools.confined import Pool, jobs
from vllm_gptoss.tools.confined.nursery import Nursery


@pytest.fixture(scope="session")
def hostile() -> Iterator[Nursery]:
    nursery = Nursery([*jobs.modules(), "tests.tools.confined.hostile_jobs"])
    yield nursery
    nursery.close()


@pytest.fixture
async def workers(hostile: Nursery) -> Pool:
    return Pool(hostile)
