"""Both ways of asking the session's server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from demo.server import Server
from tests.e2e.asking import Asker


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def ask(served: Server, request: pytest.FixtureRequest) -> Iterator[Asker]:
    with httpx.Client(base_url=served.api, timeout=180) as http:
        yield Asker(http, request.param)
