"""Scores that others have published for these models, in percent, without tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

GUIDE = "vLLM's gpt-oss usage guide, github.com/vllm-project/recipes/blob/main/OpenAI/GPT-OSS.md"
CARD = "OpenAI, gpt-oss-120b & gpt-oss-20b model card, arXiv:2508.10925"


@dataclass(frozen=True, slots=True)
class Published:
    """One score and its source."""

    percent: float
    source: str


def _row(name: str, source: str, *percents: float | None) -> dict[tuple[str, str], tuple[Published, ...]]:
    efforts = ("low", "medium", "high")
    return {
        (name, effort): (Published(value, source),)
        for effort, value in zip(efforts, percents, strict=True)
        if value is not None
    }


def _both(*rows: Mapping[tuple[str, str], tuple[Published, ...]]) -> dict[tuple[str, str], tuple[Published, ...]]:
    found: dict[tuple[str, str], tuple[Published, ...]] = {}
    for row in rows:
        for key, value in row.items():
            found[key] = (*found.get(key, ()), *value)
    return found


TABLE: Mapping[str, Mapping[tuple[str, str], tuple[Published, ...]]] = {
    "120b": _both(
        _row("gpqa", GUIDE, 65.3, 72.4, 79.4),
        _row("aime25", GUIDE, 51.2, 79.6, 93.0),
        _row("gpqa", CARD, 67.1, 73.1, 80.1),
        _row("aime25", CARD, 50.4, 80.0, 92.5),
    ),
    "20b": _both(
        _row("gpqa", GUIDE, 56.8, 67.5, 70.9),
        _row("aime25", GUIDE, 38.8, 75.0, 85.8),
        _row("gpqa", CARD, None, None, 71.5),
        _row("aime25", CARD, None, None, 91.7),
    ),
}


def size_of(model: str) -> str | None:
    """`120b` or `20b`, where the name has one."""
    found = re.search(r"gpt-oss-(120b|20b)(?![\w])", model.lower())
    return found[1] if found else None


def published(size: str | None, name: str, effort: str) -> tuple[Published, ...]:
    """What was published of this eval at this effort; the guide first."""
    return TABLE.get(size or "", {}).get((name, effort), ())
