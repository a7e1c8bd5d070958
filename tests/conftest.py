"""What all tests share: one real `vllm serve` of the small model per session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.server import Server, serve

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("GPTOSS_CACHE", ROOT / ".cache"))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small gpt-oss, expanded once and kept between runs."""
    from demo.expand import model_dir

    return model_dir(CACHE)


@pytest.fixture(scope="session")
def served(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the plugin and its own tools, started as a user would start it: `.url`, `.api`, `.log`."""
    home = tmp_path_factory.mktemp("served")
    environment = {"XDG_STATE_HOME": str(home), "GPTOSS_BROWSER_DOCUMENTS": str(ROOT / "demo" / "documents")}
    with serve(model_dir, home / "serve.log", ["--tool-server", "demo"], environment) as server:
        yield server
