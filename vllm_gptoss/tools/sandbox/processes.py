"""The processes of a cage and their resources, read from /proc, also where the cage itself may not have a /proc.

Below a container's masked /proc the kernel refuses to mount another. Then the supervisor opens the outer /proc, which
no other process in the cage can access, and walks its own descendants there: pid 1 is the ancestor of all.
Source: proc(5).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """`pid` as this namespace counts; `name` is its directory in the /proc that is read."""

    pid: int
    name: str


class ProcessTable:
    """Open it while /proc still shows what is to be read: the own /proc (`own`) or the outer one."""

    def __init__(self, *, own: bool) -> None:
        self._own = own
        self._fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def others(self) -> list[Process]:
        """All processes of this pid namespace but the caller, zombies included."""
        if self._own:
            names = [name for name in os.listdir(self._fd) if name.isdigit() and name != "1"]
            return [Process(int(name), name) for name in names]
        found: list[Process] = []
        for name in self._descendants("self"):
            if inner := self._fields(name, (b"NSpid:",)):
                found.append(Process(int(inner[-1]), name))
        return found

    def _descendants(self, name: str) -> Iterator[str]:
        for child in self._children(name):
            yield child
            yield from self._descendants(child)

    def _children(self, name: str) -> list[str]:
        children: list[str] = []
        with contextlib.suppress(OSError):
            for task in self._entries(f"{name}/task"):
                children += self._read(f"{name}/task/{task}/children").decode().split()
        return children

    def _entries(self, path: str) -> list[str]:
        """The names in a directory. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _read(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def _fields(self, name: str, wanted: tuple[bytes, ...], file: str = "status") -> list[bytes]:
        """The words of the wanted lines; none if the process is gone."""
        with contextlib.suppress(OSError):
            lines = self._read(f"{name}/{file}").splitlines()
            return [word for line in lines if line.startswith(wanted) for word in line.split()[1:]]
        return []

    def is_zombie(self, process: Process) -> bool:
        """Dead, and waiting for the stopped payload to wait for it; or already gone."""
        return self._fields(process.name, (b"State:",))[:1] in ([], [b"Z"], [b"X"])

    def is_stopped(self, process: Process) -> bool:
        """Whether no thread of it runs: stopped by a signal, or dead."""
        tasks = f"{process.name}/task"
        try:
            threads = self._entries(tasks)
        except OSError:
            return True  # gone
        states = (self._fields(f"{tasks}/{thread}", (b"State:",))[:1] for thread in threads)
        return all(state in ([], [b"T"], [b"Z"], [b"X"]) for state in states)

    def memory(self, process: Process, *, exact: bool) -> int:
        """Bytes of anonymous and shared memory; `exact` divides a page among the processes that share it."""
        words = self._fields(process.name, (b"Pss_Anon:", b"Pss_Shmem:"), "smaps_rollup") if exact else []
        if not words:  # also of one that may not be read: it counts too much rather than nothing
            words = self._fields(process.name, (b"RssAnon:", b"RssShmem:"))
        return sum(int(word) << 10 for word in words if word.isdigit())

    def descriptors(self, process: Process) -> int:
        with contextlib.suppress(OSError):
            path = f"{process.name}/fd"
            if size := os.stat(path, dir_fd=self._fd).st_size:
                return size
            return len(self._entries(path))  # Linux before 6.2
        return 0

    def mappings(self, process: Process, most: int) -> int:
        """How many pieces its address space has; what is over `most` is not counted to its end."""
        with contextlib.suppress(OSError):
            return self._count(f"{process.name}/maps", b"\n", most)
        return 0

    def locks(self, process: Process, most: int) -> int:
        """How many locks it holds on files, as far as `most`."""
        held = 0
        with contextlib.suppress(OSError):
            for name in self._entries(f"{process.name}/fdinfo"):
                if held > most:
                    break
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    held += self._count(f"{process.name}/fdinfo/{name}", b"\nlock:", most - held)
        return held

    def _count(self, path: str, what: bytes, most: int) -> int:
        found, rest = 0, b""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            while found <= most and (chunk := os.read(fd, 1 << 16)):
                found += (rest + chunk).count(what)
                rest = chunk[len(chunk) - len(what) + 1 :]
        except OSError as error:
            if error.errno != errno.ENOMEM:  # the kernel has no room for the answer
                raise
            found = most + 1
        finally:
            os.close(fd)
        return found

    def address_space(self, pid: int) -> int:
        """Bytes of address space that process `pid` has mapped, 0 if it is gone."""
        for process in self.others():
            if process.pid == pid:
                with contextlib.suppress(OSError):
                    return int(self._read(f"{process.name}/statm").split()[0]) * resource.getpagesize()
        return 0
