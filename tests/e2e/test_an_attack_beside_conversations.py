"""One caller's hostile pages, programs and requests do not stop the tokens of 32 conversations."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from demo.server import NAME
from tests.e2e.asking import PYTHON, SEARCH
from tests.support import scale
from tests.support.servers import running

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

ROOT = Path(__file__).resolve().parents[2]
CONVERSATIONS, RATE, ATTACKERS = 32, 10.0, 4
PAUSE_S, GROWTH_S, QUIET_S = 0.1, 0.05, 0.02
TALK = "<|channel|>final<|message|>" + "word " * 60 + "<|return|>"
FLOOD = """
import os, time
deadline, sent = time.monotonic() + 3, 0
links = {int(fd): os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')
         if os.path.lexists(f'/proc/self/fd/{fd}')}
sockets = [fd for fd, link in links.items() if link.startswith('socket:')]
for fd in sockets: os.set_blocking(fd, False)
while time.monotonic() < deadline and sent < 64 << 20:
    for fd in sockets:
        try: sent += os.write(fd, bytes(2) * 16384)
        except OSError: pass
"""
TREE = """
from IPython.display import publish_display_data
for _ in range(3): publish_display_data({'application/json': [[]] * 1_000_000})
"""
PAGES = {
    "/blanks": (b"<p>a" + b" " * 400_000 + b"b</p>", {}),
    "/cells": (b"<table>" + b"<tr><td> " * 20_000, {}),
    "/deep": (b"<div>" * 20_000, {}),
    "/bomb": (gzip.compress(bytes(64 << 20)), {"content-encoding": "gzip"}),
}
ROBOTS = "\n".join([*(f"User-agent: a{n}" for n in range(3000)), *(f"Disallow: /{n}" for n in range(3000))])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}, "b": {"$ref": "#/$defs/0"}},
} | {"$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(30)} | {"30": {"type": "null"}}}


def opening(url: str) -> str:
    return f" to=browser.open<|channel|>commentary <|constrain|>json<|message|>{json.dumps({'id': url})}<|call|>"


def running_code(text: str) -> str:
    return f" to=python<|channel|>analysis code<|message|>{text}<|call|>"


def body(turns: list[str], **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "input": json.dumps(turns), "store": False, **fields}


def attacks(site: str) -> dict[str, Callable[[int], dict[str, Any]]]:
    pages = list(PAGES)
    function = {"type": "function", "name": "f", "parameters": SCHEMA}
    return {
        "pages": lambda n: body([opening(f"{site}{pages[n % len(pages)]}?{n}"), TALK[:40]], tools=[SEARCH]),
        "floods": lambda n: body([running_code(FLOOD), TALK[:40]], tools=[PYTHON]),
        "trees": lambda n: body([running_code(TREE), TALK[:40]], tools=[PYTHON]),
        "schemas": lambda n: body([TALK[:40]], tools=[function]),
        "runs": lambda n: body([TALK[:40]], instructions="é" * 64_000),
    }


async def page(request: Request) -> Response:
    if request.url.path == "/robots.txt":
        return Response(ROBOTS, media_type="text/plain")
    content, headers = PAGES[request.url.path]
    return Response(content, headers={"content-type": "text/html", **headers})


@dataclass
class Load:
    """Conversations that stream all the time, and the seconds between two of their deltas."""

    http: httpx.AsyncClient
    gaps: list[float] = field(default_factory=list)

    async def talk(self) -> None:
        while True:
            async with self.http.stream("POST", "/responses", json=body([TALK], stream=True)) as answer:
                before = 0.0
                async for line in answer.aiter_lines():
                    if line.startswith("event: response.output_text.delta"):
                        now = time.monotonic()
                        if before:
                            self.gaps.append(now - before)
                        before = now

    async def attack(self, request: Callable[[int], dict[str, Any]], first: int) -> None:
        for number in range(first, 1 << 30, ATTACKERS):
            with contextlib.suppress(httpx.HTTPError):
                await self.http.post("/responses", json=request(number))
            await asyncio.sleep(0.01)

    async def p99(self, seconds: float, attack: Callable[[int], dict[str, Any]] | None = None) -> float:
        """The 99th percentile of the gaps within `seconds`."""
        tasks = [asyncio.create_task(self.attack(attack, n)) for n in range(ATTACKERS if attack else 0)]
        await asyncio.sleep(1.0)  # until it has begun
        self.gaps.clear()
        await asyncio.sleep(seconds)
        found = sorted(self.gaps)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found[len(found) * 99 // 100] if found else seconds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[str]:
    """A hostile site, which the server may open although it is not public."""
    async with running(Starlette(routes=[Route("/{path:path}", page)])) as url:
        yield url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, site: str) -> Iterator[str]:
    """One server for all attacks, as it would have them."""
    python = {"preload": [], "warm": 2, "max_conversations": 8, "timeout_s": 10, "memory_mib": 256}
    home = tmp_path_factory.mktemp("attacked")
    tools = home / "tools.yaml"
    tools.write_text(yaml.safe_dump({"python": python, "browser": {"allow_hosts": [site.removeprefix("http://")]}}))
    command = [sys.executable, "-m", "tests.e2e.replay_server", str(tools), str(home / "store"), "--rate", str(RATE)]
    with subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["pages", "floods", "trees", "schemas", "runs"])
async def test_tokens_keep_coming(server: str, site: str, name: str) -> None:
    """The pause counts processor time of the server's loop. The gaps are wall clock: they are judged in `make soak`, on
    a machine that has nothing else to do, as its tokens alone show; of three tries the best counts."""
    seconds = scale.count(20, 3)
    async with httpx.AsyncClient(
        base_url=f"{server}/v1", timeout=60, limits=httpx.Limits(max_connections=None)
    ) as http:
        load = Load(http)
        talking = [asyncio.create_task(load.talk()) for _ in range(CONVERSATIONS)]
        await asyncio.sleep(scale.count(3, 1))
        tries: list[tuple[float, float, float]] = []
        while len(tries) < 3 and not (tries and good(*tries[-1])):
            calm = await load.p99(seconds) if scale.SOAK else 0.0
            await http.get(f"{server}/pause")
            beside = await load.p99(seconds, attacks(site)[name])
            pause = float((await http.get(f"{server}/pause")).json())
            tries.append((calm, beside, pause))
            print(f"{name}: p99 gap {calm * 1e3:.0f} ms alone, {beside * 1e3:.0f} beside; pause {pause * 1e3:.0f} ms")
        assert not any(task.done() for task in talking), "a conversation ended in an error"
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
    assert any(good(*each) for each in tries), tries


def good(calm: float, beside: float, pause: float) -> bool:
    """Whether a try passes: tokens without a pause, as far as this run measures them."""
    in_time = calm < 1 / RATE + QUIET_S and beside - calm <= GROWTH_S
    return pause <= PAUSE_S and (in_time or not scale.SOAK)
