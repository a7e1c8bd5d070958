"""The choices on the operator's page: asked of the engine once, which may be slow, dead or without our extension."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gptoss import startup_line
from vllm_gptoss.server.responses.run import engine
from vllm_gptoss.server.responses.run.engine import VllmEngine

pytestmark = pytest.mark.vllm

CHOICES = {"layers": "upstream, because no GPU was found"}


class Reporting:
    """`AsyncLLM` with workers that answer in turn: a dictionary, an exception, or None for no answer."""

    model_config = SimpleNamespace(get_diff_sampling_param=dict)

    def __init__(self, answers: Sequence[Any], extension: str = startup_line.EXTENSION) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=extension))
        self.answers = list(answers)
        self.methods: list[str] = []

    async def collective_rpc(self, method: str) -> list[dict[str, str]]:
        self.methods.append(method)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return [answer, {"layers": "a second worker's"}]


async def test_the_first_worker_is_asked_once() -> None:
    client = Reporting([CHOICES])
    reader = VllmEngine(client)
    assert [await reader.choices(), await reader.choices()] == [CHOICES, CHOICES]
    assert client.methods == ["gptoss_choices"]
    assert hasattr(startup_line.WorkerChoices, "gptoss_choices")


@pytest.mark.parametrize("failure", [None, RuntimeError("EngineDead")], ids=["slow", "dead"])
async def test_an_engine_that_does_not_answer_is_logged_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception | None
) -> None:
    monkeypatch.setattr(engine, "CHOICES_S", 0.05)
    reader = VllmEngine(Reporting([failure, CHOICES]))
    with caplog.at_level(logging.WARNING):
        assert await reader.choices() == {}
    assert ["did not report its choices" in record.getMessage() for record in caplog.records] == [True]
    assert await reader.choices() == CHOICES


@pytest.mark.parametrize("extension", ["", "team.Extension"])
async def test_workers_without_the_method_are_not_asked(extension: str) -> None:
    client = Reporting([CHOICES], extension)
    assert await VllmEngine(client).choices() == {}
    assert client.methods == []


def test_a_worker_reports_the_decisions_of_the_last_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_line, "_notes", {})
    monkeypatch.setattr(startup_line, "_logged", {})
    reporting = startup_line.WorkerChoices()
    assert reporting.gptoss_choices() == {}
    for decision in ("first", "second"):
        startup_line.note("layers", decision)
        startup_line.say()
        assert reporting.gptoss_choices() == {"layers": decision}
