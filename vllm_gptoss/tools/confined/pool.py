"""The server's side: gives a payload to a worker, waits within limits, and decodes what comes back. Never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import anyio
import msgspec
from prometheus_client import Counter, Histogram

from vllm_gptoss.tools.confined import jobs
from vllm_gptoss.tools.confined.nursery import Nursery
from vllm_gptoss.tools.confined.wire import ANSWER, DONE, REFUSED, REQUEST, Hello, JobHeader
from vllm_gptoss.tools.protocol import CALLER
from vllm_gptoss.tools.slots import BusyError, Slots

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_START_S = 30.0
_CHUNK = 256 << 10
_HELLO = 4096
_SPARE = 2
_LONG_CPU_S, _LONG_NICE = 8, 10

JOBS = Counter(
    "gptoss_confined_jobs", "Payloads read in confined workers: done, refused, failed, limit", ["job", "outcome"]
)
SECONDS = Histogram("gptoss_confined_job_seconds", "How long a confined worker had a payload", ["job"])


class ConfinedError(Exception):
    """A payload was not read: over its limits, or its job failed. The message names the reason, never the payload."""


class FaultError(ConfinedError):
    """No verdict on the payload: its worker was killed, was too slow, or did not start. Callers must not cache it."""


class _KilledError(FaultError):
    """The worker ended before it could have used up its processor time."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits of one job. Sizes in bytes; `seconds`: wall clock with the worker; `cpu_s`: its processor time."""

    seconds: float = 20.0
    cpu_s: int = 8
    memory: int = 512 << 20
    payload: int = 24 << 20
    answer: int = 8 << 20

    @property
    def is_long(self) -> bool:
        """Whether a job may take so long that others must not wait for it: a web page or a document."""
        return self.cpu_s > _LONG_CPU_S


DEFAULT = Limit()


@dataclass(frozen=True, slots=True)
class Sizes:
    """`workers` of long and as many of short jobs at once, 0 for half of the cores, 2 to 8; and one of each more,
    which no caller has who has another. `caller_queue` and `queue` bound how many jobs of each kind wait."""

    workers: int = 0
    caller_queue: int = 64
    queue: int = 256


class Pool:
    """Workers for one event loop. `run` is the whole interface.

    Long and short jobs have separate slots, and long ones yield the processor to short ones.
    """

    def __init__(self, nursery: Nursery, sizes: Sizes = Sizes()) -> None:
        self._nursery = nursery
        at_once = (sizes.workers or max(2, min(8, (os.cpu_count() or 2) // 2))) + 1
        self._short, self._long = (Slots(at_once, sizes.caller_queue, sizes.queue) for _ in range(2))
        self._spare: deque[socket.socket] = deque()

    async def run(
        self,
        job: Callable[Concatenate[bytes, _P], _R],
        payload: bytes,
        limit: Limit = DEFAULT,
        *args: _P.args,
        **options: _P.kwargs,
    ) -> _R:
        """Runs `job(payload, **options)` in a worker and returns its result.

        Raises:
            Refused: the job rejected the payload.
            ConfinedError: the job exceeded `limit`, or failed.
            FaultError: two workers were killed, or the job took longer than `limit.seconds`.
            BusyError: too many wait already.
        """
        if args:
            raise TypeError("options of a job go by name")
        if len(payload) > limit.payload:
            raise ConfinedError(f"{len(payload)} bytes are more than {limit.payload}")
        name = jobs.name_of(job)
        nice = _LONG_NICE if limit.is_long else 0
        header = msgspec.msgpack.encode(JobHeader(name, dict(options), limit.cpu_s, limit.memory, nice))
        async with (self._long if limit.is_long else self._short).one(CALLER.get()):
            return await self._read(job, name, header, payload, limit)  # type: ignore[no-any-return]

    async def _read(self, job: Callable[..., Any], name: str, header: bytes, payload: bytes, limit: Limit) -> Any:
        began = time.monotonic()
        outcome = "limit"
        try:
            try:
                status, answer = await self._ask(header, payload, limit)
            except _KilledError:  # by the kernel, short of memory, or with its fork server
                self.close()  # spare workers may have been killed too
                status, answer = await self._ask(header, payload, limit)
            outcome = {DONE: "done", REFUSED: "refused"}.get(status, "failed")
            if status == DONE:
                return _decoder(job).decode(answer)
            said = str(msgspec.msgpack.decode(answer, type=str))
            if status == REFUSED:
                raise jobs.Refused(said)
            raise ConfinedError(said)
        except msgspec.DecodeError as error:
            outcome = "failed"
            raise ConfinedError("the worker's answer is not of its type") from error
        finally:
            label = name.rpartition(".")[2]
            JOBS.labels(label, outcome).inc()
            SECONDS.labels(label).observe(time.monotonic() - began)

    async def _ask(self, header: bytes, payload: bytes, limit: Limit) -> tuple[int, bytes]:
        worker = await self._worker()
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit.seconds):
                await worker.send(REQUEST.pack(len(header), len(payload)) + header)
                await worker.send(payload)
                status, size = ANSWER.unpack(await worker.receive(ANSWER.size))
                if size > limit.answer:
                    raise ConfinedError(f"its text is larger than {limit.answer} bytes")
                return status, await worker.receive(size)
        except TimeoutError:
            raise FaultError(f"not read within {limit.seconds:g} s") from None
        except (EOFError, OSError):
            could_be_limit = time.monotonic() - began >= limit.cpu_s and not self._nursery.gone
            raise (FaultError if could_be_limit else _KilledError)("its worker was killed") from None
        finally:
            worker.kill()

    async def _worker(self) -> _Worker:
        """A connected worker. Raises FaultError."""
        problem = ""
        if self._nursery.gone:
            self.close()
        for attempt in range(_SPARE + 4):  # spare ones may have died with their fork server, and it may be dying
            await asyncio.sleep(0.05 * max(0, attempt - _SPARE))
            try:
                sock = self._spare.popleft() if self._spare else self._nursery.spawn()
                worker = await _greeted(sock)
                self._refill()
                return worker
            except (OSError, EOFError) as error:
                problem = str(error)
        raise FaultError(f"no worker starts: {problem or 'it ends at once, with the reason in the log'}")

    def _refill(self) -> None:
        with contextlib.suppress(OSError):  # the next call reports it
            while len(self._spare) < _SPARE:
                self._spare.append(self._nursery.spawn())

    async def start(self) -> None:
        """Starts the fork server, which takes about a second, before the first job. Raises FaultError."""
        (await self._worker()).kill()

    def use(self, nursery: Nursery) -> None:
        if nursery is not self._nursery:
            self.close()
            self._nursery = nursery

    def close(self) -> None:
        while self._spare:
            self._spare.popleft().close()


@functools.lru_cache(maxsize=64)
def _decoder(job: Callable[..., Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(get_type_hints(job)["return"])


class _Worker:
    """One process, by its socket and a descriptor of itself."""

    def __init__(self, sock: socket.socket, pidfd: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._pidfd = pidfd

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def receive(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises EOFError."""
        parts = bytearray()
        while len(parts) < size:
            part = await self._loop.sock_recv(self._sock, min(_CHUNK, size - len(parts)))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def kill(self) -> None:
        """In every case. A worker that has answered is already ending."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        self._sock.close()


async def _greeted(sock: socket.socket) -> _Worker:
    """The worker behind `sock`. Raises EOFError, OSError, FaultError."""
    try:
        async with asyncio.timeout(_START_S):
            await anyio.wait_readable(sock)
        data, fds, _, _ = socket.recv_fds(sock, _HELLO, 1, socket.MSG_CMSG_CLOEXEC)
        if not data or len(fds) != 1:
            raise EOFError
    except BaseException:
        sock.close()
        raise
    worker = _Worker(sock, fds[0])
    hello = msgspec.msgpack.decode(data, type=Hello)
    if hello.error:
        worker.kill()
        raise FaultError(f"workers cannot start: {hello.error}")
    _tell(tuple(hello.missing))
    return worker


@functools.cache
def _tell(missing: Sequence[str]) -> None:
    if missing:
        logger.warning("confined: workers run without %s, which this host does not give", ", ".join(missing))


_nurseries: list[Nursery] = []
"""The last one is in use. Those before it ended their service when a module with further jobs was imported."""


def nursery() -> Nursery:
    """The fork server of the server's own jobs, which knows all that are registered by now."""
    if not _nurseries or not _nurseries[-1].knows(jobs.modules()):
        _nurseries.append(Nursery(jobs.modules()))
    return _nurseries[-1]


_sizes = Sizes()


def set_sizes(sizes: Sizes) -> None:
    """Sets the sizes of pools that are created later."""
    global _sizes
    _sizes = sizes


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Pool] = weakref.WeakKeyDictionary()


def pool() -> Pool:
    """The running event loop's pool; all share one fork server."""
    loop = asyncio.get_running_loop()
    if loop not in _pools:
        _pools[loop] = Pool(nursery(), _sizes)
    _pools[loop].use(nursery())
    return _pools[loop]


__all__ = ["BusyError", "ConfinedError", "FaultError", "Limit", "Pool", "Sizes", "nursery", "pool", "set_sizes"]
