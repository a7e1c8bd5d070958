"""Jobs that do what an exploited parser would try. Imported by workers of the tests alone."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_gptoss.tools.confined import Refused, job


@dataclass
class Tried:
    """The outcome of each attempt: the error's name, or `ESCAPED` and the data that it got."""

    outcome: dict[str, str]


def _attempt(function: Callable[[], object]) -> str:
    try:
        return f"ESCAPED {function()!r}"[:200]
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'errno', '')}"


@job
def escape(payload: bytes, *, path: str, port: int, pid: int) -> Tried:
    """Everything bounded; nothing leaves the machine."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: int) -> int:
        result = int(libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments]))
        if result < 0:
            raise OSError(ctypes.get_errno(), "")
        return result

    tries: dict[str, Callable[[], object]] = {
        "read": lambda: Path(path).read_text(),
        "write": lambda: Path(path).write_text(""),
        "list": lambda: os.listdir("/"),
        "proc": lambda: Path("/proc/self/environ").read_text(),
        "stat": lambda: os.stat("/etc"),
        "tcp": lambda: socket.create_connection(("127.0.0.1", port), 1),
        "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "unix": lambda: socket.socket(socket.AF_UNIX),
        "pair": lambda: socket.socketpair(),
        "fork": lambda: os.fork() or os._exit(0),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "kill": lambda: os.kill(pid, 0),
        "kill all": lambda: os.kill(-1, 0),
        "dup": lambda: os.dup(0),
        "pipe": lambda: os.pipe(),
        "chmod": lambda: os.chmod(path, 0o777),
        "prlimit": lambda: call(302, 0, 7, 0, 0),
        "ptrace": lambda: call(101, 16, pid, 0, 0),
        "unshare": lambda: call(272, 0x10000000),
        "memfd": lambda: call(319, 0, 0),
        "ioctl": lambda: call(16, 0, 0x5401, 0),
        "sendmsg": lambda: call(46, 3, 0, 0),
        "mmap exec": lambda: call(10, 0, 4096, 4),
        "tgkill": lambda: call(234, pid, pid, 0),
    }
    return Tried(
        {name: _attempt(function) for name, function in tries.items()} | {"environment": repr(dict(os.environ))}
    )


@job
def descriptors(payload: bytes) -> list[int]:
    """Which descriptors are open: lseek(2) is allowed, and distinguishes a socket (ESPIPE) from nothing (EBADF)."""
    found = []
    for fd in range(1024):
        try:
            os.lseek(fd, 0, os.SEEK_CUR)
            found.append(fd)
        except OSError as error:
            if error.errno != errno.EBADF:
                found.append(fd)
    return found


@job
def spin(payload: bytes, *, seconds: float) -> int:
    """Deaf to what signals it may catch."""
    for number in (signal.SIGTERM, signal.SIGXCPU, signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_IGN)
    return count(payload, seconds=seconds)


@job
def count(payload: bytes, *, seconds: float) -> int:
    """Processor time, in Python."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return 0


@job
def sleep(payload: bytes, *, seconds: float) -> int:
    """Uses no processor time."""
    time.sleep(seconds)
    return os.getpid()


@job
def allocate(payload: bytes, *, size: int) -> int:
    """`size` bytes, touched."""
    return len(b"x" * size)


@job
def crash(payload: bytes) -> int:
    """Crashes like a bug in C."""
    return int(ctypes.string_at(8)[0])


@job
def echo(payload: bytes) -> bytes:
    return payload


@job
def lie(payload: bytes) -> int:
    """Something else than it declares."""
    return "text"  # type: ignore[return-value]


@job
def refuse(payload: bytes) -> int:
    raise Refused("no " * 1000)


@job
def flood(payload: bytes) -> bytes:
    return b"x" * (64 << 20)


@job
def forge(payload: bytes) -> bytes:
    """A forged answer: a length of 4 GiB."""
    os.write(3, b"\0\xff\xff\xff\xff" + b"x" * 1000)
    time.sleep(5)
    return b""
