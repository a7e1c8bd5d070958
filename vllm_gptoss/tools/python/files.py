"""Files that programs left in /mnt/data, kept for download after the cage is gone.

Each is copied into an unnamed temporary file, so nothing is left on the disk when the server ends, in whatever way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import stat
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from typing import IO

from vllm_gptoss.tools.protocol import File, StoredFile

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20

MEDIA_TYPES = {
    ".csv": "text/csv",
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".json": "application/json",
    ".md": "text/markdown",
    ".mp3": "audio/mpeg",
    ".mp4": "video/mp4",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".py": "text/x-python",
    ".tsv": "text/tab-separated-values",
    ".txt": "text/plain",
    ".wav": "audio/wav",
    ".webp": "image/webp",
    ".zip": "application/zip",
}
"""What a download is said to be. Nothing that a browser runs, such as HTML or SVG; the system's table has no say."""


@dataclass(slots=True)
class _Entry:
    info: StoredFile
    owner: str
    handle: IO[bytes]
    used: float  # monotonic, s


class FileStore:
    """Bounded by bytes, number and age. Of the owner who has most the oldest go first, with a log line: one alone has
    all of it, and none loses a file while it has less than its even share."""

    def __init__(self, *, max_bytes: int, max_files: int, keep_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._keep_s = keep_s
        self._entries: dict[tuple[str, str], _Entry] = {}

    async def put(self, container_id: str, filename: str, fd: int, max_bytes: int, owner: str = "") -> File:
        """Copies what `fd` refers to; closes it. Raises ValueError for what is not a regular file or is too large."""
        handle, size = await asyncio.to_thread(_copy, fd, max_bytes)
        media_type = MEDIA_TYPES.get(os.path.splitext(filename)[1].lower(), "application/octet-stream")
        file_id = f"cfile_{secrets.token_hex(16)}"
        info = StoredFile(container_id, file_id, filename, media_type, size, int(time.time()))
        self._entries[container_id, file_id] = _Entry(info, owner, handle, time.monotonic())
        self.prune()
        return File(container_id, file_id, filename, size)

    async def read(self, container_id: str, file_id: str) -> StoredFile | None:
        """The file with its bytes, or None if there is none (any more)."""
        entry = self._entries.get((container_id, file_id))
        if entry is None:
            return None
        entry.used = time.monotonic()
        # pread: several clients may read at once, and pruning may close the file meanwhile
        fd = os.dup(entry.handle.fileno())
        data = await asyncio.to_thread(_read_all, fd, entry.info.size)
        i = entry.info
        return StoredFile(i.container_id, i.file_id, i.filename, i.media_type, i.size, i.created_at, data)

    def list(self, container_id: str) -> list[StoredFile]:
        """The container's files without their bytes, oldest first."""
        return [e.info for (owner, _), e in self._entries.items() if owner == container_id]

    def prune(self) -> None:
        """Drops what is too old, then the least recently used of whoever has most until the rest fits."""
        now = time.monotonic()
        for key in [k for k, e in self._entries.items() if now - e.used > self._keep_s]:
            self._entries.pop(key).handle.close()
        # Each file is a descriptor, of which the process needs the most for its connections.
        most = min(self._max_files, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        size: Counter[str] = Counter()
        number: Counter[str] = Counter()
        for entry in self._entries.values():
            size[entry.owner] += entry.info.size
            number[entry.owner] += 1
        while size.total() > self._max_bytes or number.total() > most:
            (owner, _), *_ = (size if size.total() > self._max_bytes else number).most_common(1)
            key = min((k for k, e in self._entries.items() if e.owner == owner), key=lambda k: self._entries[k].used)
            entry = self._entries.pop(key)
            size[owner] -= entry.info.size
            number[owner] -= 1
            entry.handle.close()
            logger.warning("dropped file %s of container %s: the file store is full", key[1], key[0])

    def close(self) -> None:
        """Drops every file."""
        for entry in self._entries.values():
            entry.handle.close()
        self._entries.clear()


def _copy(fd: int, max_bytes: int) -> tuple[IO[bytes], int]:
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"{status.st_size} bytes are over the limit of {max_bytes}")
        handle = tempfile.TemporaryFile()  # noqa: SIM115 - outlives this call
        size = 0
        while size < max_bytes and (chunk := os.pread(fd, min(_CHUNK, max_bytes - size), size)):
            if chunk.count(0) == len(chunk):
                handle.seek(len(chunk), os.SEEK_CUR)  # a hole, or as good as one: it takes no room on the disk
            else:
                handle.write(chunk)
            size += len(chunk)
        handle.truncate(size)
        handle.flush()
        return handle, size
    finally:
        os.close(fd)


def _read_all(fd: int, size: int) -> bytes:
    try:
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)
