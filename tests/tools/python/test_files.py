"""Files that programs left: one caller's cost another nothing, and none costs more descriptors or disk than it must."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from vllm_gptoss.tools.python.files import FileStore

MIB = 1 << 20


@pytest.fixture
def store() -> Iterator[FileStore]:
    made = FileStore(max_bytes=8 * MIB, max_files=10_000, keep_s=60)
    yield made
    made.close()


async def put(store: FileStore, path: Path, size: int, owner: str, data: bytes = b"") -> str:
    with path.open("wb") as file:
        file.write(data)
        file.truncate(size)
    return (await store.put(f"cntr_{owner}", path.name, os.open(path, os.O_RDONLY), 64 * MIB, owner)).file_id


async def test_a_callers_files_push_out_only_its_own(store: FileStore, tmp_path: Path) -> None:
    kept = [await put(store, tmp_path / f"mine {number}.txt", MIB, "alice", b"mine") for number in range(3)]
    for number in range(20):
        await put(store, tmp_path / f"{number}.bin", MIB, "bob")
    for file_id in kept:
        found = await store.read("cntr_alice", file_id)
        assert found.data[:4] == b"mine"
    assert len(await store.listing("cntr_bob")) == 5  # what is left


async def test_a_caller_alone_has_the_whole_store(store: FileStore, tmp_path: Path) -> None:
    for number in range(20):
        await put(store, tmp_path / f"{number}.bin", MIB, "bob")
    assert len(await store.listing("cntr_bob")) == 8


async def test_many_small_files_push_out_no_large_one_of_another(tmp_path: Path) -> None:
    with closing(FileStore(max_bytes=8 * MIB, max_files=10, keep_s=60)) as store:
        kept = await put(store, tmp_path / "mine.bin", 4 * MIB, "alice")
        for number in range(20):
            await put(store, tmp_path / f"{number}.txt", 1, "bob")
        assert await store.read("cntr_alice", kept) is not None
        assert len(await store.listing("cntr_bob")) == 9


async def test_holes_take_no_room_on_the_disk_and_come_back_as_zeros(tmp_path: Path) -> None:
    with closing(FileStore(max_bytes=256 * MIB, max_files=10, keep_s=60)) as store:
        file_id = await put(store, tmp_path / "sparse.bin", 64 * MIB, "alice", b"start")
        (entry,) = store._entries.values()
        assert os.fstat(entry.handle.fileno()).st_blocks * 512 < 4 * MIB
        found = await store.read("cntr_alice", file_id)
        assert found.data == b"start" + bytes(64 * MIB - 5)


async def test_stored_files_leave_descriptors_to_others(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = FileStore(max_bytes=8 * MIB, max_files=10_000, keep_s=60)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        for number in range(390):
            await put(store, tmp_path / "f.txt", 1, f"caller {number % 7}")
        assert len(os.listdir("/proc/self/fd")) - before <= 101
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        store.close()


@pytest.mark.parametrize("name", ["page.html", "picture.svg", "style.xhtml", "x.js", "x.xml", "unknown.q", "none"])
async def test_nothing_that_a_browser_would_run_is_said_to_be_that(store: FileStore, tmp_path: Path, name: str) -> None:
    found = await store.read("cntr_a", await put(store, tmp_path / name, 1, "a"))
    assert found.media_type == "application/octet-stream"
