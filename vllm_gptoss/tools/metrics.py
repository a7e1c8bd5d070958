"""What every tool call goes through: arguments checked, time and number bounded, counted, and logged with its response.

A tool behind this never raises and never runs with arguments that its schema does not allow: the model reads what was
wrong and tries again.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from prometheus_client import Counter, Gauge, Histogram
from referencing import Registry
from referencing.exceptions import Unresolvable

from vllm_gptoss.tools.base import (
    Namespace,
    SessionOptions,
    Source,
    Text,
    ToolCall,
    ToolDefinition,
    ToolError,
    ToolKind,
    ToolProvider,
    ToolResult,
    ToolSession,
)

logger = logging.getLogger(__name__)

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# vLLM unregisters every collector with "vllm" in its name when it starts its own.
CALLS = Counter("gptoss_tool_calls", "Tool calls that ended, by outcome: ok, error, cancelled", ["tool", "outcome"])
ERRORS = Counter("gptoss_tool_errors", "Tool calls that ended in an error, by its type", ["tool", "type"])
SECONDS = Histogram("gptoss_tool_call_seconds", "How long tool calls ran", ["tool"], buckets=_SECONDS)
QUEUED_SECONDS = Histogram("gptoss_tool_queue_seconds", "How long tool calls waited", ["tool"], buckets=_SECONDS)
WAITING = Gauge("gptoss_tool_calls_waiting", "Tool calls waiting for a slot", ["tool"], multiprocess_mode="livesum")
RUNNING = Gauge("gptoss_tool_calls_running", "Tool calls running", ["tool"], multiprocess_mode="livesum")


@dataclass(slots=True)
class Gate:
    """How many calls of one provider run at once; the others wait in order."""

    limit: int = 64
    slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.limit)


class CountedProvider:
    """`provider`, whose sessions check, bound, count and log their calls.

    `backstop_s` ends a call that hangs outside the tool's own, shorter limit. `public` is false for a request's own
    server, whose names must not become label values.
    """

    def __init__(
        self, provider: ToolProvider, gate: Gate | None = None, *, backstop_s: float = 120.0, public: bool = True
    ) -> None:
        self.inner = provider
        self._gate = gate or Gate()
        self._backstop = backstop_s
        self._public = public

    @property
    def name(self) -> str:
        """The provider's name."""
        return self.inner.name

    @property
    def unavailable(self) -> str | None:
        """Why the tool is off, or None."""
        return self.inner.unavailable

    def namespaces(self) -> Sequence[Namespace]:
        """What the prompt may show."""
        return self.inner.namespaces()

    def needs_approval(self, tool: str) -> bool:
        """Whether the operator wants a person to agree before each call of `tool`."""
        asked = getattr(self.inner, "needs_approval", None)
        return bool(asked(tool)) if asked else False

    async def start(self) -> None:
        """Starts the tool; what the tool raises is a bug and turns it off."""
        await self.inner.start()

    async def open(self, conversation_id: str, options: SessionOptions) -> CountedSession:
        """The tool as one conversation sees it."""
        session = await self.inner.open(conversation_id, options)
        return CountedSession(session, options, self._gate, backstop_s=self._backstop, public=self._public)

    async def aclose(self) -> None:
        """Closes the tool."""
        await self.inner.aclose()


class CountedSession:
    """`session` behind the checks. Implements `tools.base.ToolSession`."""

    def __init__(
        self, session: ToolSession, options: SessionOptions, gate: Gate, *, backstop_s: float, public: bool = True
    ) -> None:
        self.inner = session
        self._options = options
        self._gate = gate
        self._backstop = backstop_s
        self._public = public
        self._turn = asyncio.Lock()

    @property
    def namespaces(self) -> Sequence[Namespace]:
        """What this conversation may call."""
        return self.inner.namespaces

    def source(self, cursor: int, line: int | None = None) -> Source | None:
        """The page behind a citation; `line` finds the result meant in a list of search results."""
        return self.inner.source(cursor, line)

    def excerpt(self, cursor: int, first: int, last: int | None = None) -> str | None:
        """The lines that a citation names, where the tool keeps them."""
        read = getattr(self.inner, "excerpt", None)
        return read(cursor, first, last) if read else None

    async def aclose(self) -> None:
        """Ends the session; a tool that fails at that is logged."""
        try:
            await self.inner.aclose()
        except Exception:
            logger.exception("tool session did not close")

    async def call(self, call: ToolCall) -> ToolResult:
        """Runs `call`. Raises only `asyncio.CancelledError`."""
        namespace, tool = self._find(call)
        label = self._label(namespace, tool, call)
        began = time.monotonic()
        try:
            result = self._refused(call, namespace, tool) or await self._run(call, label)
        except asyncio.CancelledError:
            CALLS.labels(label, "cancelled").inc()
            self._log(call, label, "cancelled", time.monotonic() - began, None)
            raise
        self._count(call, label, result, time.monotonic() - began)
        return result

    def _find(self, call: ToolCall) -> tuple[Namespace | None, ToolDefinition | None]:
        namespace = next((n for n in self.namespaces if n.name == call.namespace), None)
        tools = namespace.tools if namespace else ()
        return namespace, next((tool for tool in tools if tool.name == call.tool), None)

    def _label(self, namespace: Namespace | None, tool: ToolDefinition | None, call: ToolCall) -> str:
        if not self._public:
            return "(request)"
        if namespace is None:
            return "(unknown)"
        if tool is None:
            return namespace.name if call.tool is None else f"{namespace.name}.(unknown)"
        return f"{namespace.name}.{tool.name}"

    def _refused(self, call: ToolCall, namespace: Namespace | None, tool: ToolDefinition | None) -> ToolResult | None:
        if namespace is None:
            known = ", ".join(n.name for n in self.namespaces)
            return failed("unknown_tool", f"There is no tool namespace `{call.namespace}` here, only: {known}.")
        if namespace.kind is ToolKind.PYTHON:
            return None  # source code, whatever the recipient's suffix
        if tool is None:
            known = ", ".join(f"{namespace.name}.{t.name}" for t in namespace.tools)
            return failed("unknown_tool", f"There is no tool `{call.namespace}.{call.tool}`. There are: {known}.")
        problem = argument_problem(call.arguments, tool.parameters)
        return (
            failed("invalid_arguments", f"Invalid arguments for {namespace.name}.{tool.name}: {problem}")
            if problem
            else None
        )

    async def _run(self, call: ToolCall, label: str) -> ToolResult:
        began = time.monotonic()
        with WAITING.labels(label).track_inprogress():
            await self._turn.acquire()
            try:
                await self._gate.slots.acquire()
            except BaseException:
                self._turn.release()
                raise
        QUEUED_SECONDS.labels(label).observe(time.monotonic() - began)
        try:
            with RUNNING.labels(label).track_inprogress(), SECONDS.labels(label).time():
                return await self._bounded(call, self._backstop)
        finally:
            self._gate.slots.release()
            self._turn.release()

    async def _bounded(self, call: ToolCall, limit_s: float) -> ToolResult:
        try:
            async with asyncio.timeout(limit_s):
                return await self.inner.call(call)
        except TimeoutError:
            return failed("timeout", f"The tool did not answer within {limit_s:.0f} s and was stopped.")
        except Exception as error:
            logger.exception("tool %s failed outside its contract", call.namespace)
            return failed("tool_failed", f"The tool failed: {type(error).__name__}")

    def _count(self, call: ToolCall, label: str, result: ToolResult, seconds: float) -> None:
        outcome = "error" if result.error else "ok"
        CALLS.labels(label, outcome).inc()
        if result.error:
            ERRORS.labels(label, result.error.type).inc()
        self._log(call, label, result.error.type if result.error else "ok", seconds, result)

    def _log(self, call: ToolCall, label: str, outcome: str, seconds: float, result: ToolResult | None) -> None:
        chars = len(result.text) if result else 0
        fields = {
            "response_id": self._options.response_id,
            "call_id": call.id,
            "tool": label,
            "outcome": outcome,
            "seconds": round(seconds, 4),
            "argument_chars": len(call.arguments),
            "output_chars": chars,
        }
        # Arguments and output stay out: they are the user's.
        logger.info("tool call %s", " ".join(f"{k}={v}" for k, v in fields.items()), extra={"tool_call": fields})


def failed(kind: str, message: str) -> ToolResult:
    """A result that tells the model, and the client, what went wrong."""
    return ToolResult([Text(message)], error=ToolError(kind, message))


def argument_problem(arguments: str, schema: Mapping[str, Any] | None) -> str | None:
    """What is wrong with `arguments` by `schema`, in words that help the model to call again; None when nothing is."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        return f"they are not valid JSON ({error}). Write one JSON object."
    if not isinstance(value, dict):
        return f"they must be a JSON object, not {type(value).__name__}."
    validator = _validator(json.dumps(schema, sort_keys=True)) if schema else None
    if validator is None:
        return None
    try:
        found = best_match(validator.iter_errors(value))
    except (Unresolvable, RecursionError) as problem:
        logger.warning("a tool's schema cannot be followed, so its arguments go unchecked: %s", problem)
        return None
    if found is None:
        return None
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in found.absolute_path).lstrip(".")
    return f"{f'`{where}`: ' if where else ''}{_cut(found.message)}.{_expected(schema)}"


def _cut(message: str, limit: int = 500) -> str:
    return message if len(message) <= limit else message[:limit] + "…"


def _expected(schema: Mapping[str, Any] | None) -> str:
    properties = (schema or {}).get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return " It takes no arguments." if properties == {} else ""
    required = (schema or {}).get("required") or ()
    names = (f"{name}{'' if name in required else '?'}" for name in properties)
    return f" Expected arguments: {', '.join(names)}."


@functools.lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    """A validator that fetches nothing: the registry has no retrieval, so a remote `$ref` stays unresolved."""
    parsed = json.loads(schema)
    kind = validator_for(parsed, default=Draft202012Validator)
    try:
        kind.check_schema(parsed)
    except SchemaError as error:
        logger.warning("a tool's schema is not valid, so its arguments go unchecked: %s", error.message)
        return None
    return kind(parsed, registry=Registry())
