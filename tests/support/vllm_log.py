"""Lines of vLLM's logger, which do not propagate to pytest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def heard(caplog: pytest.LogCaptureFixture, level: int) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    with caplog.at_level(level, logger="vllm"):
        yield caplog
    logger.removeHandler(caplog.handler)


def lines(said: pytest.LogCaptureFixture) -> list[str]:
    """Each record once: a second handler may have caught it too."""
    return list({id(record): record.getMessage() for record in said.records}.values())
