"""How many jobs run at once, shared among callers, with bounded queues."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BusyError(Exception):
    """The queue is full, for this caller or for all; the message names the limit."""


class Slots:
    """`limit` jobs at once, shared among callers (`owner`: who holds an API key).

    The last few slots are for callers who hold none, so that a second one need not wait for the first one's long jobs;
    a caller alone has all others. Of those that wait, the caller with fewest goes first, then in turns. Without keys
    there is one caller, "", who has them all. `per_owner` and `total` bound how many wait; None for no bound.
    """

    def __init__(self, limit: int = 64, per_owner: int | None = None, total: int | None = None) -> None:
        self._free = limit
        self._reserve = max(1, limit // 16) if limit > 1 else 0
        self._per_owner = per_owner
        self._total = total
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def one(self, owner: str) -> AsyncIterator[None]:
        await self._enter(owner)
        try:
            yield
        finally:
            self._leave(owner)

    def _may(self, owner: str) -> bool:
        return self._free > (self._reserve if owner and self._held[owner] else 0)

    def _take(self, owner: str) -> None:
        self._free -= 1
        self._held[owner] += 1

    def _check_queues(self, owner: str) -> None:
        waiting = len(self._waiting.get(owner, ()))
        if self._per_owner is not None and waiting >= self._per_owner:
            raise BusyError(f"{waiting} jobs of this caller are waiting, and no more may")
        if self._total is not None and (waiting := sum(map(len, self._waiting.values()))) >= self._total:
            raise BusyError(f"{waiting} jobs of all callers are waiting, and no more may")

    async def _enter(self, owner: str) -> None:
        if owner not in self._waiting and self._may(owner):
            self._take(owner)
            return
        self._check_queues(owner)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it came while the wait was being cancelled
                self._leave(owner)
            elif turn in (turns := self._waiting.get(owner, deque())):
                turns.remove(turn)
                if not turns:
                    del self._waiting[owner]
            raise

    def _leave(self, owner: str) -> None:
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        while able := [waiting for waiting in self._waiting if self._may(waiting)]:
            following = min(able, key=lambda waiting: self._held[waiting])
            turns = self._waiting.pop(following)
            turn = turns.popleft()
            if turns:
                self._waiting[following] = turns  # behind the others who hold as many
            if not turn.done():  # else its wait was cancelled
                self._take(following)
                turn.set_result(None)
