"""The same agents against a real `vllm serve`: engine, server and client are real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import agents
import openai
import pytest

from demo.server import NAME, Server, serve
from tests.support import warm_vllm
from tests.support.responses.claude import needs_claude, run_claude
from tests.support.responses.codex import needs_codex, run_codex

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def coding(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its own server: the small model has not learned their prompts, so a logits processor forces the tokens."""
    log = tmp_path_factory.mktemp("coding") / "serve.log"
    arguments = ["--logits-processors", "tests.support.responses.forced:ForcedAgents", "--max-num-seqs", "4"]
    environment = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(log.parent)}
    with serve(model_dir, log, arguments, environment, popen=warm_vllm.popen) as server:
        yield server
    assert "Failed to advance" not in log.read_text(), "the grammar of the offered tools must accept an agent's call"


@needs_codex
@pytest.mark.slow
def test_codex_completes_a_task_on_the_real_engine(coding: Server, tmp_path: Path) -> None:
    """Over SSE; test_clients.py also has it over a WebSocket, with the same endpoint."""
    run_codex(coding.url, NAME, tmp_path / "sse", websocket=False)


@needs_claude
@pytest.mark.slow
def test_claude_code_completes_a_task_on_the_real_engine(coding: Server, tmp_path: Path) -> None:
    """Twelve tools, thinking, system messages in the middle: three calls, each made after the result before it."""
    assert run_claude(coding.url, NAME, tmp_path) == "I wrote hello."
    files = {path.name: path.read_text() for path in (tmp_path / "work").iterdir()}
    assert files == {"hello.txt": "goodbye\n", "copy.txt": "goodbye\n"}


@agents.function_tool
def get_weather(city: str) -> str:
    """Get the current weather for a location

    Args:
        city: The city
    """
    return f"sunny in {city}"


@pytest.mark.parametrize("streams", [False, True])
async def test_agents_sdk_calls_a_function_of_the_small_model(served: Server, streams: bool) -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=served.api, api_key="x", max_retries=0)
    model = agents.OpenAIResponsesModel(model=NAME, openai_client=client)
    agent = agents.Agent(name="a", model=model, tools=[get_weather])
    question = "What is the weather in Paris?"
    if streams:
        result = agents.Runner.run_streamed(agent, question)
        kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
        assert kinds.count("response.completed") == 2
        assert "response.function_call_arguments.done" in kinds
    else:
        result = await agents.Runner.run(agent, question)
    assert result.final_output == "It is sunny in Paris."
    (output,) = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert output == "sunny in Paris"
