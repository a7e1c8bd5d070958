"""Folders that tests use, and the options of the python tool of the session's server."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("GPTOSS_CACHE", ROOT / ".cache"))

# Short enough to wait for twice, long enough for a plot on two busy cores.
PYTHON = {"timeout_s": 6, "interrupt_grace_s": 1, "memory_mib": 512, "max_conversations": 12}

OPEN_RESPONSES = Path(
    os.environ.get("GPTOSS_OPENRESPONSES")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-gptoss" / "openresponses"
)
"""Where tests/server/responses/openresponses.sh puts openresponses/openresponses at 92c12d96d7b6, with zod and bun."""
