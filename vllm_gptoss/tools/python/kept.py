"""Files stored through `fsspec`: a folder, S3-compatible storage by URL. They outlive this process.

Each is one object, `{container}/{file}`: a line of JSON that describes it, then its bytes. One that is cut short is
not there. Every method blocks and belongs in a thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

import fsspec

from vllm_gptoss.tools.protocol import StoredFile

logger = logging.getLogger(__name__)

_CONTAINER, _FILE = re.compile(r"cntr_[0-9a-f]{32}"), re.compile(r"cfile_[0-9a-f]{32}")
_HEAD = 16 << 10  # bytes that the line has at most: a file's name has 4,096 characters
_FIELDS = ("container_id", "file_id", "filename", "media_type", "size", "created_at", "owner")

_CHUNK = 1 << 20

P = ParamSpec("P")
T = TypeVar("T")


def _storage(method: Callable[P, T]) -> Callable[P, T]:
    """Turns every exception of a file system into an `OSError` of one line."""

    @wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            what = str(error).split("\n")[0][:200]
            logger.warning("file storage: %s failed: %s: %s", method.__name__, type(error).__name__, what)
            raise OSError(f"the file store failed: {type(error).__name__}") from error

    return wrapped


def copy_sparse(source: IO[bytes], target: IO[bytes], limit: int = 1 << 62) -> int:
    """Copies up to `limit` bytes to the end of `target`, zeros as holes. Returns the number of bytes."""
    size = 0
    while chunk := source.read(min(_CHUNK, limit - size)):
        if chunk.count(0) == len(chunk):
            target.seek(len(chunk), os.SEEK_CUR)
        else:
            target.write(chunk)
        size += len(chunk)
    target.truncate()
    target.flush()
    return size


class KeptFiles:
    """The files under `url`, a folder or what `fsspec` takes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs: Any = None
        self._root = ""

    def open(self) -> None:
        """Makes the folder where it is one. Raises OSError with what is missing."""
        try:
            # Other servers write too: a listing from before is of no use, and this connection is separate.
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
            if "file" in _protocols(self._fs):
                Path(self._root).mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # nothing was stored yet
                self._fs.find(self._root, maxdepth=1)
        except ImportError as error:
            extra = "; pip install 'vllm-gptoss[s3]'" if self.url.startswith("s3") else ""
            raise OSError(f"files cannot be stored at {self.url}: {error}{extra}") from error
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            raise OSError(f"files cannot be stored at {self.url}: {what}") from error

    def _path(self, container_id: str, file_id: str) -> str | None:
        """The path of a file; None for a name that the plugin did not make, because clients send these names."""
        if not _CONTAINER.fullmatch(container_id) or not _FILE.fullmatch(file_id):
            return None
        return f"{self._root.rstrip('/')}/{container_id}/{file_id}"

    @_storage
    def save(self, info: StoredFile, source: IO[bytes]) -> None:
        path = self._path(info.container_id, info.file_id)
        assert path is not None
        head = json.dumps({name: value for name, value in asdict(info).items() if name in _FIELDS})
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        source.seek(0)
        is_local = "file" in _protocols(self._fs)
        with open(path, "wb") if is_local else self._fs.open(path, "wb") as target:
            target.write(head.encode() + b"\n")
            if is_local:
                copy_sparse(source, target)
            else:
                shutil.copyfileobj(source, target, _CHUNK)

    @_storage
    def read(self, container_id: str, file_id: str) -> StoredFile | None:
        """The file with its bytes, or None if there is none."""
        path = self._path(container_id, file_id)
        try:
            whole = self._fs.cat_file(path) if path else None
        except FileNotFoundError:
            return None
        if not whole:
            return None
        info, data = _info(whole[:_HEAD]), whole.partition(b"\n")[2]
        return replace(info, data=data) if info and len(data) == info.size else None

    @_storage
    def listing(self, container_id: str) -> list[StoredFile]:
        if not _CONTAINER.fullmatch(container_id):
            return []
        try:
            found = self._fs.find(f"{self._root.rstrip('/')}/{container_id}", detail=True)
        except FileNotFoundError:
            return []
        sizes = [int(facts["size"]) for facts in found.values()]
        ends = [min(size, _HEAD) for size in sizes]
        heads = self._fs.cat_ranges(list(found), [0] * len(ends), ends, on_error="return")  # at once, where it can
        files = []
        for head, size in zip(heads, sizes, strict=True):
            info = _info(head) if isinstance(head, bytes) else None
            if info and head.index(b"\n") + 1 + info.size == size:
                files.append(info)
        return sorted(files, key=lambda info: info.created_at)

    @_storage
    def drop(self, container_id: str, file_id: str) -> None:
        if path := self._path(container_id, file_id):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)
                if "file" in _protocols(self._fs) and not any(Path(path).parent.iterdir()):
                    Path(path).parent.rmdir()

    @_storage
    def every(self) -> list[tuple[str, str, int, float]]:
        """Container, file, bytes and age in seconds of all stored files."""
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return []
        rows = []
        for path, facts in found.items():
            container_id, file_id = path.rsplit("/", 2)[-2:]
            if self._path(container_id, file_id):
                rows.append((container_id, file_id, int(facts["size"]), max(0.0, time.time() - _made(facts))))
        return rows


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _made(facts: dict[str, Any]) -> float:
    """Seconds since 1970: each file system has its own name for it."""
    for name in ("LastModified", "mtime", "last_modified", "updated", "created"):
        value = facts.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return time.time()


def _info(head: bytes) -> StoredFile | None:
    line, end, _ = head.partition(b"\n")
    try:
        return StoredFile(**json.loads(line)) if end else None
    except (ValueError, TypeError):
        return None
