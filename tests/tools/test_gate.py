"""A call that should not run does not, the model reads why, and everything is counted."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from vllm_gptoss.tools.arguments import argument_problem, judged
from vllm_gptoss.tools.gate import GatedSession
from vllm_gptoss.tools.protocol import (
    Namespace,
    SessionOptions,
    Text,
    ToolCall,
    ToolDefinition,
    ToolError,
    ToolKind,
    ToolResult,
    ToolSession,
)
from vllm_gptoss.tools.slots import Slots

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}


class Session(ToolSession):
    """A tool under the test's control."""

    def __init__(self, run: Callable[[ToolCall], Awaitable[ToolResult]], kind: ToolKind = ToolKind.MCP) -> None:
        self.run = run
        self.called: list[ToolCall] = []
        self.kind = kind

    @property
    def namespaces(self) -> Sequence[Namespace]:
        return [Namespace("weather", self.kind, "", [ToolDefinition("forecast", "", SCHEMA)])]

    async def call(self, call: ToolCall) -> ToolResult:
        self.called.append(call)
        return await self.run(call)

    async def aclose(self) -> None:
        raise OSError("broken on close")


async def sunny(call: ToolCall) -> ToolResult:
    return ToolResult([Text("sunny")])


def counted(
    session: Session, *, gate: Slots | None = None, backstop_s: float = 10.0, public: bool = True
) -> ToolSession:
    options = SessionOptions(response_id="resp_1")
    return GatedSession(session, options, gate or Slots(), limit_s=backstop_s, public=public)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"city": "Rome"', "not valid JSON"),
        ('["Rome"]', "must be a JSON object, not list"),
        ("{}", "'city' is a required property. Expected arguments: city, days?."),
        ('{"city": 3}', "`city`: 3 is not of type 'string'"),
        ('{"city": "Rome", "days": 0}', "`days`: 0 is less than the minimum of 1"),
        ('{"city": "Rome", "unit": "C"}', "'unit' was unexpected"),
        ("", "'city' is a required property"),
    ],
)
async def test_wrong_arguments_are_explained_and_not_run(arguments: str, said: str) -> None:
    session = Session(sunny)
    result = await counted(session).call(ToolCall("1", "weather", "forecast", arguments))
    assert result.error.type == "invalid_arguments"
    assert said in result.text
    assert session.called == []


@pytest.mark.parametrize(("namespace", "tool"), [("weather", "forcast"), ("wether", "forecast"), ("weather", None)])
async def test_unknown_tools_are_answered_with_the_known_ones(namespace: str, tool: str | None) -> None:
    session = Session(sunny)
    result = await counted(session).call(ToolCall("1", namespace, tool, "{}"))
    assert result.error.type == "unknown_tool"
    assert "weather" in result.text
    assert session.called == []


async def test_python_source_is_not_parsed_as_json() -> None:
    session = Session(sunny, ToolKind.PYTHON)
    assert (await counted(session).call(ToolCall("1", "weather", None, "print(1)"))).error is None


async def test_calls_are_counted_by_tool_and_outcome_and_logged_with_the_response(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def failing(call: ToolCall) -> ToolResult:
        return ToolResult([Text("no")], error=ToolError("tool_failed", "no"))

    name = "weather.forecast"
    before = metric("gptoss_tool_calls_total", tool=name, outcome="ok")
    errors = metric("gptoss_tool_errors_total", tool=name, type="tool_failed")
    ran = metric("gptoss_tool_call_seconds_count", tool=name)
    with caplog.at_level(logging.INFO, "vllm_gptoss.tools.gate"):
        await counted(Session(sunny)).call(ToolCall("call_7", "weather", "forecast", '{"city": "Private"}'))
        await counted(Session(failing)).call(ToolCall("call_8", "weather", "forecast", '{"city": "Rome"}'))
    assert metric("gptoss_tool_calls_total", tool=name, outcome="ok") == before + 1
    assert metric("gptoss_tool_errors_total", tool=name, type="tool_failed") == errors + 1
    assert metric("gptoss_tool_call_seconds_count", tool=name) == ran + 2
    assert "response_id=resp_1 call_id=call_7 tool=weather.forecast outcome=ok" in caplog.text
    assert caplog.records[1].tool_call["outcome"] == "tool_failed"
    assert "Private" not in caplog.text
    assert "sunny" not in caplog.text


async def test_a_requests_own_server_makes_no_metric_names() -> None:
    await counted(Session(sunny), public=False).call(ToolCall("1", "weather", "forecast", '{"city": "Rome"}'))
    await counted(Session(sunny)).call(ToolCall("1", "made-up-by-model", "x", "{}"))
    names = {
        s.labels.get("tool", "") for m in REGISTRY.collect() if m.name.startswith("gptoss_tool") for s in m.samples
    }
    assert "(request)" in names
    assert not any("made-up" in name for name in names)


async def test_a_tool_that_raises_or_hangs_costs_one_call() -> None:
    async def raising(call: ToolCall) -> ToolResult:
        raise RuntimeError("secret detail")

    async def hanging(call: ToolCall) -> ToolResult:
        await asyncio.Event().wait()
        raise AssertionError

    call = ToolCall("1", "weather", "forecast", '{"city": "Rome"}')
    raised = await counted(Session(raising)).call(call)
    assert raised.error == ToolError("tool_failed", "The tool failed: RuntimeError")
    hung = await counted(Session(hanging), backstop_s=0.05).call(call)
    assert hung.error.type == "timeout"
    await counted(Session(sunny)).aclose()  # a session that fails on close is logged, not raised


async def test_calls_of_one_session_run_one_at_a_time_and_a_gate_bounds_all() -> None:
    running = 0
    most = 0

    async def measured(call: ToolCall) -> ToolResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running -= 1
        return ToolResult([Text("ok")])

    call = ToolCall("1", "weather", "forecast", '{"city": "Rome"}')
    one = counted(Session(measured))
    await asyncio.gather(*(one.call(call) for _ in range(5)))
    assert most == 1
    gate = Slots(3)
    many = [counted(Session(measured), gate=gate) for _ in range(10)]
    await asyncio.gather(*(session.call(call) for session in many))
    assert most == 3
    assert metric("gptoss_tool_calls_running", tool="weather.forecast") == 0
    assert metric("gptoss_tool_calls_waiting", tool="weather.forecast") == 0


class Held:
    """Calls that run until they are let go; who has how many."""

    def __init__(self, limit: int) -> None:
        self.slots = Slots(limit)
        self.running: Counter[str] = Counter()
        self.order: list[str] = []
        self._gates: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))
        self.tasks: list[asyncio.Task[ToolResult]] = []

    async def start(self, owner: str, number: int = 1) -> None:
        async def held(call: ToolCall) -> ToolResult:
            self.running[owner] += 1
            self.order.append(owner)
            await self._gates[owner].acquire()
            self.running[owner] -= 1
            return ToolResult([Text("ok")])

        call = ToolCall("1", "weather", "forecast", '{"city": "Rome"}')
        for _ in range(number):
            session = GatedSession(Session(held), SessionOptions(owner=owner), self.slots, limit_s=60.0)
            self.tasks.append(asyncio.create_task(session.call(call)))
        await settled()

    async def end(self, owner: str, number: int = 1) -> None:
        for _ in range(number):
            self._gates[owner].release()
        await settled()


async def settled() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def test_a_caller_alone_has_all_slots_but_a_few() -> None:
    for limit, alone in ((1, 1), (2, 1), (16, 15), (64, 60)):
        held = Held(limit)
        await held.start("greedy", 100)
        assert held.running["greedy"] == alone
        await held.end("greedy", 100)
        await asyncio.gather(*held.tasks)


async def test_without_keys_no_slot_is_kept_back() -> None:
    held = Held(16)
    await held.start("", 100)
    assert held.running[""] == 16
    await held.end("", 100)
    await asyncio.gather(*held.tasks)


async def test_a_second_caller_waits_for_no_call_of_the_first() -> None:
    held = Held(16)
    await held.start("greedy", 100)
    await held.start("modest", 3)
    assert held.running == {"greedy": 15, "modest": 1}


async def test_slots_that_become_free_go_to_who_has_fewest() -> None:
    held = Held(16)
    await held.start("greedy", 100)
    await held.start("modest", 100)
    await held.end("greedy", 8)
    assert held.running.total() == 15
    assert abs(held.running["greedy"] - held.running["modest"]) <= 1
    await held.start("third", 1)
    assert held.running["third"] == 1
    for owner, number in (("greedy", 100), ("modest", 100), ("third", 1)):
        await held.end(owner, number)
    results = await asyncio.gather(*held.tasks)
    assert all(result.error is None for result in results)
    await held.start("fourth", 15)
    assert held.running["fourth"] == 15, "every slot came back"


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["returns", "is cancelled"])
@pytest.mark.parametrize("turns", range(6))
async def test_a_slot_that_comes_while_its_wait_is_cancelled_is_not_lost(turns: int, is_cancelled: bool) -> None:
    """turns: of the event loop between the end of the call that has the slot and the cancellation of one that waits."""
    held = Held(2)
    await held.start("a", 3)
    running, *_, waiting = held.tasks
    running.cancel() if is_cancelled else held._gates["a"].release()
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await held.end("a", 5)
    await asyncio.gather(*held.tasks, return_exceptions=True)
    await held.start("b", 2)
    assert held.running["b"] == 1
    await held.start("c")
    assert held.running["c"] == 1


async def test_schemas_that_are_broken_or_point_elsewhere_do_not_stop_calls() -> None:
    assert await argument_problem('{"a": 1}', {"type": "nonsense"}) is None
    nested = {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "object", "required": ["x"]}}}
    assert "'x' is a required property" in str(await argument_problem('{"a": {}}', nested))


def test_a_reference_to_another_host_is_not_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        connections: list[object] = []

        def accept() -> None:
            connection, _ = listener.accept()
            connections.append(connection)
            connection.close()

        accepting = pool.submit(accept)
        reference = f"http://127.0.0.1:{listener.getsockname()[1]}/schema"
        found = judged(b'{"a": 1}', json.dumps({"properties": {"a": {"$ref": reference}}}))
        listener.shutdown(socket.SHUT_RDWR)
        assert isinstance(accepting.exception(10), OSError)
    assert connections == []
    assert (found.problem, "cannot be followed" in found.note) == ("", True)


@given(st.text(max_size=50))
def test_no_argument_text_can_raise(arguments: str) -> None:
    problem = asyncio.run(argument_problem(arguments, SCHEMA))
    assert isinstance(problem, str), "no object comes of such text"
