"""Counts and logs what the parser had to repair."""

from __future__ import annotations

import logging

from prometheus_client import Counter

from vllm_gptoss.harmony.events import Repaired

logger = logging.getLogger(__name__)

REPAIRS = Counter(
    "gptoss_harmony_repairs", "Malformed Harmony output that was read anyway, by kind of repair.", ["kind"]
)

_logged: set[str] = set()


def record(repaired: Repaired) -> None:
    """Counts `repaired`; the first of its kind in this process is logged."""
    REPAIRS.labels(repaired.kind.value).inc()
    if repaired.kind not in _logged:
        _logged.add(repaired.kind)
        logger.warning(
            "The model's output was malformed and read anyway: %s (%r). Further repairs of this kind are only counted,"
            " in gptoss_harmony_repairs_total.",
            repaired.kind.value,
            repaired.detail,
        )
