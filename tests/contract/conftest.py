"""The releases of vLLM whose source is here."""

from __future__ import annotations

import pytest

from tests.contract.source import Release, releases


@pytest.fixture(params=releases(), ids=lambda release: release.version)
def release(request: pytest.FixtureRequest) -> Release:
    found: Release = request.param
    return found
