"""The confined side: a fork server that gives everything away, then a process per payload.

Run by `nursery` as `python -I -c … <descriptor of its socket>`. It imports the job modules as an ordinary process with
an empty environment, and before it sees a single untrusted byte it leaves the host: namespaces with an empty root,
another user, landlock without one path, no privileges. Each fork then sets its rlimits and a filter that lets it
compute, read and write its one socket, and end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_gptoss.tools.confined import jobs
from vllm_gptoss.tools.confined.wire import ANSWER, DONE, FAILED, REFUSED, REQUEST, Hello, JobHeader
from vllm_gptoss.tools.sandbox import cage, landlock, linux, seccomp, wire
from vllm_gptoss.tools.sandbox.spec import View

_NICENESS = 5  # behind the engine's own processes
_CHUNK = 1 << 20


class _OutOfTimeError(BaseException):
    """The job used up its processor time; no job catches this."""


@dataclass
class _Ready:
    hello: Hello
    mapped: int = 0  # bytes of address space that are no payload's fault
    program: bytes = b""  # the seccomp filter
    rehearsals: list[Callable[[], None]] = field(default_factory=list)


def main(control_fd: int) -> None:
    """Serves until the server's end of `control_fd` is closed. Does not return."""
    control = socket.socket(fileno=control_fd)
    linux.die_with_parent(signal.SIGKILL)
    first = wire.receive(control)
    if first is None:
        os._exit(1)
    ready = _Ready(Hello())
    try:
        modules = [importlib.import_module(name) for name in first[0]["modules"]]
        for module in modules:
            getattr(module, "warm", lambda: None)()
        ready.rehearsals = [module.rehearse for module in modules if hasattr(module, "rehearse")]
        ready.mapped = _prepare()
        ready.hello.missing = _leave(View(()))
        if linux.MACHINE in seccomp.MACHINES:
            ready.program = seccomp.assembled(profile=seccomp.COMPUTE)
    except Exception as error:
        ready.hello.error = f"{type(error).__name__}: {error}"[:500]
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, what the children share
    _serve(control, ready)
    os._exit(0)


def _prepare() -> int:
    """Does the steps that need files; returns the bytes of address space in use before a payload is read."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the host runs out of memory, this goes first
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _leave(view: View) -> list[str]:
    """Takes from this process what a host allows it to take; what it does not allow, in words."""
    missing: list[str] = []
    root = os.getuid() == 0
    try:
        _enter_void(view)
    except OSError as error:
        missing.append(f"namespaces ({error})")
        if root and os.getuid() == 0 and cage.is_mapped("uid", view.uid) and cage.is_mapped("gid", view.gid):
            cage.become(view.uid, view.gid)
    if not landlock.restrict((), (), readable=()):
        missing.append("landlock")
    linux.no_new_privileges()
    linux.drop_capabilities()
    linux.set_dumpable(False)
    linux.die_with_parent(signal.SIGKILL)
    if linux.MACHINE not in seccomp.MACHINES:
        missing.append(f"seccomp (no table for {linux.MACHINE})")
    return missing


def _enter_void(view: View) -> None:
    """New namespaces, in a child, since a new pid namespace is for children; the parent waits and ends with it.

    Raises OSError where the host does not allow them.
    """
    cage.leave_host(view)
    pid = os.fork()
    if pid:
        os.closerange(3, 1 << 16)
        _, status = os.waitpid(pid, 0)
        os._exit(abs(os.waitstatus_to_exitcode(status)) & 0xFF)
    linux.die_with_parent(signal.SIGKILL)
    cage.enter_void(view)


def _serve(control: socket.socket, ready: _Ready) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while (message := wire.receive(control)) is not None:
        for fd in message[1]:
            connection = socket.socket(fileno=fd)
            if os.fork() == 0:
                control.close()
                _work(connection, ready)
            connection.close()


def _work(connection: socket.socket, ready: _Ready) -> None:
    """Reads one request and answers it. Does not return."""
    try:
        linux.die_with_parent(signal.SIGKILL)
        own = os.pidfd_open(os.getpid())
        socket.send_fds(connection, [msgspec.msgpack.encode(ready.hello)], [own])
        os.close(own)
        gc.disable()  # it ends after one payload; a collection would only touch, and so copy, what it shares
        _rehearse(connection, ready.rehearsals)
        sizes = _read(connection.fileno(), REQUEST.size)
        header_size, payload_size = REQUEST.unpack(sizes)
        header = msgspec.msgpack.decode(_read(connection.fileno(), header_size), type=JobHeader)
        run = jobs.REGISTERED[header.job]
        _limit(header, ready)
        status, answer = _run(run, _read(connection.fileno(), payload_size), header.options)
        _write(connection.fileno(), ANSWER.pack(status, len(answer)))
        _write(connection.fileno(), answer)
    finally:
        os._exit(0)


def _rehearse(connection: socket.socket, rehearsals: Sequence[Callable[[], None]]) -> None:
    """Copies in advance the pages of memory that a payload would have had to: half of a small page's time."""
    for rehearse in rehearsals:
        if select.select([connection], [], [], 0)[0]:
            return
        with contextlib.suppress(Exception):
            rehearse()


def _limit(header: JobHeader, ready: _Ready) -> None:
    """From here on there is no way back, and the payload has not been looked at."""
    for kind, value in (
        (resource.RLIMIT_CORE, 1),  # as in `cage`: 0 would still start the host's core_pattern program
        (resource.RLIMIT_AS, ready.mapped + header.memory),
        (resource.RLIMIT_CPU, header.cpu_s + 1),  # for code that never returns to Python
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        cage.set_rlimit(kind, value)
    os.nice(header.nice)
    signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, header.cpu_s)
    if ready.program:
        seccomp.install(ready.program)


def _out_of_time(number: int, frame: object) -> None:
    raise _OutOfTimeError


def _run(run: Any, payload: bytes, options: dict[str, object]) -> tuple[int, bytes]:
    try:
        return DONE, msgspec.msgpack.encode(run(payload, **options))
    except jobs.Refused as error:
        return REFUSED, msgspec.msgpack.encode(str(error)[:500])
    except _OutOfTimeError:
        return FAILED, msgspec.msgpack.encode("not read within its processor time")
    except (MemoryError, RecursionError) as error:
        kind = type(error).__name__
        del error
        return FAILED, msgspec.msgpack.encode(kind)
    except Exception as error:
        return FAILED, msgspec.msgpack.encode(f"{type(error).__name__}: {error}"[:500])


def _read(fd: int, size: int) -> bytes:
    """Exactly `size` bytes; ends the process where there are fewer."""
    parts: list[bytes] = []
    while size:
        part = os.read(fd, min(size, _CHUNK))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
