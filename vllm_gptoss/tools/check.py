"""`vllm-gptoss tools check`: starts every configured tool, makes one harmless call of each, and prints what came."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_gptoss.tools.config import ToolConfigError
from vllm_gptoss.tools.protocol import (
    Namespace,
    SessionOptions,
    ToolCall,
    ToolError,
    ToolKind,
    ToolProvider,
    ToolResult,
)
from vllm_gptoss.tools.server import ToolServer


@dataclass(frozen=True, slots=True)
class CheckRow:
    name: str
    kind: str
    tools: str
    call: str
    seconds: float
    problem: str | None
    note: str | None = None  # what does not work and is no failure, because it is not configured
    isolation: str = ""  # how the python tool holds programs, and what that means


async def check_tools(spec: str) -> list[CheckRow]:
    """Starts the tools of `spec` and calls each once. Raises ToolConfigError: `spec` is wrong."""
    async with ToolServer.from_spec(spec) as server:
        return list(await asyncio.gather(*(_row(provider) for provider in server.providers)))


async def _row(provider: ToolProvider) -> CheckRow:
    namespace = next(iter(provider.namespaces()), None)
    if provider.unavailable or namespace is None:
        return CheckRow(provider.name, "?", "", "", 0.0, provider.unavailable or "it offers nothing")
    tools = ", ".join(tool.name for tool in namespace.tools) or namespace.name
    began = time.monotonic()
    try:
        what, result = await _call(provider, namespace)
    except Exception as error:
        return CheckRow(namespace.name, namespace.kind, tools, "open", 0.0, f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - began
    problem = f"{result.error.type}: {result.error.message}" if result and result.error else None
    note, isolation = provider.note, provider.isolation
    return CheckRow(namespace.name, namespace.kind, tools, what, seconds, None if note else problem, note, isolation)


async def _call(provider: ToolProvider, namespace: Namespace) -> tuple[str, ToolResult | None]:
    call = _harmless(provider, namespace)
    if call is None:
        return "listed (no tool is marked read-only and free of arguments; name one under `check`)", None
    session = await provider.open("", SessionOptions(response_id="tools-check"))
    try:
        result = await session.call(call)
    finally:
        await session.aclose()
    shown = f"{call.tool or call.namespace} {call.arguments}"
    if namespace.kind is ToolKind.PYTHON and not result.error and "42" not in result.text:
        wrong = ToolError("tool_failed", f"expected 42, got {result.text[:80]!r}")
        return shown, ToolResult(result.content, error=wrong)
    return shown, result


def _harmless(provider: ToolProvider, namespace: Namespace) -> ToolCall | None:
    if namespace.kind is ToolKind.PYTHON:
        return ToolCall("check", namespace.name, None, "print(6 * 7)")
    if namespace.kind is ToolKind.BROWSER:
        return ToolCall("check", namespace.name, "search", json.dumps({"query": "test", "topn": 1}))
    if trial := provider.trial():
        return ToolCall("check", namespace.name, *trial)
    for tool in namespace.tools:
        if tool.annotations.get("readOnlyHint") and not (tool.parameters or {}).get("required"):
            return ToolCall("check", namespace.name, tool.name, "{}")
    return None


def table(rows: list[CheckRow]) -> Table:
    view = Table("tool", "kind", "offers", "called", "seconds", "result", title="Tools")
    for row in rows:
        result = f"[red]{_plain(row.problem)}[/red]" if row.problem else "[green]ok[/green]"
        if row.note and not row.problem:
            result = f"[yellow]{_plain(row.note)}[/yellow]"
        tier = row.isolation.partition(":")[0]
        kind = f"{row.kind} ({tier})" if tier else row.kind
        view.add_row(row.name, kind, row.tools, _plain(row.call), f"{row.seconds:.2f}", result)
    return view


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def check(
    spec: Annotated[str, typer.Argument(help="what you would give to --tool-server")] = "demo",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines instead of a table")] = False,
) -> None:
    """Start every configured tool, call each once, and print the results. Exits with 1 if one failed, 2: bad spec."""
    try:
        rows = asyncio.run(check_tools(spec))
    except ToolConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        for row in rows:
            typer.echo(json.dumps({name: getattr(row, name) for name in CheckRow.__slots__}))
    else:
        Console().print(table(rows))
    if any(row.problem for row in rows):
        raise typer.Exit(1)
