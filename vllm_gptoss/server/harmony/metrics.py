"""Counts and logs what the parser had to repair; counts schemas that are not enforced."""

from __future__ import annotations

import logging

from prometheus_client import Counter

from vllm_gptoss.server.harmony.events import Repaired

logger = logging.getLogger(__name__)

REPAIRS = Counter(
    "gptoss_harmony_repairs", "Malformed Harmony output that was read anyway, by kind of repair.", ["kind"]
)

UNENFORCED = Counter(
    "gptoss_unenforced_schemas", "Uses of a schema that no grammar holds, by the keyword that prevents it.", ["keyword"]
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
