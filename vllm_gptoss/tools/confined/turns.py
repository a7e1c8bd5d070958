"""Who is next: at most so many at once, and bounded queues that callers leave in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class BusyError(Exception):
    """The queue is full, for this caller or for all; the message says which."""


class Turns:
    """`at_once` run. Of those that wait, each caller's first goes in turn, so that many from one delay no other."""

    def __init__(self, at_once: int, per_caller: int, total: int) -> None:
        self._free = at_once
        self._per_caller = per_caller
        self._total = total
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._count = 0

    async def enter(self, caller: str) -> None:
        """Waits for a place; `leave` gives it back. Raises BusyError."""
        if self._free and not self._waiting:
            self._free -= 1
            return
        queue = self._waiting.get(caller, ())
        if len(queue) >= self._per_caller:
            raise BusyError(f"{len(queue)} documents of this caller are waiting to be read")
        if self._count >= self._total:
            raise BusyError(f"{self._count} documents are waiting to be read")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._count += 1
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it came while the wait was being cancelled
                self.leave()
            else:
                self._drop(caller, turn)
            raise

    def _drop(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(caller)
        if queue and turn in queue:
            queue.remove(turn)
            self._count -= 1
            if not queue:
                del self._waiting[caller]

    def leave(self) -> None:
        """Gives a place to the next, if any waits."""
        while self._waiting:
            caller, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            self._count -= 1
            if queue:
                self._waiting[caller] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
