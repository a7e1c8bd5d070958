"""A real server on a real socket for each test that uses `start`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.responses.fakes import FakeProvider
from tests.support.responses.postgres import Postgres
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import Running, Script, Start, running
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.prompt.toolset import Remote


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """vLLM's server has xgrammar before its first request; its import takes up to half a minute on a busy machine."""
    importlib.import_module("xgrammar")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.remove()


@pytest.fixture(autouse=True)
def database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of `start`: SQLite, or an empty PostgreSQL with the parameter `postgres`."""
    if getattr(request, "param", "sqlite") == "postgres":
        server = request.getfixturevalue("postgres")
        server.sql("drop schema public cascade; create schema public")
        monkeypatch.setenv("GPTOSS_TEST_STORE", server.url)


@pytest.fixture
def start(database: None, tmp_path: Path) -> Iterator[Start]:
    """Starts servers: `start("<|channel|>final…", …, rate=…, providers=[…], config={…})`.

    `GPTOSS_TEST_STORE=postgresql://…` runs the same tests on another database.
    """
    with ExitStack() as stack:

        def begin(
            *turns: str | Callable[[Sequence[int]], Sequence[int]],
            providers: Sequence[FakeProvider] = (),
            config: Mapping[str, Any] | None = None,
            remote: Remote | None = None,
            **engine: Any,
        ) -> Running:
            script = turns[0] if callable(turns[0]) else Script(*turns)  # type: ignore[arg-type]
            store = os.environ.get("GPTOSS_TEST_STORE") or str(tmp_path / "store.sqlite")
            settings = {"store": store, **(config or {})}
            replay = ReplayEngine(script, **engine)
            return stack.enter_context(running(replay, ResponsesOptions(**settings), providers, remote))

        yield begin
