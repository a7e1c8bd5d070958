"""The share of a long test that runs: a sample in `make test`, all of it in `make soak`."""

from __future__ import annotations

import os

SOAK = os.environ.get("GPTOSS_SOAK", "0") not in ("", "0")


def count(whole: int, sample: int) -> int:
    return whole if SOAK else sample
