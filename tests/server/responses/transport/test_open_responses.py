"""Every event at /v1/openresponses is one of the Open Responses specification's, by its own openapi.json."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from httpx_sse import connect_sse

from tests.support.places import OPEN_RESPONSES
from tests.support.responses.events import read
from tests.support.responses.scenes import SCENES, Stage, providers, request
from tests.support.responses.server import Start

SPECIFICATION = OPEN_RESPONSES / "public" / "openapi" / "openapi.json"
pytestmark = pytest.mark.skipif(
    not SPECIFICATION.exists(), reason=f"no Open Responses specification under {OPEN_RESPONSES}; docs/testing.md"
)

HOSTED = ("code_interpreter_call", "compaction", "custom_tool_call", "mcp_", "web_search_call")
"""Tools of OpenAI's that the specification lacks: beginnings of their events after `response.`, and of their items."""


def own(response: dict[str, Any]) -> dict[str, Any]:
    """A response without tools that the specification does not know, and without their items."""
    tools = [tool for tool in response["tools"] if tool["type"] == "function"]
    return {**response, "tools": tools, "output": [i for i in response["output"] if not hosted(i["type"])]}


def hosted(kind: str) -> bool:
    return kind.startswith(HOSTED) and kind != "compaction"


def as_specified(event: dict[str, Any]) -> dict[str, Any] | None:
    """The event as the specification can have it; None where it is about a tool of OpenAI's."""
    if event["type"].removeprefix("response.").startswith(HOSTED) or hosted(event.get("item", {}).get("type", "")):
        return None
    return {**event, "response": own(event["response"])} if "response" in event else event


def test_every_event_is_the_specifications(start: Start) -> None:
    components = json.loads(SPECIFICATION.read_text())["components"]
    schemas = {
        schema["properties"]["type"]["enum"][0]: {"$ref": f"#/components/schemas/{name}", "components": components}
        for name, schema in components["schemas"].items()
        if name.endswith("StreamingEvent")
    }
    server = start(Stage(), providers=providers())
    seen = set()
    with server.http() as http:
        for name in SCENES:
            body = {**request(name), "stream": True}
            with connect_sse(http, "POST", "/openresponses/responses", json=body) as source:
                events = read(source.iter_sse())
            for event in filter(None, map(as_specified, events)):
                jsonschema.validate(event, schemas[event["type"]], jsonschema.Draft202012Validator)
                seen.add(event["type"])
    never = {kind for kind in schemas if kind == "error" or kind.startswith("response.refusal.")}
    assert seen == schemas.keys() - never, "error is an HTTP error or `response.failed` here; gpt-oss refuses in words"
