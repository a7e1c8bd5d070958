"""Agents that people run against us, each with a task that needs a tool; the model is a replay of given tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agents
import openai
import pytest
from agents.models.openai_responses import OpenAIResponsesWSModel

from tests.support.responses.codex import needs_codex, run_codex
from tests.support.responses.forced import THINK, codex
from tests.support.responses.server import MODEL, Running, Start, harmony, text_of_prompt

ANSWERED = "to=assistant<|channel|>commentary"
SUNNY = "<|channel|>final<|message|>It is sunny in Rome.<|return|>"


@needs_codex
@pytest.mark.slow
@pytest.mark.parametrize("websocket", [False, True])
def test_codex_runs_a_command_and_reports(start: Start, tmp_path: Path, websocket: bool) -> None:
    """Namespaces, loose schemas, sealed reasoning, `client_metadata`, unasked web search: Codex sends all of it."""
    server = start(codex)
    run_codex(server.url, MODEL, tmp_path, websocket=websocket)
    assert "Let me do it." in server.prompt(), "the reasoning comes back and is in the next prompt"


def agent_model(server: Running, kind: type[agents.OpenAIResponsesModel] = agents.OpenAIResponsesModel) -> agents.Model:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    return kind(model=MODEL, openai_client=client)


def calls(recipient: str, arguments: dict[str, Any]) -> str:
    return f" to={recipient}<|channel|>commentary json<|message|>{json.dumps(arguments)}<|call|>"


@agents.function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


async def test_agents_sdk_calls_a_function_over_a_web_socket(start: Start) -> None:
    """Over HTTP: test_clients_serve.py."""

    def script(prompt: Sequence[int]) -> list[int]:
        call = calls("functions.get_weather", {"city": "Rome"})
        return harmony(THINK + (SUNNY if ANSWERED in text_of_prompt(prompt) else call))

    server = start(script)
    agent = agents.Agent(name="a", model=agent_model(server, OpenAIResponsesWSModel), tools=[get_weather])
    result = await agents.Runner.run(agent, "What is the weather in Rome?")
    assert result.final_output == "It is sunny in Rome."
    assert "sunny in Rome" in server.prompt()
    streamed = agents.Runner.run_streamed(agent, "What is the weather in Rome?")
    kinds = {event.type async for event in streamed.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    assert streamed.final_output == "It is sunny in Rome."


async def test_agents_sdk_hands_over_to_another_agent(start: Start) -> None:
    def script(prompt: Sequence[int]) -> list[int]:
        text = text_of_prompt(prompt)
        if ANSWERED not in text:
            return harmony(THINK + calls("functions.transfer_to_weather", {}))
        return harmony(THINK + (SUNNY if "sunny in Rome" in text else calls("functions.get_weather", {"city": "Rome"})))

    server = start(script)
    model = agent_model(server)
    expert = agents.Agent(name="weather", model=model, tools=[get_weather], instructions="You know the weather.")
    desk = agents.Agent(name="desk", model=model, handoffs=[expert], instructions="Hand over.")
    result = await agents.Runner.run(desk, "What is the weather in Rome?")
    assert result.last_agent is expert
    assert result.final_output == "It is sunny in Rome."


async def test_agents_sdk_uses_a_hosted_mcp_server_and_structured_output(start: Start) -> None:
    from pydantic import BaseModel

    from tests.support.responses import fakes

    class Weather(BaseModel):
        city: str
        sunny: bool

    final = '<|channel|>final<|message|>{"city":"Rome","sunny":true}<|return|>'

    def script(prompt: Sequence[int]) -> list[int]:
        call = calls("weather.lookup", {"city": "Rome"})
        return harmony(THINK + (final if ANSWERED in text_of_prompt(prompt) else call))

    server = start(script, providers=[fakes.mcp()])
    tool = agents.HostedMCPTool(tool_config={"type": "mcp", "server_label": "weather", "require_approval": "never"})
    agent = agents.Agent(name="a", model=agent_model(server), tools=[tool], output_type=Weather)
    result = await agents.Runner.run(agent, "What is the weather in Rome?")
    assert result.final_output == Weather(city="Rome", sunny=True)
