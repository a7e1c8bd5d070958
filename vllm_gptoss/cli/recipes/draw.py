"""A plan for the terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_gptoss.cli.recipes.plan import Plan
from vllm_gptoss.engine.choose import devices

COLOURS = ("cyan", "yellow", "magenta", "blue", "green")
WIDTH = 60


def console() -> Console:
    """As wide as the terminal; in a pipe, lines are not broken."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=1000)


def text(plan: Plan, title: str) -> RenderableType:
    """A bar of one GPU's memory, its parts with how each is known, and what that means."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for part, colour in zip(plan.parts, COLOURS, strict=True):
        table.add_row(Text("■", style=colour), part.name, f"{part.gib:8.1f} GiB", part.known)
    table.add_row("", plan.load_peak.name, f"{plan.load_peak.gib:8.1f} GiB", plan.load_peak.known)
    head = f"{title}: one of {devices.label(plan.device)}, {plan.budget:.1f} of {plan.total:.1f} GiB"
    return Group(Text(head, style="bold"), _bar(plan), table, *(Text(line) for line in _said(plan)))


def _bar(plan: Plan) -> Text:
    bar = Text()
    scale = WIDTH / max(plan.total, sum(part.gib for part in plan.parts))
    for part, colour in zip(plan.parts, COLOURS, strict=True):
        bar.append("█" * round(scale * part.gib), style=colour)
    bar.append("░" * max(0, WIDTH - len(bar)), style="dim")
    return bar


def _said(plan: Plan) -> list[str]:
    """Sentences below the bar."""
    if not plan.fits:
        return [f"does not fit: {plan.why}", *(f"-> {each}" for each in plan.advice)]
    replicas = f" on each of {plan.replicas} replicas" if plan.replicas > 1 else ""
    at_once = f"{plan.requests:.1f} requests of {plan.length:,} tokens at once{replicas}"
    lines = [f"{at_once}, {plan.tokens:,} tokens of cache"]
    if plan.measured is not None:
        start = plan.measured
        lines.append(
            f"measured: {start.kv_gib:.1f} GiB of KV cache with {start.requests} requests of {start.length} tokens and"
            f" {start.tokens:,} batched tokens ({start.results})"
        )
    return [*lines, *(f"-> {each}" for each in plan.advice)]


def data(plan: Plan, title: str) -> dict[str, Any]:
    """Plain data of the same."""
    return {
        "title": title,
        "device": devices.label(plan.device),
        "gib": {"total": plan.total, "budget": plan.budget, "least_kv": plan.least},
        "parts": [dataclasses.asdict(part) for part in (*plan.parts, plan.load_peak)],
        "fits": plan.fits,
        "why": plan.why,
        "advice": list(plan.advice),
        "requests": plan.requests,
        "length": plan.length,
        "tokens": plan.tokens,
        "measured": None if plan.measured is None else dataclasses.asdict(plan.measured),
    }
