"""The ledger names forbidden outcomes of a request and accepts losses that were reported to the client."""

from __future__ import annotations

import dataclasses

import pytest

from tests.e2e.ledger import NOT_THERE, Asked, Ledger, faults

TOLD = Asked("turn_1", 1, 1, "streamed", "c1t1a0", answered=200, last="response.completed", status="completed")


def found(**fields: object) -> list[str]:
    return faults(Ledger([dataclasses.replace(TOLD, **fields)]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cut": True, "last": "response.output_text.delta", "status": NOT_THERE},
        {"last": "response.failed", "status": NOT_THERE},
        {"style": "background", "last": "", "status": "failed", "error": "server_error: its server has ended"},
        {"style": "background", "answered": 503, "last": "", "status": NOT_THERE},
    ],
)
def test_what_a_client_is_told_is_no_fault(fields: dict[str, object]) -> None:
    assert not found(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"status": ""}, "no known outcome"),
        ({"last": "response.output_text.delta"}, "without a last event"),
        ({"status": NOT_THERE}, "reported as completed, and is not"),
        ({"style": "whole", "last": "", "status": NOT_THERE}, "answered, and is not stored"),
        ({"style": "background", "last": "", "status": NOT_THERE}, "taken in the background, and is not there"),
        ({"style": "followed", "status": "failed", "last": "response.failed"}, "failed without a reason"),
    ],
)
def test_what_must_not_happen_is_named(fields: dict[str, object], said: str) -> None:
    assert any(said in fault for fault in found(**fields))
