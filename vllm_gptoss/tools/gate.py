"""The gate of every tool call: it is counted and logged, its arguments are checked, its time and number bounded.

A tool behind this never raises and never runs with arguments that its schema does not allow: the model reads what was
wrong and tries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

import prometheus_client
from prometheus_client import Gauge, Histogram

from vllm_gptoss.tools.arguments import argument_problem
from vllm_gptoss.tools.protocol import (
    Namespace,
    SessionOptions,
    Source,
    ToolCall,
    ToolDefinition,
    ToolKind,
    ToolProvider,
    ToolResult,
    ToolSession,
    call_within,
    failed,
)
from vllm_gptoss.tools.slots import Slots

logger = logging.getLogger(__name__)

_SPARE_S = 30.0
"""How much longer than the tool's own limits a call may take before it counts as hung."""

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# vLLM unregisters every collector with "vllm" in its name when it starts its own.
CALLS = prometheus_client.Counter(
    "gptoss_tool_calls", "Tool calls that ended, by outcome: ok, error, cancelled", ["tool", "outcome"]
)
ERRORS = prometheus_client.Counter(
    "gptoss_tool_errors", "Tool calls that ended in an error, by its type", ["tool", "type"]
)
SECONDS = Histogram("gptoss_tool_call_seconds", "How long tool calls ran", ["tool"], buckets=_SECONDS)
QUEUED_SECONDS = Histogram("gptoss_tool_queue_seconds", "How long tool calls waited", ["tool"], buckets=_SECONDS)
WAITING = Gauge("gptoss_tool_calls_waiting", "Tool calls waiting for a slot", ["tool"], multiprocess_mode="livesum")
RUNNING = Gauge("gptoss_tool_calls_running", "Tool calls running", ["tool"], multiprocess_mode="livesum")


def gated(inner: ToolProvider, slots: Slots | None = None, *, public: bool = True) -> ToolProvider:
    """`inner`, with every call passing the gate.

    `public` is false for a server that a request names: its names must not become label values.
    """
    return cast(ToolProvider, _GatedProvider(inner, slots or Slots(), public))


class _GatedProvider:
    """Opens sessions behind the gate, and passes on every other member of `inner`."""

    def __init__(self, inner: ToolProvider, slots: Slots, public: bool) -> None:
        self.inner = inner
        self._slots = slots
        self._public = public

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    async def open(self, conversation_id: str, options: SessionOptions) -> ToolSession:
        session = await self.inner.open(conversation_id, options)
        limit_s = self.inner.longest_call_s + _SPARE_S
        return GatedSession(session, options, self._slots, limit_s=limit_s, public=self._public)


class GatedSession(ToolSession):
    """`inner` behind the gate. A call that hangs outside the tool's own, shorter limit ends after `limit_s`."""

    def __init__(
        self, inner: ToolSession, options: SessionOptions, slots: Slots, *, limit_s: float, public: bool = True
    ) -> None:
        self.inner = inner
        self._options = options
        self._slots = slots
        self._limit_s = limit_s
        self._public = public
        self._turn = asyncio.Lock()

    @property
    def namespaces(self) -> Sequence[Namespace]:
        return self.inner.namespaces

    @property
    def container_id(self) -> str:
        return self.inner.container_id

    def refusal(self) -> ToolResult | None:
        return self.inner.refusal()

    def source(self, cursor: int, line: int | None = None) -> Source | None:
        return self.inner.source(cursor, line)

    async def aclose(self) -> None:
        """Ends the session; a tool that fails at that is logged."""
        try:
            await self.inner.aclose()
        except Exception:
            logger.exception("tool session did not close")

    async def call(self, call: ToolCall) -> ToolResult:
        """Runs the call if its tool is there and its schema allows the arguments; counts and logs it in any case."""
        tool = _label(self, call, self._public)
        began = time.monotonic()
        try:
            result = await self._refused(call) or self.inner.refusal() or await self._run(call, tool)
        except asyncio.CancelledError:
            CALLS.labels(tool, "cancelled").inc()
            self._log(call, tool, "cancelled", time.monotonic() - began, 0)
            raise
        CALLS.labels(tool, "error" if result.error else "ok").inc()
        if result.error:
            ERRORS.labels(tool, result.error.type).inc()
        outcome = result.error.type if result.error else "ok"
        self._log(call, tool, outcome, time.monotonic() - began, len(result.text))
        return result

    async def _run(self, call: ToolCall, tool: str) -> ToolResult:
        """One call of the session at a time, and no more of the provider's than it has slots."""
        began = time.monotonic()
        async with AsyncExitStack() as held:
            with WAITING.labels(tool).track_inprogress():
                await held.enter_async_context(self._turn)
                await held.enter_async_context(self._slots.one(self._options.owner))
            QUEUED_SECONDS.labels(tool).observe(time.monotonic() - began)
            with RUNNING.labels(tool).track_inprogress(), SECONDS.labels(tool).time():
                return await call_within(self.inner, call, self._limit_s)

    async def _refused(self, call: ToolCall) -> ToolResult | None:
        namespace, tool = _find(self, call)
        if namespace is None:
            known = ", ".join(n.name for n in self.namespaces)
            return failed("unknown_tool", f"There is no tool namespace `{call.namespace}` here, only: {known}.")
        if namespace.kind is ToolKind.PYTHON:
            return None  # source code, for any suffix of the recipient
        if tool is None:
            known = ", ".join(f"{namespace.name}.{t.name}" for t in namespace.tools)
            return failed("unknown_tool", f"There is no tool `{call.namespace}.{call.tool}`. There are: {known}.")
        problem = await argument_problem(call.arguments, tool.parameters)
        if problem is None:
            return None
        return failed("invalid_arguments", f"Invalid arguments for {namespace.name}.{tool.name}: {problem}")

    def _log(self, call: ToolCall, tool: str, outcome: str, seconds: float, output_chars: int) -> None:
        fields = {
            "response_id": self._options.response_id,
            "call_id": call.id,
            "tool": tool,
            "outcome": outcome,
            "seconds": round(seconds, 4),
            "argument_chars": len(call.arguments),
            "output_chars": output_chars,
        }
        # Arguments and output stay out: they are the user's.
        logger.info("tool call %s", " ".join(f"{k}={v}" for k, v in fields.items()), extra={"tool_call": fields})


def _label(session: ToolSession, call: ToolCall, public: bool) -> str:
    """The metric's label of `call`: only names of configured tools, so the labels are bounded."""
    if not public:
        return "(request)"
    namespace, tool = _find(session, call)
    if namespace is None:
        return "(unknown)"
    if tool is None:
        return namespace.name if call.tool is None else f"{namespace.name}.(unknown)"
    return f"{namespace.name}.{tool.name}"


def _find(session: ToolSession, call: ToolCall) -> tuple[Namespace | None, ToolDefinition | None]:
    namespace = next((n for n in session.namespaces if n.name == call.namespace), None)
    tools = namespace.tools if namespace else ()
    return namespace, next((tool for tool in tools if tool.name == call.tool), None)
