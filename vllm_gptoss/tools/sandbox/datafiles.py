"""The files that a program left in its data directory, found and opened without following it anywhere else."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

_LIMIT = 1000
_DEPTH = 8


Found = tuple[str, int, int, int]
"""A file: its path relative to the base, bytes, mtime in ns, inode."""


def regular_files(base: str) -> list[Found]:
    """The first 1,000 regular files, without hidden folders."""
    return sorted(_walk(base, base, 0))[:_LIMIT]


def _walk(base: str, directory: str, depth: int) -> Iterator[Found]:
    """Skips folders that the program closed to everybody (mode 0), and what vanishes meanwhile."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and depth < _DEPTH and not entry.name.startswith("."):
                yield from _walk(base, entry.path, depth + 1)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    s = entry.stat(follow_symlinks=False)
                    yield entry.path[len(base) + 1 :], s.st_size, s.st_mtime_ns, s.st_ino


def open_regular(base: str, path: str) -> int:
    """A descriptor of a regular file below `base`; follows no link, never blocks. Raises OSError, ValueError."""
    parts = path.split("/")
    if not parts or any(p in ("", ".", "..") for p in parts):
        raise ValueError(f"not a plain relative path: {path!r}")
    directory = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    step_flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        for part in parts[:-1]:
            step = os.open(part, step_flags, dir_fd=directory)
            os.close(directory)
            directory = step
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"not a regular file: {path!r}")
    return fd
