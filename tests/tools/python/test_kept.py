"""Files stored in a folder or in S3-compatible storage: another server has them, what is cut short is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3 import NEEDS_S3, storage
from vllm_gptoss.tools.python.files import FileStore
from vllm_gptoss.tools.python.kept import KeptFiles

MIB = 1 << 20
CONTAINER = "cntr_" + "a" * 32


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with storage() as url:
        yield url


@pytest.fixture(params=["folder", pytest.param("s3", marks=NEEDS_S3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "kept") if request.param == "folder" else f"{request.getfixturevalue('s3')}/{tmp_path.name}"


async def opened(place: str, **options: float) -> FileStore:
    limits = {"max_bytes": 8 * MIB, "max_files": 100, "keep_s": 60.0} | options
    store = FileStore(kept=KeptFiles(place), **limits)
    await store.open()
    return store


async def put(store: FileStore, folder: Path, name: str, data: bytes, owner: str = "alice") -> str:
    path = folder / "source"
    path.write_bytes(data)
    return (await store.put(CONTAINER, name, os.open(path, os.O_RDONLY), 64 * MIB, owner)).file_id


async def test_what_a_server_kept_another_gives_out_after_it_is_gone(place: str, tmp_path: Path) -> None:
    first = await opened(place)
    second = await opened(place)
    data = os.urandom(3 * MIB)
    kept = await put(first, tmp_path, "ordner/bücher\n.csv", data)
    small = await put(first, tmp_path, "empty", b"")
    first.close()
    for store in (second, await opened(place)):
        found = await store.read(CONTAINER, kept)
        assert (found.filename, found.data, found.media_type) == ("ordner/bücher\n.csv", data, "text/csv")
        assert found.owner == "alice"
        listed = await store.listing(CONTAINER)
        assert {(file.file_id, file.size) for file in listed} == {(kept, len(data)), (small, 0)}
        assert await store.read(CONTAINER, "cfile_" + "0" * 32) is None
        assert await store.listing("cntr_" + "0" * 32) == []


async def test_no_name_leads_out_of_the_place(place: str, tmp_path: Path) -> None:
    store = await opened(place)
    kept = await put(store, tmp_path, "f", b"x")
    (tmp_path / "secret").write_text("{}\nx")
    for container in ("..", f"{CONTAINER}/..", "", ".", "cntr_" + "a" * 31 + "/", "*", f"../{CONTAINER}"):
        assert await store.listing(container) == []
        assert await store.read(container, kept) is None
        assert await store.read(container, "secret") is None
    assert await store.read(CONTAINER, "../../secret") is None


async def test_old_files_go_also_those_of_a_server_that_was_killed(place: str, tmp_path: Path) -> None:
    dead = await opened(place)
    kept = await put(dead, tmp_path, "old", b"x")
    store = await opened(place, keep_s=0.0)
    assert await store.read(CONTAINER, kept) is None
    assert await store.listing(CONTAINER) == []


async def test_a_file_that_was_cut_short_is_not_there(tmp_path: Path) -> None:
    store = await opened(str(tmp_path / "kept"))
    kept = await put(store, tmp_path, "f", b"x" * 100)
    file = tmp_path / "kept" / CONTAINER / kept
    file.write_bytes(file.read_bytes()[:-1])
    assert await store.read(CONTAINER, kept) is None
    assert await store.listing(CONTAINER) == []
    file.write_bytes(b"")
    assert await store.read(CONTAINER, kept) is None


async def test_a_folder_is_its_owners_alone(tmp_path: Path) -> None:
    await opened(str(tmp_path / "kept"))
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("url", "advice"),
    [("nonsense://x", "cannot be stored at nonsense://x"), ("/proc/nowhere/x", "cannot be stored at")],
)
async def test_a_place_that_cannot_be_used_is_named(url: str, advice: str) -> None:
    with pytest.raises(OSError, match=advice):
        await opened(url)


@NEEDS_S3
async def test_a_storage_that_is_gone_costs_the_file_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with storage() as url:
        store = await opened(f"{url}/going")
    with pytest.raises(OSError, match="the file store failed"):
        await put(store, tmp_path, "f", b"x")
    with pytest.raises(OSError, match="the file store failed"):
        await put(store, tmp_path, "f", b"x")
    assert caplog.text.count("file storage: save failed") == 1, "a call's other files do not wait for it too"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OSError, match="cannot be stored at s3://files/other"):
        await opened("s3://files/other")


async def test_a_hole_in_a_file_takes_no_room_where_it_is_kept(tmp_path: Path) -> None:
    store = await opened(str(tmp_path / "kept"), max_bytes=128 * MIB)
    path = tmp_path / "source"
    with path.open("wb") as file:
        file.write(b"head")
        file.truncate(64 * MIB)
    file_id = (await store.put(CONTAINER, "sparse", os.open(path, os.O_RDONLY), 64 * MIB, "alice")).file_id
    kept = tmp_path / "kept" / CONTAINER / file_id
    assert kept.stat().st_blocks * 512 < 4 * MIB
    found = await store.read(CONTAINER, file_id)
    assert (found.size, found.data[:4], found.data.count(0)) == (64 * MIB, b"head", 64 * MIB - 4)
