"""A store on a full disk: every client gets an error, no completed response is lost, the server continues."""

from __future__ import annotations

import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from tests.support.machine import without_namespaces
from tests.support.places import ROOT
from tests.support.responses import process
from tests.support.responses.events import read, stream
from tests.support.responses.server import MODEL
from tests.support.waiting import soon
from vllm_gptoss.cli.bench.worker import free_port

DISK = 3 << 20
MOUNT = "mount -t tmpfs -o size={size} none {disk} && exec {command}"


@dataclass
class Limited:
    """A server with a small disk for its store. `disk` is its mount as this process reaches it."""

    http: httpx.Client
    disk: Path

    def fill(self) -> None:
        with open(self.disk / "filler", "wb", buffering=0) as filler:
            while True:
                try:
                    filler.write(bytes(4096))
                except OSError:
                    return

    def free(self) -> None:
        (self.disk / "filler").unlink()


@contextmanager
def limited(folder: Path, text: str, rate: float, *, is_mounted: bool) -> Iterator[Limited]:
    port = free_port()
    command = process.command(folder / "store.sqlite", port, text, rate)
    if is_mounted:
        inner = MOUNT.format(size=DISK, disk=shlex.quote(str(folder)), command=shlex.join(command))
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inner]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (DISK // 2, DISK // 2))

    server = subprocess.Popen(command, cwd=ROOT, preexec_fn=None if is_mounted else limit)
    try:
        with closing(process.client_of(server, port)) as http:
            yield Limited(http, Path(f"/proc/{server.pid}/root{folder}") if is_mounted else folder)
    finally:
        server.kill()
        server.wait()


BIG = "abcdefgh " * 40_000
TEXT = "<|channel|>final<|message|>" + "word " * 100 + "<|return|>"


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    """A server with its store on a separate, small file system."""
    if why_not := without_namespaces():
        pytest.skip(why_not)
    with limited(tmp_path_factory.mktemp("mounted"), TEXT, 200.0, is_mounted=True) as server:
        yield server


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    """A server that may not write large files: the same error for SQLite on hosts without mounts."""
    with limited(tmp_path_factory.mktemp("capped"), TEXT, 1e6, is_mounted=False) as server:
        yield server


def follow(server: Limited, identifier: str) -> list[dict[str, Any]]:
    with connect_sse(server.http, "GET", f"/responses/{identifier}?stream=true") as source:
        return read(source.iter_sse())


def started_before_the_disk_was_full(server: Limited) -> str:
    body = {"model": MODEL, "input": "hi", "background": True}
    made: str = server.http.post("/responses", json=body).raise_for_status().json()["id"]
    time.sleep(0.1)
    server.fill()
    return made


def test_a_background_response_is_followed_to_its_end(mounted: Limited) -> None:
    for has_room_again in (True, False):
        made = started_before_the_disk_was_full(mounted)
        events = follow(mounted, made)
        assert [event["sequence_number"] for event in events] == list(range(len(events))), "no event is missing"
        assert events[-1]["type"] == "response.failed"
        assert "could not be stored" in events[-1]["response"]["error"]["message"]
        if has_room_again:
            mounted.free()
            soon(lambda made=made: mounted.http.get(f"/responses/{made}").json()["status"] == "failed")
            assert follow(mounted, made)[-1]["type"] == "response.failed"
            assert mounted.http.post("/responses", json={"model": MODEL, "input": "hi"}).is_success, "room is used"
        else:
            assert mounted.http.post("/responses", json={"model": MODEL, "input": "x", "store": False}).is_success
            mounted.free()


@pytest.mark.parametrize("where", ["mounted", "capped"])
def test_what_was_reported_complete_is_there_and_the_rest_is_told(where: str, request: pytest.FixtureRequest) -> None:
    http, kept = request.getfixturevalue(where).http, []
    for number in range(30):
        big = {"model": MODEL, "input": f"{number} {BIG}"}  # the same text again would be stored once
        events = stream(http, big)
        if events[-1]["type"] != "response.completed":
            break
        kept.append(events[-1]["response"]["id"])
    assert len(kept) > 1
    assert events[-1]["type"] == "response.failed"
    assert "could not be stored" in events[-1]["response"]["error"]["message"]
    assert all(http.get(f"/responses/{one}").status_code == 200 for one in kept)
    assert http.get(f"/responses/{events[-1]['response']['id']}").status_code == 404
    assert http.post("/responses", json=big).status_code == 500
    assert http.post("/responses", json={**big, "store": False}).json()["status"] == "completed"
    refused = http.post("/responses", json={**big, "background": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_failed")
