"""openai-node reads every event, as its types have it: `tsc --strict` checks what it read against them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from demo.server import NAME, Server
from tests.support.responses import npm
from tests.support.responses.events import unparsed
from tests.support.responses.scenes import SCENES, TERMINALS, Stage, providers, request
from tests.support.responses.server import Start

SOURCE = Path(__file__).parent / "js"
needs_clients = pytest.mark.skipif(npm.missing() is not None, reason=str(npm.missing()))
OURS = {"lines", "quote", "presence_penalty", "frequency_penalty", "store"}
EXTRA = {
    "response.function_call_arguments.done": {"name"},
    "response.output_text.delta": {"bytes"},
    "response.output_text.done": {"bytes"},
    "custom_tool_call": {"status"},
}
"""As in events.py: fields of the plugin, everywhere and in objects of a type. OpenAI's API sends the status too."""

CITY_WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}

NULLS = ("usage", "user")
"""Null where OpenAI's API sends null too, and openai-node's types have no null."""


@needs_clients
def test_openai_node_reads_every_event_as_typed(start: Start, tmp_path: Path) -> None:
    server = start(Stage(), providers=providers())
    seen = play(server.url, tmp_path, {name: request(name) for name in SCENES})
    for name, scene in seen.items():
        assert scene["events"][-1]["type"] == TERMINALS.get(name, "response.completed")


@needs_clients
@pytest.mark.vllm
@pytest.mark.serve
def test_openai_node_reads_tools_reasoning_and_citations_of_the_real_engine(served: Server, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "search": {"input": "How high is the Velmora dam?", "tools": [{"type": "web_search"}]},
        "function": {"input": "What is the weather in Paris?", "tools": [CITY_WEATHER]},
    }
    seen = play(served.url, tmp_path, {name: {"model": NAME, **body} for name, body in asked.items()})
    *before, message = seen["search"]["final"]["output"]
    assert {item["type"] for item in before} == {"reasoning", "web_search_call"}
    assert message["content"][0]["annotations"][0]["type"] == "url_citation"
    call = seen["function"]["final"]["output"][-1]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})


def play(url: str, folder: Path, requests: dict[str, Any]) -> dict[str, Any]:
    """The result of openai-node for each request, checked against the stored response and the client's types."""
    (folder / "node_modules").symlink_to(npm.PACKAGES)
    (folder / "client.mjs").symlink_to(SOURCE / "client.mjs")
    (folder / "requests.json").write_text(json.dumps(requests))
    command = ["node", "--preserve-symlinks", "--preserve-symlinks-main", "client.mjs", f"{url}/v1", "requests.json"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen: dict[str, Any] = json.loads(ran.stdout)
    assert set(seen) == set(requests)
    for name, scene in seen.items():
        assert unparsed(scene["final"]["output"]) == scene["stored"]["output"], name
        assert set(scene["heard"]) == {event["type"] for event in scene["events"]}, name
    type_check(folder, [event for scene in seen.values() for event in scene["events"]])
    return seen


def type_check(folder: Path, events: list[dict[str, Any]]) -> None:
    literals = ",\n".join(json.dumps(known(event, OURS)) for event in events)
    head = 'import type { ResponseStreamEvent } from "openai/resources/responses/responses";\n'
    (folder / "events.ts").write_text(f"{head}export const events: ResponseStreamEvent[] = [\n{literals}\n];\n")
    options = ["--strict", "--noEmit", "--skipLibCheck", "--target", "es2022", "--module", "nodenext", "--types", ""]
    checked = subprocess.run(
        [npm.PACKAGES / ".bin" / "tsc", *options, "events.ts"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert checked.returncode == 0, checked.stdout[:5000]


def known(value: Any, dropped: set[str]) -> Any:
    """Without what openai-node's types lack: our fields, and null where OpenAI's API sends it all the same."""
    if isinstance(value, list):
        return [known(entry, dropped) for entry in value]
    if not isinstance(value, dict):
        return value
    dropped = dropped | EXTRA.get(str(value.get("type")), set())
    kept = {
        key: entry for key, entry in value.items() if key not in dropped and (key not in NULLS or entry is not None)
    }
    if value.get("object") == "response":
        kept["output_text"] = ""  # the client adds it
    return {key: known(entry, dropped) for key, entry in kept.items()}
