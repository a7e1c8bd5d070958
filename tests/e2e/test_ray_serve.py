"""Ray Serve LLM scales replicas of the small model up and down under load, and no response is lost.

The recipe is the shipped one; Ray's own ingress has no `/v1/responses`, so that every answer here is the plugin's.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.server import NAME
from tests.support import rays, scale
from tests.support.places import ROOT
from tests.support.sockets import listening

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not scale.SOAK, reason="minutes of two engines: `make soak` runs it"),
    pytest.mark.skipif(not rays.can("serve"), reason=rays.MISSING),
]
CLIENTS = 6
PYTHON = [{"type": "code_interpreter", "container": {"type": "auto"}}]
CAPITAL = {"input": "What is the capital of France?"}
PRODUCT = {"input": "Compute 17 * 23 with Python.", "tools": PYTHON}
ANSWERS = {CAPITAL["input"]: "The capital of France is Paris.", PRODUCT["input"]: "17 * 23 = 391."}


@dataclass
class Ray:
    """The process of `tests/support/ray_serve.py`. seen: numbers of running replicas, in order, with their time."""

    process: subprocess.Popen[str]
    url: str
    seen: list[dict[str, int]] = field(default_factory=list)

    async def follow(self) -> None:
        assert self.process.stdout is not None
        while line := await asyncio.to_thread(self.process.stdout.readline):
            if line.startswith('{"replicas"'):
                self.seen.append(json.loads(line))

    async def until(self, replicas: int, patience: float = 300) -> None:
        """Waits for this many: of them one may still be starting when the load has long begun."""
        began = time.monotonic()
        while not self.seen or self.seen[-1]["replicas"] != replicas:
            assert time.monotonic() - began < patience, f"no {replicas} replicas: {self.seen}"
            assert self.process.poll() is None
            await asyncio.sleep(0.2)


@pytest.fixture
def served_by_ray(model_dir: Path, tmp_path: Path) -> Iterator[Ray]:
    with listening() as listener:
        port = int(listener.getsockname()[1])
    home = Path(f"/tmp/gptoss-ray-{port}")  # Ray's sockets need short names
    environment = os.environ | rays.environment() | {
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(home / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(home / "admin.sock"),
        "RAY_TMPDIR": str(home),
        "GPTOSS_BROWSER_DOCUMENTS": str(ROOT / "demo" / "documents"),
    }  # fmt: skip
    home.mkdir()
    command = [sys.executable, "-m", "tests.support.ray_serve", str(model_dir), str(tmp_path), str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        yield Ray(process, f"http://127.0.0.1:{port}/v1")
    finally:
        process.communicate("over\n", timeout=120)
        shutil.rmtree(home, ignore_errors=True)


@dataclass
class Load:
    """Clients with one request after the other. kept: completed responses; lost: unanswered requests."""

    http: httpx.AsyncClient
    kept: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    async def client(self, number: int, over: asyncio.Event) -> None:
        turn = number
        while not over.is_set():
            turn += 1
            body: dict[str, Any] = {"model": NAME, "temperature": 0, **(PRODUCT if turn % 3 == 0 else CAPITAL)}
            style = "streamed" if turn % 2 else "whole"
            try:
                response = await (self.streamed(body) if turn % 2 else self.whole(body))
            except (httpx.HTTPError, AssertionError, json.JSONDecodeError) as error:
                self.lost.append(f"{style}: {type(error).__name__}: {error}")
                continue
            text = response["output"][-1]["content"][0]["text"]
            if text != ANSWERS[body["input"]] or response["status"] != "completed":
                self.lost.append(f"{style}: {response['status']}, {text}")
            self.kept[response["id"]] = text
            self.seen[style] += 1

    async def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        answered = await self.http.post("/responses", json=body)
        assert answered.status_code == 200, answered.text[:300]
        return dict(answered.json())

    async def streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async with self.http.stream("POST", "/responses", json=body | {"stream": True}) as answered:
            assert answered.status_code == 200, answered.status_code
            async for line in answered.aiter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
        assert last.get("type") == "response.completed", last.get("type")
        return dict(last["response"])


async def test_one_replica_becomes_two_and_one_again_and_no_response_is_lost(served_by_ray: Ray) -> None:
    ray, over, few = served_by_ray, asyncio.Event(), asyncio.Event()
    following = asyncio.create_task(ray.follow())
    await ray.until(1)
    async with httpx.AsyncClient(base_url=ray.url, timeout=120) as http, asyncio.TaskGroup() as group:
        load = Load(http)
        group.create_task(load.client(0, over))  # one goes on while a replica is taken away
        for number in range(1, CLIENTS):
            group.create_task(load.client(number, few))
        await ray.until(2)
        before = len(load.kept)
        while len(load.kept) < before + 60:  # both have their part
            await asyncio.sleep(0.2)
        few.set()
        await ray.until(1)
        after = len(load.kept)
        while len(load.kept) < after + 5:
            await asyncio.sleep(0.2)
        over.set()
    print(f"{len(load.kept)} responses, {dict(load.seen)}, lost: {load.lost}; replicas: {ray.seen}")
    assert [each["replicas"] for each in ray.seen if each["replicas"]] == [1, 2, 1]
    assert not load.lost
    async with httpx.AsyncClient(base_url=ray.url, timeout=60) as http:
        for identifier, text in load.kept.items():
            answered = (await http.get(f"/responses/{identifier}")).json()
            assert answered["output"][-1]["content"][0]["text"] == text
    following.cancel()
