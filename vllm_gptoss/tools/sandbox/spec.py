"""A cage's files and limits, as plain data that the server sends to the zygote in JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Where things are inside; the scratch tmpfs lies on RUN and is bound to the others, so one size limit covers all.
DATA, TMP, SHM, RUN, CACHE = "/mnt/data", "/tmp", "/dev/shm", "/run", "/var/cache/python"  # noqa: S108
SOCKETS = f"{RUN}/jupyter"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
INSIDE_ID = 1000


def scratch_directory(path: str) -> str:
    """Where on the scratch tmpfs the contents of `path` lie."""
    return f"{RUN}/{path[1:].replace('/', '-')}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Per cage; sizes in bytes."""

    memory: int = 2 << 30  # anonymous and tmpfs memory of all processes together
    scratch: int = 256 << 20  # /tmp, /mnt/data and /dev/shm together
    inodes: int = 16384
    processes: int = 64  # threads count
    open_files: int = 512
    cpus: int = 2
    all_open_files: int = 2048  # each may hold a socket buffer of 208 KiB that no other limit counts
    mappings: int = 131_072  # of memory, which take 0.2 KiB of the kernel's each, of all processes together
    locks: int = 65_536  # on files, the same
    niceness: int = 5
    shared_memory: bool = False  # MAP_SHARED with MAP_ANONYMOUS, which nothing but a cgroup counts


@dataclass(frozen=True, slots=True)
class View:
    """The host's paths that a cage can read. Other paths do not exist inside."""

    read_only: tuple[str, ...]
    hidden: tuple[str, ...] = ()  # emptied where they lie inside a `read_only` path
    allow_network: bool = False
    uid: int = 65534  # what a root server becomes; an ordinary user stays itself
    gid: int = 65534


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything a zygote needs. `payload` is a Python file with `preload(options)` and `run(argument, ready)`."""

    view: View
    limits: Limits
    payload: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Spec:
        """Reverses `dataclasses.asdict`."""
        view = dict(data["view"])
        view["read_only"], view["hidden"] = tuple(view["read_only"]), tuple(view["hidden"])
        return cls(View(**view), Limits(**data["limits"]), data["payload"], data["options"])
