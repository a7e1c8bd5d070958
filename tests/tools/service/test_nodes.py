"""The python tool on nodes: every server finds the same one, callers are separate, limits are reported."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from starlette.responses import Response

from tests.support.machine import without_namespaces
from tests.support.notebooks import started
from tests.support.servers import running
from tests.support.waiting import until
from vllm_gptoss.tools import serve
from vllm_gptoss.tools.config import ToolConfigError, parse_spec
from vllm_gptoss.tools.gate import gated
from vllm_gptoss.tools.protocol import File, SessionOptions, ToolCall, ToolResult
from vllm_gptoss.tools.python import PythonProvider
from vllm_gptoss.tools.python.container import _UNSEEN
from vllm_gptoss.tools.serve import http_app
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions
from vllm_gptoss.tools.service.access import VARIABLE, load_keys
from vllm_gptoss.tools.service.nodes import ServiceProvider, ranked
from vllm_gptoss.tools.service.settings import ServiceConfig
from vllm_gptoss.tools.service.wire import asked


def at_a_node(test: Any) -> Any:
    here = pytest.mark.skipif(without_namespaces() is not None, reason=str(without_namespaces()))
    return here(pytest.mark.asyncio(loop_scope="module")(test))


ALICE, BOB = "alice's key which is long", "bob's key which is as long"


@dataclass
class Node:
    url: str
    python: PythonProvider


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node() -> AsyncIterator[Node]:
    limits = {"caller_containers": 2, "caller_files_mib": 1}
    python = await started(warm=0, preload=[], timeout_s=20, memory_mib=512, **limits)
    keys = load_keys(None, {VARIABLE: f"{ALICE},{BOB}"})
    async with running(http_app([gated(python)], "127.0.0.1", keys)) as url:
        yield Node(url, python)
    await python.aclose()


@asynccontextmanager
async def service(key: str, *urls: str) -> AsyncIterator[ServiceProvider]:
    provider = ServiceProvider(ServiceConfig(nodes=list(urls), connect_timeout_s=30), {"GPTOSS_TOOLS_KEY": key})
    async with aclosing(provider):
        await provider.start()
        yield provider


async def run(
    provider: ServiceProvider, code: str, conversation: str = "c", past: tuple[Mapping[str, Any], ...] = ()
) -> ToolResult:
    async with aclosing(await provider.open(conversation, SessionOptions(past=past))) as session:
        return await session.call(ToolCall("call", "python", None, code))


def after(result: ToolResult) -> tuple[Mapping[str, Any], ...]:
    return ({"recipient": "python", "recall": result.recall},)


def test_a_node_that_is_lost_moves_only_its_own_conversations() -> None:
    nodes = [f"http://tools-{n}:8001" for n in range(4)]
    names = [f"conversation {n}" for n in range(400)]
    first = {name: ranked(nodes, name)[0] for name in names}
    assert min(Counter(first.values()).values()) > 60, "all have their share"
    assert {name: ranked(nodes[::-1], name)[0] for name in names} == first, "in any order"
    left = {name: ranked(nodes[1:], name)[0] for name in names}
    assert all(left[name] == first[name] for name in names if first[name] != nodes[0])


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("service:tools-1:8001", "write http://host:port"),
        ("service:http://a:1,service:http://a:1/", "named twice"),
        ("service:", "write http://host:port"),
    ],
)
def test_an_address_that_is_none_is_refused(spec: str, problem: str) -> None:
    with pytest.raises(ToolConfigError, match=problem):
        parse_spec(spec, {})


def test_the_service_takes_the_place_of_the_servers_own_python() -> None:
    plan = parse_spec("demo,service:http://a:1,service:https://b:2", {})
    assert plan.service.nodes == ["http://a:1", "https://b:2"]
    server = ToolServer.from_spec("demo,service:http://a:1", ToolServerOptions(environ={}))
    assert sorted(p.name for p in server.providers) == ["browser", "python"]
    assert isinstance(next(p.inner for p in server.providers if p.name == "python"), ServiceProvider)


@at_a_node
async def test_two_callers_reach_nothing_of_each_other(node: Node) -> None:
    async with service(ALICE, node.url) as alice, service(BOB, node.url) as bob:
        mine = await run(alice, "secret = 1; open('/mnt/data/f.txt', 'w').write('alice')")
        (file,) = [part for part in mine.content if isinstance(part, File)]
        assert mine.container_id
        # Even one who knows what the conversation and its container are called.
        theirs = await run(bob, "print('secret' in globals())", past=after(mine))
        assert theirs.text.endswith("False\n")
        assert theirs.container_id != mine.container_id
        assert await bob.list_files(mine.container_id) == []
        assert await bob.read_file(mine.container_id, file.file_id) is None
        found = await alice.read_file(mine.container_id, file.file_id)
        assert (found.data, found.filename, found.media_type) == (b"alice", "f.txt", "text/plain")
        assert (await run(alice, "print(secret)", past=after(mine))).text == "1\n"


@at_a_node
async def test_a_callers_limits_are_told_and_cost_no_other_caller_anything(node: Node) -> None:
    async with service(ALICE, node.url) as alice, service(BOB, node.url) as bob:
        endless = [asyncio.create_task(run(alice, "import time; time.sleep(600)", f"busy {n}")) for n in range(2)]
        await until(lambda: sum(c.lock.locked() and c.alive for c in node.python._containers.values()) >= 2)
        refused = await run(alice, "print(1)", "one more")
        assert refused.error.type == "resource_limit"
        assert "this caller may run 2 python sessions at once, and all of them are busy" in refused.text
        assert (await run(bob, "print(1)", "one more")).text == "1\n"
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        async with asyncio.timeout(60):
            while (again := await run(alice, "print(1)", "busy 0")).error:
                await asyncio.sleep(0.2)
        assert "The previous python call was cancelled" in again.text, "who leaves leaves nothing running"
        large = await run(alice, "open('/mnt/data/large', 'wb').write(bytes(2 << 20)); print('ran')", "one more")
        assert large.error is None
        assert "large cannot be downloaded: this caller may keep 1048576 bytes" in large.text


@at_a_node
async def test_a_notebook_that_is_not_the_one_of_earlier_calls_says_so(node: Node) -> None:
    """A node that was out of reach comes back with variables of before."""
    async with service(ALICE, node.url) as alice:
        await run(alice, "x = 'old'", "split")
        elsewhere = ({"recipient": "python", "recall": {"container": "cntr_" + "0" * 32, "node": "http://gone:1"}},)
        nowhere = {"recipient": "python", "output": "No node of the tools service can be reached."}
        result = await run(alice, "print(x)", "split", past=(*elsewhere, nowhere))
        assert "not the one that earlier calls ran in" in result.text
        again = await run(alice, "print(x)", "split", past=after(result))
        assert again.text == "old\n"


PRINT = ToolCall("call", "python", None, "print(1)")


@at_a_node
async def test_a_container_is_known_before_its_node_has_made_it(node: Node) -> None:
    """Some clients drop a call without a container in its first event."""
    async with service(ALICE, node.url) as alice:
        sessions = [await alice.open(name, SessionOptions()) for name in ("known 1", "known 2")]
        known = [session.container_id for session in sessions]
        assert len({*known, ""}) == 3
        assert [(await session.call(PRINT)).container_id for session in sessions] == known
        assert [(await session.call(PRINT)).container_id for session in sessions] == known
        assert [session.container_id for session in sessions] == known


@at_a_node
async def test_no_caller_gets_a_container_that_is_there(node: Node) -> None:
    """Even with the seed, which only its node receives."""
    async with service(ALICE, node.url) as alice, service(BOB, node.url) as bob:
        mine = await alice.open("claimed", SessionOptions())
        seed = mine._said.seed
        assert seed not in mine.container_id
        made = await mine.call(ToolCall("call", "python", None, "open('/mnt/data/f.txt', 'w').write('alice')"))
        theirs = await bob.open("claimed", SessionOptions())
        theirs._said = theirs._said.model_copy(update={"seed": seed})
        assert theirs.container_id == made.container_id
        result = await theirs.call(PRINT)
        assert result.container_id not in (None, made.container_id)
        assert theirs.container_id == result.container_id
        assert await bob.list_files(str(made.container_id)) == []


@at_a_node
async def test_servers_and_nodes_of_two_versions_work_together(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"seed": "", "call": None}
    async with service(ALICE, node.url) as alice:
        older = await alice.open("older server", SessionOptions(knows_all=True))
        older._said = older._said.model_copy(update=nothing)
        assert older.container_id == ""
        made = await older.call(PRINT)
        assert made.container_id
        monkeypatch.setattr(serve, "asked", lambda meta: (said := asked(meta)) and said.model_copy(update=nothing))
        session = await alice.open("older node", SessionOptions(knows_all=True))
        announced = session.container_id
        results = [await session.call(PRINT) for _ in range(2)]
        assert [result.text for result in results] == ["1\n", "1\n"]
        assert {result.container_id for result in results} == {session.container_id}
        assert session.container_id not in ("", announced)


@at_a_node
async def test_a_turn_that_is_asked_again_is_told_what_the_lost_attempt_ran(node: Node) -> None:
    """A server died behind the call: its node has run it, and the store does not know."""
    async with service(ALICE, node.url) as alice:
        for number, past in enumerate(((), after(await run(alice, "x = 0", "again")))):
            lost = await run(alice, "x = 1", "again" if past else "first", past)
            assert lost.text == "(no output)", number
            other = await alice.open("again" if past else "first", SessionOptions(past=past, knows_all=True))
            told = [(await other.call(ToolCall("call", "python", None, "print(x)"))).text for _ in range(2)]
            assert told == [f"{_UNSEEN}\n1\n", "1\n"], number


@at_a_node
async def test_a_wrong_key_is_said_at_the_start(node: Node) -> None:
    async with service("a key of another service", node.url) as nobody:
        assert "401" in (nobody.unavailable or "")
        assert nobody.namespaces() == ()


@at_a_node
async def test_a_node_that_is_not_there_costs_no_call(node: Node) -> None:
    async with service(ALICE, "http://127.0.0.1:1", node.url) as alice:
        assert alice.unavailable is None
        results = await asyncio.gather(*(run(alice, "print(1)", "there") for _ in range(2)))
        assert {result.text for result in results} == {"1\n"}


@at_a_node
async def test_a_call_that_a_node_does_not_take_goes_to_the_next_one_and_says_what_is_lost(node: Node) -> None:
    """Simulates a proxy that has lost its node."""
    gone = False
    app = http_app([gated(node.python)], "127.0.0.1", load_keys(None, {VARIABLE: ALICE}))

    async def sometimes(scope: Any, receive: Any, send: Any) -> None:
        if gone and scope["type"] == "http":
            await Response(status_code=503)(scope, receive, send)
        else:
            await app(scope, receive, send)

    other = await started(warm=0, preload=[], timeout_s=20, memory_mib=512)
    keys = load_keys(None, {VARIABLE: ALICE})
    async with (
        running(sometimes) as first,
        running(http_app([gated(other)], "127.0.0.1", keys)) as second,
        service(ALICE, first, second) as alice,
    ):
        name = next(name for name in map(str, range(100)) if ranked([first, second], name)[0] == first)
        before = await run(alice, "x = 1", name)
        assert before.recall["node"] == first
        gone = True
        moved = await run(alice, "print('x' in globals())", name, past=after(before))
        assert "This python session is new" in moved.text
        assert moved.text.endswith("False\n")
        assert moved.recall["node"] == second
        gone = False
        await until(lambda: not any(each.unavailable for _, each in alice.in_order(name, "")))  # it is known to be back
        stays = await run(alice, "print('x' in globals())", name, past=after(moved))
        assert stays.text == "False\n"
    await other.aclose()
