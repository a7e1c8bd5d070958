"""Files that programs left in /mnt/data, stored for download after the sandbox is closed.

By default each is copied into an unnamed temporary file, so a killed server leaves nothing on the disk. With a file
store (option `files`) each is copied into that store, and other servers serve it too.
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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO

from vllm_gptoss.tools.protocol import File, StoredFile

from .kept import KeptFiles, copy_sparse
from .quotas import PythonQuotas, account

logger = logging.getLogger(__name__)

_PAUSE_S = 10.0  # for which a place that failed is not tried again

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
"""The media type of a download. Nothing that a browser runs, such as HTML or SVG; the system's table is ignored."""


@dataclass(slots=True)
class _Entry:
    info: StoredFile
    handle: IO[bytes] | None  # None: it is in the place
    used: float  # monotonic, s


class FileStore:
    """Bounded by bytes, number and age. Of the owner who has most the oldest go first, with a log line: one alone has
    all of it, and none loses a file while it has less than its even share."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_files: int,
        keep_s: float,
        kept: KeptFiles | None = None,
        quotas: PythonQuotas | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._keep_s = keep_s
        self._kept = kept
        self._quotas = quotas or PythonQuotas()
        self._failing_until = 0.0
        self._entries: dict[tuple[str, str], _Entry] = {}

    async def open(self) -> None:
        """Finds files of earlier servers. Raises OSError where the place cannot be used."""
        if self._kept is None:
            return
        await asyncio.to_thread(self._kept.open)
        for container_id, file_id, size, age in await asyncio.to_thread(self._kept.every):
            info = StoredFile(container_id, file_id, "", "", size, int(time.time() - age))
            self._entries.setdefault((container_id, file_id), _Entry(info, None, time.monotonic() - age))
        await self.prune()

    async def put(self, container_id: str, filename: str, fd: int, max_bytes: int, owner: str = "") -> File:
        """Copies what `fd` refers to; closes it. Raises ValueError for what is not a regular file or is too large,
        also for its owner's share; OSError where it cannot be stored."""
        handle, size = await asyncio.to_thread(_copy, fd, max_bytes)
        media_type = MEDIA_TYPES.get(os.path.splitext(filename)[1].lower(), "application/octet-stream")
        file_id = f"cfile_{secrets.token_hex(16)}"
        info = StoredFile(container_id, file_id, filename, media_type, size, int(time.time()), owner=owner)
        try:
            self._quotas.check_kept(owner, self._held(owner), size)
            if self._kept is not None:
                await self._save(self._kept, info, handle)
        except BaseException:
            handle.close()
            raise
        if self._kept is not None:
            handle.close()
        entry = _Entry(info, None if self._kept else handle, time.monotonic())
        self._entries[container_id, file_id] = entry
        await self.prune()
        return File(container_id, file_id, filename, size)

    async def _save(self, place: KeptFiles, info: StoredFile, handle: IO[bytes]) -> None:
        """Raises OSError, at once where the place failed a moment ago: a call may leave many files."""
        if time.monotonic() < self._failing_until:
            raise OSError("the file store failed")
        try:
            await asyncio.to_thread(place.save, info, handle)
        except OSError:
            self._failing_until = time.monotonic() + _PAUSE_S
            raise

    def _held(self, owner: str) -> int:
        mine = account(owner)
        return sum(e.info.size for e in self._entries.values() if account(e.info.owner) == mine)

    async def read(self, container_id: str, file_id: str) -> StoredFile | None:
        """The file with its bytes, or None if it does not exist (any more)."""
        entry = self._entries.get((container_id, file_id))
        if entry is not None:
            entry.used = time.monotonic()
        if self._kept is not None:
            return await asyncio.to_thread(self._kept.read, container_id, file_id)
        if entry is None or entry.handle is None:
            return None
        # pread: several clients may read at once, and pruning may close the file meanwhile
        fd = os.dup(entry.handle.fileno())
        return replace(entry.info, data=await asyncio.to_thread(_read_all, fd, entry.info.size))

    async def listing(self, container_id: str) -> Sequence[StoredFile]:
        if self._kept is not None:
            return await asyncio.to_thread(self._kept.listing, container_id)
        return [e.info for (owner, _), e in self._entries.items() if owner == container_id]

    async def prune(self) -> None:
        """Drops what is too old, then the least recently used of the caller with most until the rest fits."""
        now = time.monotonic()
        gone = [self._entries.pop(k) for k, e in list(self._entries.items()) if now - e.used > self._keep_s]
        gone += self._too_much()
        for entry in gone:
            if entry.handle is not None:
                entry.handle.close()
            elif self._kept is not None:
                container, file = entry.info.container_id, entry.info.file_id
                try:
                    await asyncio.to_thread(self._kept.drop, container, file)
                except OSError:
                    logger.warning("file %s of container %s stays in the file store", file, container)

    def _too_much(self) -> list[_Entry]:
        # Each temporary file is a descriptor, of which the process needs the most for its connections.
        spare = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        most = self._max_files if self._kept else min(self._max_files, spare)
        size: Counter[str] = Counter()
        number: Counter[str] = Counter()
        for entry in self._entries.values():
            size[entry.info.owner] += entry.info.size
            number[entry.info.owner] += 1
        gone = []
        while size.total() > self._max_bytes or number.total() > most:
            (owner, _), *_ = (size if size.total() > self._max_bytes else number).most_common(1)
            mine = (k for k, e in self._entries.items() if e.info.owner == owner)
            key = min(mine, key=lambda k: self._entries[k].used)
            gone.append(self._entries.pop(key))
            size[owner] -= gone[-1].info.size
            number[owner] -= 1
            logger.warning("dropped file %s of container %s: the file store is full", key[1], key[0])
        return gone

    def close(self) -> None:
        """Drops every temporary file; files in a place stay there."""
        for entry in self._entries.values():
            if entry.handle is not None:
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
        with open(fd, "rb", closefd=False) as source:
            size = copy_sparse(source, handle, max_bytes)
        return handle, size
    finally:
        os.close(fd)


def _read_all(fd: int, size: int) -> bytes:
    try:
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)
