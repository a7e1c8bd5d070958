"""Background responses: they run without a connection, and any API server of the store can follow or cancel them.

An event is stored before a follower gets it, so a follower that reconnects with `starting_after` misses none. Without
followers on this server, events are written less often. Followers on this server read stored events from memory.
The server updates `beat` of its running responses. The next request for a response with an old `beat` marks it failed.
A server stops a response that was deleted, or ended by another server, and writes nothing more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakValueDictionary

from pydantic_core import to_json

from vllm_gptoss.server.http.callers import FullError, Places
from vllm_gptoss.server.responses.errors import ApiError, full, id_taken, not_found
from vllm_gptoss.server.responses.metrics import BACKGROUND
from vllm_gptoss.server.responses.request.create import CreateRequest
from vllm_gptoss.server.responses.run.events import TERMINAL, Event, has_ended
from vllm_gptoss.server.responses.run.loop import Loop
from vllm_gptoss.server.responses.run.service import Service
from vllm_gptoss.server.responses.state.caller import Caller
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import (
    UNFINISHED,
    Stored,
    StoreError,
    TakenError,
    row_key,
    stored_request,
)

logger = logging.getLogger(__name__)

FLUSH = 0.05
"""Seconds that events of a background response may wait before they are written together."""
QUIET = 0.25
"""The same, without followers on this server. Followers on other servers read the store every `POLL`."""
STOPPED = "The server was stopped before this response had ended."
LAST_WORDS = 2.0
"""Seconds for storing the last tokens of an engine that has ended."""
RECENT = 500
"""Stored events that stay in memory for this server's followers; followers that are further behind read the store."""
RETRY = 1.0
"""Seconds between attempts while the store fails."""
CANCEL_TIMEOUT = 30.0
"""Seconds, beyond the heartbeat, that a cancelled response may take to end."""
POLL = 0.2
"""Seconds between looks at the store for a response that another server runs."""


class _BackgroundRun:
    """A response that this server runs.

    pending: events that are not stored yet; while the store fails (`is_stuck`) this server's followers read them here
    wake: set when `pending` grows; draining: no further event comes
    news: set, and replaced, when events were stored; ended: all were; written: number of the last one
    hurry: set while the response has followers here
    is_lost: the response was deleted, or ended by another server
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.is_lost = False
        self.pending: list[Event] = []
        self.is_stuck = False
        self.wake = asyncio.Event()
        self.hurry = asyncio.Event()
        self.draining = False
        self.stopping = False
        self.written = -1
        self.task: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        self.ended = False
        self._recent: deque[tuple[int, str]] = deque(maxlen=RECENT)
        self._followers = 0

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def stop(self) -> None:
        """Cancels the response, once: a second cancel, or one during its end, would lose its last event."""
        if self.task and not (self.stopping or self.draining or self.loop.is_ending):
            self.stopping = True
            self.task.cancel()

    def drain(self) -> None:
        self.draining = True
        self.wake.set()
        self.hurry.set()

    @contextmanager
    def followed(self) -> Iterator[None]:
        self._followers += 1
        self.hurry.set()
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._recent.clear()
                if not self.draining:
                    self.hurry.clear()

    def wrote(self, batch: list[tuple[int, str]]) -> None:
        del self.pending[: len(batch)]
        self.written = batch[-1][0]
        if self._followers:
            self._recent.extend(batch)

    def since(self, after: int) -> list[str] | None:
        """The stored events after number `after`; None if they are only in the store."""
        if after >= self.written:
            return []
        if not self._recent or self._recent[0][0] > after + 1:
            return None
        return [data for number, data in self._recent if number > after]


class Background:
    """Runs and follows background responses."""

    def __init__(self, service: Service, store: Store) -> None:
        self._service = service
        self._store = store
        self._runs: dict[str, _BackgroundRun] = {}
        options = service.context.options
        self._beginning: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._places = Places(options.max_background, options.total_background)
        self._at_once = options.running_background
        self._closing = False

    async def aclose(self, patience: float = 0.0) -> None:
        """Waits up to `patience` seconds for running responses, fails the others, and stores that.

        Waits at most `LAST_WORDS` if the engine has ended, as under `vllm serve`: then a response that waits for a tool
        cannot complete.
        """
        tasks = [run.task for run in self._runs.values() if run.task]
        if self._service.context.engine.has_ended:
            patience = min(patience, LAST_WORDS)
        if tasks and patience:
            logger.info("Waiting up to %g s for %d background responses", patience, len(tasks))
            await asyncio.wait(tasks, timeout=patience)
        self._closing = True
        for run in list(self._runs.values()):
            run.stop()
        if tasks:
            await asyncio.wait(tasks)

    async def start(
        self, read: Callable[[], Awaitable[CreateRequest]], caller: Caller
    ) -> tuple[CreateRequest, dict[str, Any]]:
        """Starts the response of the request that `read` returns, and returns both. It is queued.

        Raises:
            ApiError: the limits of `Places` are reached, which is checked before the request is read.
        """
        try:
            leave = self._places.take(caller.owner)
        except FullError as error:
            raise full(error, "background responses have not ended yet", "background") from None
        try:
            # One at a time: hundreds of simultaneous starts make each iteration of the event loop long.
            async with self._beginning.setdefault(caller.owner, asyncio.Lock()):
                request = await read()
                run, stored = await self._begin(request, caller)
        except BaseException:
            leave()
            raise
        turns = self._running.setdefault(caller.owner, asyncio.Semaphore(self._at_once))
        run.task = asyncio.create_task(self._work(run, stored, turns), name=stored.id)
        run.task.add_done_callback(lambda _: leave())
        return request, dict(stored.body)

    async def _begin(self, request: CreateRequest, caller: Caller) -> tuple[_BackgroundRun, Stored]:
        loop = await self._service.prepare(request, caller, queued=True)
        stored = stored_request(request, caller.tenant, dict(loop.body))
        try:
            await self._store.save(stored)
        except BaseException as error:
            await loop.close()
            if isinstance(error, TakenError):
                raise id_taken(stored.id) from None
            raise
        run = self._runs[stored.key] = _BackgroundRun(loop)
        BACKGROUND.labels("accepted").inc()
        return run, stored

    async def _work(self, run: _BackgroundRun, stored: Stored, turns: asyncio.Semaphore) -> None:
        """Runs the response, once the key has fewer than `running_background`, and stores its events."""
        loop, pending = run.loop, run.pending
        writer = asyncio.create_task(self._write(stored, run))
        try:
            async with aclosing(loop.run()) as batches:
                pending += await anext(batches)
                run.wake.set()
                async with turns:
                    with BACKGROUND.labels("running").track_inprogress():
                        async for batch in batches:
                            pending += batch
                            run.wake.set()
                            if writer.done():
                                break  # cancelled from elsewhere
            if writer.done() and not has_ended(pending):
                pending += await loop.cancel()
        except asyncio.CancelledError:
            pending += await (loop.fail(STOPPED) if self._closing else loop.cancel())
        finally:
            # The writer ends on its own: a cancel between two writes could leave a gap before the last event.
            run.drain()
            try:
                await asyncio.gather(writer, return_exceptions=True)
                if await self._drain(stored.key, run) and not loop.is_kept:  # `Loop` could not store its end
                    stored.body = dict(loop.body)
                    await self._save(stored)
            finally:
                run.ended = True
                run.tell()
                self._runs.pop(stored.key, None)
                BACKGROUND.labels("accepted").dec()

    async def _drain(self, key: str, run: _BackgroundRun) -> bool:
        """Writes the remaining events. Retries for `heartbeat` seconds; meanwhile followers read them from memory."""
        until = time.monotonic() + self._service.context.options.heartbeat
        while not await self._flush(key, run):
            if run.is_lost:
                logger.warning("%s was deleted or ended by another server; its last events are dropped", key)
                return False
            if time.monotonic() > until:
                logger.error("The last %d events of %s were never stored", len(run.pending), key)
                return False
            await asyncio.sleep(RETRY)
        return True

    async def _save(self, stored: Stored) -> None:
        try:
            await self._store.update(stored)
        except StoreError as error:
            logger.error("The status %s of %s is not stored: %s", stored.status, stored.id, error)

    async def _write(self, stored: Stored, run: _BackgroundRun) -> None:
        """Writes pending events and updates `beat`, until `run` is draining, or the response was cancelled or lost."""
        beaten, goes_on = time.monotonic(), True
        while not run.draining:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await run.wake.wait()
                    await _pause(run)
            run.wake.clear()
            status = run.loop.body["status"]
            if status != stored.status and not run.loop.is_ending:  # here: a short response needs no write for it
                stored.body["status"] = status
                await self._save(stored)
            if run.loop.is_ending:
                continue  # the remaining events are written once `is_kept` is known
            if not await self._flush(stored.key, run) and not run.is_lost:
                await asyncio.sleep(RETRY)
            if time.monotonic() - beaten > 1.0:
                beaten = time.monotonic()
                with suppress(StoreError):  # `_flush` logs that the store fails
                    goes_on = await self._store.background.beat(stored.key)
            if (run.is_lost or not goes_on) and not run.loop.is_ending:
                run.stop()  # it may be waiting for a tool
                return

    async def _flush(self, key: str, run: _BackgroundRun) -> bool:
        """Writes the pending events; False if the store fails, and they stay pending, or if the response is lost."""
        batch = [(event["sequence_number"], to_json(event).decode()) for event in run.pending]
        was_stuck, run.is_stuck = run.is_stuck, False
        if batch:
            try:
                kept = run.loop.is_kept
                run.is_lost = not await self._store.background.append(key, batch, finished_here=kept)
                if not run.is_lost:
                    run.wrote(batch)
            except StoreError as error:
                run.is_stuck = True
                if not was_stuck:
                    logger.error("Events of %s wait to be stored: %s", key, error)
            run.tell()
        return not run.is_stuck and not run.is_lost

    async def follow(self, identifier: str, caller: Caller, after: int) -> AsyncGenerator[list[Event], None]:
        """Events after number `after`, up to the terminal one."""
        run = self._runs.get(row_key(caller.tenant, identifier))
        with run.followed() if run else nullcontext():
            async with aclosing(self._follow(identifier, caller, after)) as batches:
                async for batch in batches:
                    yield batch

    async def _follow(self, identifier: str, caller: Caller, after: int) -> AsyncGenerator[list[Event], None]:
        key = row_key(caller.tenant, identifier)
        while True:
            run = self._runs.get(key)
            news = run.news if run else asyncio.Event()
            known = run.since(after) if run else None
            if known is None:
                known = [data for _, data in await self._store.background.since(key, after)]
            batch = [json.loads(data) for data in known]
            if run and run.is_stuck:
                sent = batch[-1]["sequence_number"] if batch else after
                batch += [event for event in run.pending if event["sequence_number"] > sent]
            if batch:
                after = batch[-1]["sequence_number"]
                yield batch
                if has_ended(batch):
                    return
                continue
            if run is None or run.ended:
                stored = await self._store.get(caller.tenant, identifier)
                if stored is None:
                    raise not_found("Response", identifier)
                stored = await self.checked(stored)
                if stored.status not in UNFINISHED:
                    last = await self._store.background.last(key)
                    number = last[0] if last else -1
                    if number > after:
                        continue  # another server has stored events after the query above
                    is_whole = last is not None and json.loads(last[1])["type"] in TERMINAL
                    if is_whole and after == number:
                        return
                    if is_whole or self._is_silent(stored):  # its server died before it stored its last event
                        yield [_last_event(stored, max(after, number) + 1)]
                        return
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL):
                    await news.wait()

    async def checked(self, stored: Stored) -> Stored:
        """Returns `stored`; marks it failed first if its server has died."""
        if stored.status not in UNFINISHED or stored.key in self._runs or not self._is_silent(stored):
            return stored
        stored.body["status"] = "failed"
        message = "The server that ran this response has ended, or could not store it."
        stored.body["error"] = {"code": "server_error", "message": message}
        if await self._store.background.give_up(stored, lambda number: json.dumps(_last_event(stored, number))):
            return stored
        fresh = await self._store.get(stored.tenant, stored.id)  # its server lives, or another server ended it first
        if fresh is None:
            raise not_found("Response", stored.id)
        return fresh

    def _is_silent(self, stored: Stored) -> bool:
        """Whether the response's `beat` is older than `heartbeat`."""
        return stored.silent >= self._service.context.options.heartbeat

    async def cancel(self, stored: Stored, caller: Caller) -> dict[str, Any]:
        """Stops a response wherever it runs; its last body."""
        if stored.status not in UNFINISHED:
            return stored.body  # as OpenAI's API: cancelling a response that has ended returns it
        await self.stop(stored.id, caller)
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT + self._service.context.options.heartbeat):
                async with aclosing(self.follow(stored.id, caller, -1)) as batches:
                    async for _ in batches:
                        pass
        except TimeoutError:
            message = "The response is being cancelled; retrieve it again later."
            raise ApiError(message, code="cancel_timeout", status=503, kind="server_error") from None
        return (await self._service.get(stored.id, caller)).body

    async def stop(self, identifier: str, caller: Caller) -> None:
        """Cancels a response of the caller: at once if it runs here, else by a flag that its server reads."""
        run = self._runs.get(row_key(caller.tenant, identifier))
        stored = await self._store.get(caller.tenant, identifier)
        if stored is None:
            return
        if run is None or run.task is None:
            await self._store.background.request_cancel(caller.tenant, identifier)
            return
        run.stop()
        await asyncio.wait([run.task])  # unlike `gather`, `wait` does not cancel the task when this client disconnects


async def _pause(run: _BackgroundRun) -> None:
    """Waits so that events are written together: `QUIET` seconds without followers, else `FLUSH`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(QUIET - FLUSH):
            await run.hurry.wait()
    await asyncio.sleep(FLUSH)


def _last_event(stored: Stored, number: int) -> Event:
    """The terminal event of a stored response that has ended."""
    kind = {"completed": "completed", "failed": "failed"}.get(stored.status, "incomplete")
    return {"type": f"response.{kind}", "sequence_number": number, "response": stored.body}
