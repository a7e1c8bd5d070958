"""A thousand conversations with tools through one server: nothing of them is left, and its memory stays flat."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from demo.server import NAME
from tests.e2e.asking import PYTHON, SEARCH, calls, logs, mcp
from tests.e2e.process import Held, settled
from tests.support import scale
from tests.support.example_server import PNG  # noqa: F401
from tests.support.mcp_servers import McpServers
from tests.support.waiting import alive

pytestmark = pytest.mark.namespaces

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
WARM = 2
CONVERSATIONS = 12
POOLED = 8
"""Descriptors that connection pools may hold or not; one left by every hundredth conversation would be as many."""


def call(recipient: str, **arguments: Any) -> str:
    header = f" to={recipient}<|channel|>commentary <|constrain|>json<|message|>"
    return f"{header}{json.dumps(arguments)}<|call|>"


def code(text: str) -> str:
    return f" to=python<|channel|>analysis code<|message|>{text}<|call|>"


def answer(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


def both(first: str, second: str) -> str:
    """Two calls in one generation: the first does not end it."""
    return first.removesuffix("<|call|>") + "<|end|><|start|>assistant" + second


@dataclass
class Client:
    """Talks to the replay server: every conversation of one kind makes the same calls."""

    http: httpx.AsyncClient
    done: Counter[str]

    async def ask(self, turns: list[str], tools: list[dict[str, Any]], stream: bool, **fields: Any) -> dict[str, Any]:
        body = {"model": NAME, "input": json.dumps(turns), "tools": tools, "stream": stream, **fields}
        body["include"] = ["code_interpreter_call.outputs"]
        answered = await self.http.post("/responses", json=body)
        assert answered.status_code == 200, answered.text
        if not stream:
            response: dict[str, Any] = answered.json()
        else:
            response = json.loads(answered.text.split("data: ")[-2])["response"]
        assert response["status"] == "completed", response["error"]
        self.done.update(f"{item['type']} {item['status']}" for item in calls(response))
        return response

    async def python(self, number: int) -> None:
        """State over two responses, a file, and now and then the kernel's death."""
        end = "import os; os._exit(1)" if number % 50 == 0 else "1 / 0"
        stream = number % 20 == 0
        turns = [code(f"x = {number}; open('/mnt/data/x', 'w').write('1')"), code(end), answer("set in x")]
        first = await self.ask(turns, [PYTHON], stream=stream)
        turns = [code("print('x' in globals())"), answer("read")]
        second = await self.ask(turns, [PYTHON], stream=stream, previous_response_id=first["id"])
        told = logs(calls(second)[-1])
        if "closed to make room" in told:  # the longest unused goes, and under load that may be this one
            self.done["made room"] += 1
        else:
            assert told == f"{number % 50 != 0}\n"

    async def browser(self, number: int) -> None:
        search = call("browser.search", query="Velmora dam height")
        turns = [search, call("browser.open", id=0, cursor=0), call("browser.find", pattern="metres high")]
        response = await self.ask([*turns, answer("87 metres【1†L4】")], [SEARCH], stream=number % 2 == 0)
        (note,) = response["output"][-1]["content"][0]["annotations"]
        assert note["lines"] == [4, 4]

    async def servers(self, number: int) -> None:
        """All three transports, one call with wrong arguments, two calls in one generation."""
        adds = both(call("calc.add", a=number, b=1), call("calc.add", a="one"))
        turns = [adds, call("weather.get_forecast", city="Lisbon", days=1), call("echo.repeat", text=str(number))]
        tools = [mcp(label) for label in ("calc", "weather", "echo")]
        response = await self.ask([*turns, answer("done")], tools, stream=number % 2 == 0)
        outputs = [item["output"] for item in calls(response)]
        assert outputs == [str(number + 1), None, "No rain in Lisbon for 1 day.", str(number)]

    async def mixed(self, number: int) -> None:
        """Two tools in one generation, and a third call that `max_tool_calls` leaves out."""
        turns = [both(code("40 + 2"), call("browser.search", query="glass")), code("1"), answer("42")]
        response = await self.ask(turns, [PYTHON, SEARCH], stream=True, max_tool_calls=2)
        assert [item["type"] for item in calls(response)] == ["code_interpreter_call", "web_search_call"]

    async def leaving(self, number: int) -> None:
        """A client that goes away while its tool runs."""
        del number
        body = {"model": NAME, "input": json.dumps([code("import time; time.sleep(60)")]), "tools": [PYTHON]}
        with contextlib.suppress(httpx.ReadTimeout):
            await self.http.post("/responses", json=body, timeout=0.5)
        self.done["left"] += 1

    async def converse(self, number: int) -> None:
        if number % 100 == 99:
            await self.leaving(number)
        elif number % 10 == 0:
            await self.python(number)
        elif number % 10 == 5:
            await self.mixed(number)
        elif number % 2:
            await self.browser(number)
        else:
            await self.servers(number)

    async def all(self, numbers: range, at_once: int = 6) -> None:
        queue = iter(numbers)

        async def worker() -> None:
            for number in queue:
                await self.converse(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker())


@dataclass(frozen=True)
class Replay:
    process: subprocess.Popen[str]
    api: str
    temporary: Path


@pytest.fixture
def replay(mcp_servers: McpServers, tmp_path: Path) -> Iterator[Replay]:
    """A separate server with a separate folder for temporary files."""
    python = {"preload": [], "warm": WARM, "max_conversations": CONVERSATIONS, "file_store_mib": 1, "file_keep_s": 1.0}
    tools, temporary = tmp_path / "tools.yaml", tmp_path / "temporary"
    browser = {"documents": str(ROOT / "demo" / "documents"), "max_conversations": 50}
    tools.write_text(yaml.safe_dump({"python": python, "browser": browser, "mcp": mcp_servers.config}))
    temporary.mkdir()
    command = [sys.executable, "-m", "tests.e2e.replay_server", str(tools), str(tmp_path / "store.sqlite")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Replay(process, f"http://127.0.0.1:{int(process.stdout.readline())}/v1", temporary)
        finally:
            process.kill()


def full(now: Held) -> bool:
    """Two of the fork server, and two for each live kernel."""
    return len(now.sandboxed) == 2 + 2 * (CONVERSATIONS + WARM)


def running(pids: Iterable[int], patience: float = 10) -> list[int]:
    """Children of a dead server that do not exit."""
    began = time.monotonic()
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() - began < patience:
        time.sleep(0.05)
    return left


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_thousand_conversations_leave_nothing_behind(replay: Replay) -> None:
    """The first 200 fill every cache that has a limit; after them nothing grows. 300 are the sample."""
    pid, seen, done = replay.process.pid, [], Counter[str]()
    count = scale.count(1000, 300)
    for first in range(0, count, 100):
        async with httpx.AsyncClient(base_url=replay.api, timeout=120) as http:
            await Client(http, done).all(range(first, first + 100))
        seen.append(await asyncio.to_thread(settled, pid, full))
        print(f"after {first + 100}: {seen[-1].summary}")
    before, files = seen[1], set(replay.temporary.rglob("*"))
    after = await asyncio.to_thread(
        settled, pid, lambda now: full(now) and now.descriptors < before.descriptors + POOLED
    )
    print(f"in the end: {after.summary}; {dict(done)}")
    assert done["left"] == count / 100
    assert done["made room"] < 10
    assert done["mcp_call failed"] == done["mcp_call completed"] / 3 > 0.3 * count
    assert full(after)
    assert after.others == before.others, "one MCP server over stdio, all the time"
    assert after.descriptors < before.descriptors + POOLED
    assert after.sockets < before.sockets + POOLED
    assert after.resident - before.resident < 16 * MIB  # 20 kB left of each conversation would show
    assert not [path for path in files if "gptoss" in path.name]
    replay.process.terminate()
    assert await asyncio.to_thread(replay.process.wait, 30) in (0, -signal.SIGTERM)
    assert set(replay.temporary.rglob("*")) <= files
    assert not await asyncio.to_thread(running, after.children)
