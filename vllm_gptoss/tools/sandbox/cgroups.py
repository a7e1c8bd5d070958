"""cgroup v2 leaves, one per cage: limits that the kernel keeps, where an administrator delegated a place.

Needs a directory with the controllers memory and pids and which holds no process itself, such as
`systemd-run -p Delegate=yes` or a container manager can give. Source: Linux' admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from .spec import Limits

_NEEDED = {"memory", "pids"}
# The supervisor's and the kernel's own memory, which `Limits.memory` does not count: measured 31 MiB together.
_OVERHEAD = 64 << 20
_PERIOD_US = 100_000
_numbers = itertools.count(1)


class CgroupError(Exception):
    """The delegated directory cannot be used; the message has the fix."""


class Cgroups:
    """The delegated directory. Raises CgroupError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            available = set((directory / "cgroup.controllers").read_text().split())
            if missing := _NEEDED - available:
                raise CgroupError(f"{directory} lacks the controllers {sorted(missing)}; delegate them to it")
            wanted = sorted(available & {"memory", "pids", "cpu"})
            (directory / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
        except OSError as error:
            raise CgroupError(f"{directory} is no usable cgroup v2 directory: {error}") from error
        self._has_cpu = "cpu" in wanted

    def leaf(self, limits: Limits) -> Leaf:
        path = self._directory / f"gptoss-{os.getpid()}-{next(_numbers)}"
        settings = {
            "memory.max": str(limits.memory + _OVERHEAD),
            "pids.max": str(limits.processes + 1),  # and the supervisor
            "memory.oom.group": "0",  # the supervisor has to survive to report it
        }
        if self._has_cpu:
            settings["cpu.max"] = f"{limits.cpus * _PERIOD_US} {_PERIOD_US}"
        try:
            path.mkdir()
            for name, value in settings.items():
                (path / name).write_text(value)
            with contextlib.suppress(OSError):  # no swap accounting
                (path / "memory.swap.max").write_text("0")
        except OSError as error:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise CgroupError(f"cannot make {path}: {error}") from error
        return Leaf(path)


class Leaf:
    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pid: int) -> None:
        """Moves a process here; its children follow. Raises CgroupError."""
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise CgroupError(f"cannot move a process to {self.path}: {error}") from error

    def out_of_memory(self) -> bool:
        try:
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        except OSError:
            return False
        return int(events.get("oom_kill", 0)) > 0

    def remove(self) -> bool:
        """Kills what is left and removes the cgroup; False if it is still busy."""
        with contextlib.suppress(OSError):  # Linux before 5.14
            (self.path / "cgroup.kill").write_text("1")
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True
