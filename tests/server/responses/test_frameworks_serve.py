"""The same frameworks against a real `vllm serve`: engine, grammar, python, server and client are real.

`make test` takes one, because test_frameworks.py has all of them with the same server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.server import NAME, Server
from tests.support.responses.frameworks import NAMES, check, play
from tests.support.scale import SOAK

pytestmark = [pytest.mark.namespaces, pytest.mark.vllm, pytest.mark.serve, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", NAMES if SOAK else ["litellm"])
def test_a_framework_on_the_real_engine(served: Server, tmp_path: Path, name: str) -> None:
    scenes = play(name, served.api, NAME, tmp_path, chat=True)
    check(scenes, served.api)
    assert ("chat_streamed" in scenes) == (name == "litellm")
