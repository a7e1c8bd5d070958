"""A cancellation during work that must be finished: none is lost, whenever it comes."""

from __future__ import annotations

import asyncio

import pytest

from vllm_gptoss.tools.python.tasks import uninterrupted


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_a_cancellation_is_kept_when_it_comes_as_the_work_ends(turns: int) -> None:
    """turns: of the event loop between the end of the work and the cancellation."""
    goes_on, finished, continued = asyncio.Event(), [], []

    async def work() -> None:
        await goes_on.wait()
        finished.append(True)

    async def caller() -> None:
        await uninterrupted(work())
        await asyncio.sleep(0)  # a cancellation that came too late for the work ends the caller here
        continued.append(True)

    calling = asyncio.create_task(caller())
    await asyncio.sleep(0.01)
    goes_on.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait([calling])
    assert (calling.cancelled(), finished, continued) == (True, [True], [])


async def test_work_that_is_cancelled_itself_cancels_the_caller() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await uninterrupted(work())


async def test_a_cancellation_comes_before_what_the_work_raised() -> None:
    goes_on = asyncio.Event()

    async def work() -> None:
        await goes_on.wait()
        raise ValueError

    calling = asyncio.create_task(uninterrupted(work()))
    await asyncio.sleep(0.01)
    calling.cancel()
    goes_on.set()
    await asyncio.wait([calling])
    assert calling.cancelled()
