"""Pid 1 of a conversation's cage: starts the payload, stops it between calls, watches what it uses, and kills.

It holds no privilege, obeys only the server's end of a socket, and ends with it: however the server dies,
the socket reads end of file, pid 1 exits, and the kernel kills everything in the pid namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from . import cage, datafiles, wire
from .processes import Process, ProcessTable
from .spec import DATA, SOCKETS, Spec

_WATCH_MS = 100
_CENSUS_S = 0.25
_CENSUS_SHARE = 20  # of the time at most a twentieth is spent on what is dear to count,
_CENSUS_MOST_S = 5.0  # but it waits no longer: 60,000 locks take 0.14 s, 0.38 with four busy processes on two cores
_LIST_PAGE = 64
_LIST_BYTES = wire.MAX_PACKET // 2  # a path has up to 4096 bytes, and one that is no UTF-8 six times as many in JSON
_KILL_S = 5.0  # to die, each of 48 processes must be run once more: two cores with a load of six took over two seconds
_STDERR = f"{SOCKETS}/stderr"  # of the payload until it redirects its own


class Supervisor:
    """`run_payload(argument, ready)` is called in a fresh process for each start; it calls `ready` when it serves."""

    def __init__(
        self,
        conn: socket.socket,
        spec: Spec,
        processes: ProcessTable,
        run_payload: Callable[[dict[str, Any], Callable[[], None]], None],
    ) -> None:
        self._conn = conn
        self._spec = spec
        self._run_payload = run_payload
        self._pid = 0
        self._ready_fd = -1
        self._running = False
        self._reason = ""
        self._settled = False
        self._baseline = 0
        self._own_files = 0
        self._listed: list[datafiles.Found] = []
        self._census_at = 0.0
        self._processes = processes
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Until the server's end of the socket is closed. Raises RuntimeError outside a separate pid namespace."""
        if os.getpid() != 1:  # `kill(-1)` would then stop and kill all that this user has on the host
            raise RuntimeError("the supervisor is not the first process of a namespace")
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        directory = os.open(SOCKETS, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        own = os.pidfd_open(os.getpid())
        wire.send(self._conn, {"event": "hello"}, [own, directory])
        os.close(own)
        os.close(directory)
        while True:
            self._wait()
            if self._conn in self._readable:
                message = wire.receive(self._conn)
                if message is None:
                    return
                self._handle(message[0])
            self._reap()
            if self._running:
                self._watch()
            elif self._pid and self._settled and self._went_on():
                # Nothing may wake it between calls: a timer's signal can be SIGCONT, and an open file's too.
                self._kill_all("continued")

    def _wait(self) -> None:
        watched: list[Any] = [self._conn, self._wake_read]
        if self._ready_fd >= 0:
            watched.append(self._ready_fd)
        timeout = _WATCH_MS / 1000 if self._running else None
        self._readable, _, _ = select.select(watched, [], [], timeout)
        if self._wake_read in self._readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if self._ready_fd in self._readable:
            ready = os.read(self._ready_fd, 1)
            os.close(self._ready_fd)
            self._ready_fd = -1
            if ready:  # end of file: it died first, which _reap reports
                self._limit_address_space()
                self._baseline = self._memory()
                self._own_files = max(map(self._processes.descriptors, self._processes.others()), default=0)
                self._event("ready")

    def _limit_address_space(self) -> None:
        """Only now: the libraries' mappings and the threads' stacks are not the program's fault."""
        limit = self._processes.address_space(self._pid) + self._spec.limits.memory
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self._pid, resource.RLIMIT_AS, (limit, limit))

    def _event(self, name: str, **fields: Any) -> None:
        wire.send(self._conn, {"event": name, **fields})

    def _handle(self, message: dict[str, Any]) -> None:
        operation, reply = message["op"], {"id": message["id"]}
        try:
            if operation == "open":
                fd = datafiles.open_regular(DATA, message["path"])
                wire.send(self._conn, reply, [fd])
                os.close(fd)
                return
            reply.update(self._operate(operation, message) or {})
        except Exception as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        wire.send(self._conn, reply)

    def _operate(self, operation: str, message: dict[str, Any]) -> dict[str, Any] | None:
        match operation:
            case "start":
                self._start(message["argument"])
            case "thaw":
                self._settled = False
                self._running = self._pid > 0
                self._signal(signal.SIGCONT)
            case "settle":
                self._settle()
                self._settled = True
            case "interrupt":
                self._signal(signal.SIGINT)
            case "kill":
                self._kill_all(message.get("reason", "killed"))
            case "list":
                if not message["offset"]:  # one walk for all pages: 15,000 files take 0.2 s
                    self._listed = datafiles.regular_files(DATA)
                return page_of(self._listed, int(message["offset"]))
            case "memory":
                return {"memory": max(0, self._memory() - self._baseline)}
            case _:
                raise ValueError(f"unknown operation {operation!r}")
        return None

    def _signal(self, number: signal.Signals) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _start(self, argument: dict[str, Any]) -> None:
        if self._pid:
            raise RuntimeError("already started")
        self._wait_for_deaths()
        self._reason = ""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            _become_payload(self._spec, self._run_payload, argument, write_end)
        os.close(write_end)
        self._ready_fd = read_end
        self._running = True
        self._settled = False

    def _settle(self) -> None:
        """Stops the payload and kills all that it left running: nothing outlives a call."""
        self._running = False
        if not self._pid:
            self._wait_for_deaths()
            return
        deadline = time.monotonic() + _KILL_S
        while time.monotonic() < deadline:
            # kill(-1) stops everything but us in one go, so that nothing can fork away from what follows. Again each
            # time: until all others are dead and it is stopped, one of them or another thread may wake it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)
            others = [p for p in self._processes.others() if not self._processes.is_zombie(p)]
            strays = [p.pid for p in others if p.pid != self._pid]
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not strays and (not self._pid or self._stands_still(others)):
                return
            time.sleep(0.001)  # signals take effect when their process is next run
        self._kill_all("unstoppable")

    def _wait_for_deaths(self) -> None:
        """Until killed processes are gone: the memory of one that still dies would count as the next payload's."""
        deadline = time.monotonic() + _KILL_S
        while self._processes.others() and time.monotonic() < deadline:
            self._kill_all("died")
            self._reap()
            time.sleep(0.001)

    def _stands_still(self, others: list[Process]) -> bool:
        """Whether every thread of the payload is stopped, and stayed so since it last went on."""
        return not self._went_on() and all(self._processes.is_stopped(p) for p in others)

    def _went_on(self) -> bool:
        """Whether the payload was continued since the last call: the kernel notifies its parent, wait(2)."""
        try:
            return os.waitid(os.P_PID, self._pid, os.WCONTINUED | os.WNOHANG) is not None
        except ChildProcessError:
            return False

    def _kill_all(self, reason: str) -> None:
        self._reason = self._reason or reason
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._pid = 0
                self._running = False
                self._kill_all("died")
                code = os.waitstatus_to_exitcode(status)
                self._event("exit", code=code, reason=self._reason, stderr=_tail(_STDERR))

    def _watch(self) -> None:
        """rlimits are per process and see no tmpfs; this sees everything, a tenth of a second late."""
        limits, others = self._spec.limits, self._processes.others()
        memory, inodes = self._memory() - self._baseline, cage.scratch_used()[1]
        if memory > limits.memory and self._memory(exact=True) - self._baseline > limits.memory:
            self._kill_all("memory")
        elif inodes > limits.inodes:
            self._kill_all("inodes")
        elif len(others) > limits.processes:  # RLIMIT_NPROC spares a user who is root outside
            self._kill_all("processes")
        elif self._open_files(others) > limits.all_open_files:
            self._kill_all("descriptors")
        elif time.monotonic() > self._census_at and (reason := self._census(others)):
            self._kill_all(reason)

    def _census(self, others: list[Process]) -> str:
        """Counts mappings and locks, which use kernel memory that no process is charged for.

        Returns the name of an exceeded limit, or "".
        """
        began, limits = time.monotonic(), self._spec.limits
        mappings = locks = 0
        for process in others:
            mappings += self._processes.mappings(process, limits.mappings - mappings)
            locks += self._processes.locks(process, limits.locks - locks)
            if mappings > limits.mappings or locks > limits.locks:
                return "mappings" if mappings > limits.mappings else "locks"
        now = time.monotonic()
        self._census_at = now + min(_CENSUS_MOST_S, max(_CENSUS_S, _CENSUS_SHARE * (now - began)))
        return ""

    def _open_files(self, others: list[Process]) -> int:
        """Beyond those that the payload starts with: its children have them too, but they are the same files."""
        return sum(max(0, self._processes.descriptors(p) - self._own_files) for p in others)

    def _memory(self, *, exact: bool = False) -> int:
        """Bytes of anonymous, shared and tmpfs memory. Not `exact` counts a page once per process that shares it."""
        used = sum(self._processes.memory(p, exact=exact) for p in self._processes.others())
        return used + cage.scratch_used()[0]


def _become_payload(
    spec: Spec,
    run: Callable[[dict[str, Any], Callable[[], None]], None],
    argument: dict[str, Any],
    ready_fd: int,
) -> None:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.dup2(ready_fd, 3)
        os.dup2(os.open(_STDERR, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600), 2)
        os.dup2(2, 4, inheritable=False)
        os.closerange(5, 1 << 16)
        cage.confine_payload(spec.limits, allow_network=spec.view.allow_network)
        os.chdir(DATA)

        def ready() -> None:
            os.write(3, b"1")
            os.close(3)
            os.close(4)

        run(argument, ready)
        os._exit(0)
    except BaseException:
        with contextlib.suppress(Exception):
            os.write(4, traceback.format_exc().encode())
        os._exit(70)


def _tail(path: str, size: int = 8000) -> str:
    """The end of a file that confined code may have put there: never follows a link, never blocks."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            end = os.fstat(fd).st_size
            return os.pread(fd, size, max(0, end - size)).decode(errors="replace")
        finally:
            os.close(fd)
    return ""


def page_of(found: list[datafiles.Found], offset: int) -> dict[str, Any]:
    """A page of the files in /mnt/data; `more` if another follows."""
    page: list[datafiles.Found] = []
    size = 0
    for file in found[offset : offset + _LIST_PAGE]:
        size += len(json.dumps(file))
        if page and size > _LIST_BYTES:
            break
        page.append(file)
    return {"files": page, "more": offset + len(page) < len(found)}
