"""Scores that others have published for these models, in percent, without tools."""

from __future__ import annotations

import re
from collections.abc import Mapping

GUIDE = "vLLM's gpt-oss usage guide, github.com/vllm-project/recipes/blob/main/OpenAI/GPT-OSS.md"
CARD = "OpenAI, gpt-oss-120b & gpt-oss-20b model card, arXiv:2508.10925"
EFFORTS = ("low", "medium", "high")

TABLE: Mapping[str, Mapping[str, Mapping[str, tuple[float | None, ...]]]] = {
    "120b": {
        "gpqa": {GUIDE: (65.3, 72.4, 79.4), CARD: (67.1, 73.1, 80.1)},
        "aime25": {GUIDE: (51.2, 79.6, 93.0), CARD: (50.4, 80.0, 92.5)},
    },
    "20b": {
        "gpqa": {GUIDE: (56.8, 67.5, 70.9), CARD: (None, None, 71.5)},
        "aime25": {GUIDE: (38.8, 75.0, 85.8), CARD: (None, None, 91.7)},
    },
}
"""Percent at the efforts, by size of the model, eval and source."""


def size_of(model: str) -> str | None:
    """`120b` or `20b`, where the name has one."""
    found = re.search(r"gpt-oss-(120b|20b)(?![\w])", model.lower())
    return found[1] if found else None


def published(size: str | None, name: str, effort: str) -> list[tuple[float, str]]:
    """(percent, source) of this eval at this effort; the guide first."""
    sources = TABLE.get(size or "", {}).get(name, {}) if effort in EFFORTS else {}
    rows = [(percents[EFFORTS.index(effort)], source) for source, percents in sources.items()]
    return [(percent, source) for percent, source in rows if percent is not None]
