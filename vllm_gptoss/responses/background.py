"""Responses that run without a listener: kept as they go, followed and resumed from any API server, cancelled.

Every event goes to the store before anybody sees it, so a follower that comes back with `starting_after` misses none.
A server beats while it works; a response whose server stopped beating is failed by whoever looks at it next.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from vllm_gptoss.responses.errors import ApiError, not_found
from vllm_gptoss.responses.events import TERMINAL, Event
from vllm_gptoss.responses.loop import Loop
from vllm_gptoss.responses.past import Caller
from vllm_gptoss.responses.request import CreateRequest
from vllm_gptoss.responses.service import Service
from vllm_gptoss.responses.store import UNFINISHED, Store, Stored, StoreError

logger = logging.getLogger(__name__)

FLUSH = 0.05
"""Seconds that events of a background response may wait before they are written together."""
RETRY = 1.0
"""Seconds between attempts while the store fails."""
CANCEL_TIMEOUT = 30.0
"""Seconds, beyond the heartbeat, that a cancelled response may take to end."""
POLL = 0.2
"""Seconds between looks at the store for a response that another server runs."""


class _Run:
    """A response that this server runs.

    `wake` tells its writer that there is something to write; `draining` that there will be no more; `news` tells
    followers that events were written; `ended` that all were. `pending` are events that are not written yet; while the
    store fails (`is_stuck`) this server's followers read them here.
    """

    def __init__(self) -> None:
        self.pending: list[Event] = []
        self.is_stuck = False
        self.wake = asyncio.Event()
        self.draining = False
        self.task: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        self.ended = False

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class Background:
    """Runs and follows background responses."""

    def __init__(self, service: Service, store: Store) -> None:
        self._service = service
        self._store = store
        self._runs: dict[str, _Run] = {}

    async def aclose(self) -> None:
        tasks = [run.task for run in self._runs.values() if run.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def start(self, request: CreateRequest, caller: Caller) -> tuple[str, dict[str, Any]]:
        """Begins to run; the id and the queued response."""
        loop = await self._service.prepare(request, caller, queued=True)
        body = dict(loop.body)
        identifier = str(body["id"])
        stored = Stored(identifier, caller.tenant, body, request.items, {}, request.previous_response_id)
        stored.beat = time.time()
        try:
            await self._store.save(stored)
        except BaseException:
            await loop.close()
            raise
        run = self._runs[identifier] = _Run()
        run.task = asyncio.create_task(self._work(loop, run, stored), name=identifier)
        return identifier, body

    async def _work(self, loop: Loop, run: _Run, stored: Stored) -> None:
        """Drains a loop into the store."""
        pending = run.pending
        writer = asyncio.create_task(self._write(stored, run))
        try:
            async with aclosing(loop.run()) as batches:
                async for batch in batches:
                    pending += batch
                    run.wake.set()
                    if writer.done():
                        break  # cancelled from elsewhere
                    if stored.status == "queued":
                        stored.body["status"] = "in_progress"
                        await self._save(stored)
            if writer.done() and not _ended(pending):
                pending += await loop.cancel()
        except asyncio.CancelledError:
            pending += await loop.cancel()
        finally:
            # The writer is let finish: cancelled between two writes it could leave a gap before the last event.
            run.draining = True
            run.wake.set()
            try:
                await asyncio.gather(writer, return_exceptions=True)
                if await self._drain(stored.id, run):
                    await self._end(stored, loop)
            finally:
                run.ended = True
                run.tell()
                self._runs.pop(stored.id, None)

    async def _drain(self, identifier: str, run: _Run) -> bool:
        """Writes what is left; where the store fails, followers are told from memory, until it is given up."""
        until = time.monotonic() + self._service.config.heartbeat
        while not await self._flush(identifier, run):
            if time.monotonic() > until:
                logger.error("The last %d events of %s were never stored", len(run.pending), identifier)
                return False
            await asyncio.sleep(RETRY)
        return True

    async def _end(self, stored: Stored, loop: Loop) -> None:
        """What is left to do for a response whose events are all stored."""
        try:
            kept = await self._store.get(stored.tenant, stored.id)
            if kept and kept.status in UNFINISHED:  # it could not be stored when it ended
                stored.body = dict(loop.body)
                await self._store.save(stored)
            await self._store.measure(stored.id)
        except StoreError as error:
            logger.error("The end of %s is not stored: %s", stored.id, error)

    async def _save(self, stored: Stored) -> None:
        try:
            await self._store.save(stored)
        except StoreError as error:
            logger.error("%s is not kept as %s: %s", stored.id, stored.status, error)

    async def _write(self, stored: Stored, run: _Run) -> None:
        """Writes what is pending, again and again, and beats. Ends when drained, or when a cancel was asked for."""
        beaten = time.monotonic()
        while not run.draining:
            try:
                async with asyncio.timeout(1.0):
                    await run.wake.wait()
                    await asyncio.sleep(FLUSH)
            except TimeoutError:
                pass
            run.wake.clear()
            if not await self._flush(stored.id, run):
                await asyncio.sleep(RETRY)
            if time.monotonic() - beaten > 1.0:
                beaten = time.monotonic()
                if await self._is_cancelled(stored.id) and run.task:
                    run.task.cancel()  # it may be waiting for a tool
                    return

    async def _is_cancelled(self, identifier: str) -> bool:
        """Beats, and hears whether somebody asked to cancel."""
        try:
            return await self._store.beat(identifier)
        except StoreError:
            return False  # `_flush` says that the store fails

    async def _flush(self, identifier: str, run: _Run) -> bool:
        """Writes the pending events; False, and they stay, if the store fails."""
        batch = [(event["sequence_number"], to_json(event).decode()) for event in run.pending]
        was_stuck, run.is_stuck = run.is_stuck, False
        if batch:
            try:
                await self._store.append_events(identifier, batch)
                del run.pending[: len(batch)]
            except StoreError as error:
                run.is_stuck = True
                if not was_stuck:
                    logger.error("Events of %s wait to be stored: %s", identifier, error)
            run.tell()
        return not run.is_stuck

    async def _measure(self, identifier: str) -> None:
        try:
            await self._store.measure(identifier)
        except StoreError as error:
            logger.warning("The size of %s is not known: %s", identifier, error)

    async def follow(self, identifier: str, caller: Caller, after: int) -> AsyncGenerator[list[Event], None]:
        """Events after number `after`, as they come, to the terminal one."""
        while True:
            run = self._runs.get(identifier)
            news = run.news if run else None
            batch = [json.loads(data) for _, data in await self._store.events(identifier, after)]
            if run and run.is_stuck:
                told = batch[-1]["sequence_number"] if batch else after
                batch += [event for event in run.pending if event["sequence_number"] > told]
            if batch:
                after = batch[-1]["sequence_number"]
                yield batch
                if _ended(batch):
                    return
                continue
            if run is None or run.ended:
                stored = await self._store.get(caller.tenant, identifier)
                if stored is None:
                    raise not_found("Response", identifier)
                if (await self.checked(stored)).status not in UNFINISHED:
                    if not await self._store.events(identifier, after, 1):
                        return
                    continue
            if news is None:
                await asyncio.sleep(POLL)
                continue
            try:
                async with asyncio.timeout(POLL):
                    await news.wait()
            except TimeoutError:
                pass

    async def checked(self, stored: Stored) -> Stored:
        """`stored`, marked failed if the server that ran it has died."""
        if stored.status not in UNFINISHED or stored.id in self._runs:
            return stored
        if time.time() - (stored.beat or stored.created) < self._service.config.heartbeat:
            return stored
        stored.body["status"] = "failed"
        message = "The server that ran this response has ended, or could not store it."
        stored.body["error"] = {"code": "server_error", "message": message}
        await self._store.save(stored)
        number = await self._store.last_event(stored.id) + 1
        event = {"type": "response.failed", "sequence_number": number, "response": stored.body}
        await self._store.append_events(stored.id, [(number, json.dumps(event))])
        return stored

    async def cancel(self, stored: Stored, caller: Caller) -> dict[str, Any]:
        """Stops a response wherever it runs; its last body."""
        if stored.status not in UNFINISHED:
            if stored.status == "cancelled":
                return stored.body
            raise ApiError(f"The response is already {stored.status}.", param="response_id")
        await self.stop(stored.id, caller)
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT + self._service.config.heartbeat):
                async for _ in self.follow(stored.id, caller, -1):
                    pass
        except TimeoutError:
            message = "The response is being cancelled; look at it again later."
            raise ApiError(message, code="cancel_timeout", status=503, kind="server_error") from None
        return (await self._service.get(stored.id, caller)).body

    async def stop(self, identifier: str, caller: Caller) -> None:
        run = self._runs.get(identifier)
        stored = await self._store.get(caller.tenant, identifier)
        if stored is None:
            return
        if run is None or run.task is None:
            await self._store.request_cancel(caller.tenant, identifier)
            return
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)


def _ended(batch: list[Event]) -> bool:
    return bool(batch) and batch[-1]["type"] in TERMINAL
