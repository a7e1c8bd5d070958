"""The releases of vLLM with their source in this checkout."""

from __future__ import annotations

import pytest

from tests.contract.source import Release, releases


@pytest.fixture(params=releases(), ids=lambda release: release.version)
def release(request: pytest.FixtureRequest) -> Release:
    found: Release = request.param
    return found
