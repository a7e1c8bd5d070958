"""Agents that people run against us, each with a task that needs a tool; skipped where they are not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.responses.conftest import MODEL, Start, harmony, text_of_prompt

ANSWERED = "to=assistant<|channel|>commentary"
THINK = "<|channel|>analysis<|message|>Let me do it.<|end|><|start|>assistant"


@pytest.mark.skipif(shutil.which("codex") is None, reason="no codex CLI on PATH (npm install -g @openai/codex)")
@pytest.mark.slow
def test_codex_runs_a_command_and_reports(start: Start, tmp_path: Path) -> None:
    """Namespaces, loose schemas, sealed reasoning, `client_metadata`, unasked web search: Codex sends all of it."""
    call = ' to=functions.exec_command<|channel|>commentary json<|message|>{"cmd":"echo hello > hello.txt"}<|call|>'
    done = "<|channel|>final<|message|>I wrote hello.<|return|>"

    def script(prompt: Sequence[int]) -> list[int]:
        return harmony(THINK + (done if ANSWERED in text_of_prompt(prompt) else call))

    server = start(script)
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    provider = f'model_providers.gptoss={{name="gptoss",base_url="{server.url}/v1",wire_api="responses"}}'
    command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command += ["-c", provider, "-c", "model_provider=gptoss", "-m", MODEL, "Write hello into hello.txt"]
    environment = {**os.environ, "CODEX_HOME": str(home)}
    ran = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert (work / "hello.txt").read_text() == "hello\n"
    assert "I wrote hello." in ran.stdout


async def test_agents_sdk_calls_a_function_and_goes_on(start: Start) -> None:
    agents = pytest.importorskip("agents", reason="no openai-agents")
    import openai

    call = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Rome"}<|call|>'
    done = "<|channel|>final<|message|>It is sunny in Rome.<|return|>"

    def script(prompt: Sequence[int]) -> list[int]:
        return harmony(THINK + (done if ANSWERED in text_of_prompt(prompt) else call))

    def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"sunny in {city}"

    server = start(script)
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x")
    model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(get_weather)])
    result = await agents.Runner.run(agent, "What is the weather in Rome?")
    assert result.final_output == "It is sunny in Rome."
    streamed = agents.Runner.run_streamed(agent, "What is the weather in Rome?")
    kinds = {event.type async for event in streamed.stream_events()}
    assert "raw_response_event" in kinds
    assert streamed.final_output == "It is sunny in Rome."
