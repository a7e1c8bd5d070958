"""Errors of vLLM's engine client: a shutdown is reported as one, other failures with their message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gptoss.server.responses.errors import EngineError
from vllm_gptoss.server.responses.run.engine import HAS_ENDED, NOT_BEGUN, Sampling, VllmEngine

pytestmark = pytest.mark.vllm


class Refusing:
    """`AsyncLLM` as it refuses: its exceptions are vLLM's own. `how`: what is closed, or broken."""

    model_config = SimpleNamespace(get_diff_sampling_param=dict)

    def __init__(self, how: str) -> None:
        self.how = how
        self.errored = how == "engine"

    async def generate(self, *prompt: Any, **fields: Any) -> AsyncGenerator[Any, None]:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self.how == "engine":
            raise EngineDeadError
        try:
            if self.how == "broken":
                raise RuntimeError("no such block")
            threads = ThreadPoolExecutor(1)
            threads.shutdown()
            await asyncio.get_running_loop().run_in_executor(threads, len, prompt)
        except RuntimeError as error:
            raise EngineGenerateError from error
        yield


async def refused(how: str) -> str:
    with pytest.raises(EngineError) as error:
        async for _ in VllmEngine(Refusing(how)).generate([1], Sampling(8), "resp_1"):
            pass
    return str(error.value)


@pytest.mark.parametrize(("how", "said"), [("renderer", NOT_BEGUN), ("engine", HAS_ENDED)])
async def test_a_stop_is_told_as_one_in_one_line(caplog: pytest.LogCaptureFixture, how: str, said: str) -> None:
    """`AsyncLLM.shutdown` ends the renderer's threads, then waits for the engine, then calls it dead."""
    with caplog.at_level(logging.ERROR):
        assert await refused(how) == said
    assert [(record.exc_info, said in record.getMessage()) for record in caplog.records] == [(None, True)]


async def test_what_fails_for_another_reason_says_it(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's EngineGenerateError has no message: the client read `EngineGenerateError: `."""
    assert await refused("broken") == "RuntimeError: no such block"
    assert caplog.records[-1].exc_info
