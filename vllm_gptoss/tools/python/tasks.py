"""Waiting for what must be finished even after a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def uninterrupted(work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits `work` to its end even if the caller is cancelled meanwhile; then lets the cancellation through.

    A cancellation comes before what `work` raised.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                break
            cancelled = error  # also where the work ended in the same turn of the event loop
        except BaseException:  # noqa: S110 - raised again by result()
            pass
    if cancelled is not None:
        task.exception()  # seen
        raise cancelled
    return task.result()
