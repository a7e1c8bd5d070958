"""Database work that continues when its client disconnects."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=type)
_running: set[asyncio.Task[Any]] = set()


def shield_methods(cls: C) -> C:
    """Class decorator: every public coroutine method runs to its end, also when its caller is cancelled.

    A cancelled statement continues in the driver's thread. A connection dropped meanwhile may hold SQLite's write lock
    until it is garbage-collected.
    """
    for name, method in list(vars(cls).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(cls, name, _shielded(method))
    return cls


def _shielded(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def whole(*args: Any, **kwargs: Any) -> Any:
        task = asyncio.create_task(method(*args, **kwargs))
        _running.add(task)
        task.add_done_callback(_ended)
        return await asyncio.shield(task)

    return whole


def _ended(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()):
        logger.debug("A store operation failed: %s", error)  # also raised in a caller that still waits
