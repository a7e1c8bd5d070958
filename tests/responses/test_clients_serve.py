"""The same agents against a real `vllm serve`: engine, server and client are real."""

from __future__ import annotations

from pathlib import Path

import agents
import openai
import pytest

from demo.server import NAME, Server, serve
from tests.support.responses.codex import needs_codex, run_codex

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@needs_codex
@pytest.mark.slow
def test_codex_completes_tasks_on_the_real_engine(model_dir: Path, tmp_path: Path) -> None:
    """Its own server, as the small model has not learned Codex's prompt: a logits processor forces the tokens."""
    log = tmp_path / "serve.log"
    arguments = ["--logits-processors", "tests.support.responses.forced:ForcedCodex", "--max-num-seqs", "4"]
    environment = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    with serve(model_dir, log, arguments, environment) as server:
        run_codex(server.url, NAME, tmp_path / "sse", websocket=False)
        run_codex(server.url, NAME, tmp_path / "websocket", websocket=True)
    assert "Failed to advance" not in log.read_text(), "the grammar of the offered tools must accept Codex's call"


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
