"""The data: everything that a step needs exists, or training would teach steps that no test can reach."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from demo import dataset
from demo.conversation import BUILTIN, Conversation, Step, conversations, function, tools
from vllm_gptoss.tools.browser.provider import BrowserProvider
from vllm_gptoss.tools.browser.settings import BrowserConfig
from vllm_gptoss.tools.protocol import SessionOptions, ToolCall

DOCUMENTS = Path(__file__).parents[2] / "demo" / "documents"


def said(wanted: str) -> list[tuple[Conversation, Step]]:
    """Steps that call a tool of namespace `wanted`."""
    return [
        (c, s) for c in conversations() for t in c.turns for s in t.steps if s.call and s.call.split(".")[0] == wanted
    ]


def test_every_function_call_fits_the_schema_that_is_offered() -> None:
    for conversation, step in said("functions"):
        name = step.call.removeprefix("functions.")
        assert name in (conversation.tools or ())
        schema = function(name, conversation)["parameters"]
        if step.json and schema:
            jsonschema.validate(json.loads(step.text or "{}"), schema)


def test_every_namespace_call_fits_the_schema_of_its_server() -> None:
    for conversation in conversations():
        for name in conversation.namespaces:
            for found, step in said(name):
                schema = tools()["namespaces"][name][step.call.split(".")[1]]["parameters"]
                assert name in found.namespaces
                jsonschema.validate(json.loads(step.text), schema)


def ordered(value: Any, schema: dict[str, Any]) -> bool:
    """Whether objects name their properties in the schema's order, which a grammar made of the schema demands."""
    if isinstance(value, list):
        return all(ordered(item, schema.get("items", {})) for item in value)
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties", {})
    names = list(properties)
    places = [names.index(name) for name in value]
    return places == sorted(places) and all(ordered(value[n], properties[n]) for n in value)


def test_arguments_and_answers_keep_the_order_of_their_schema() -> None:
    """The grammar of calls forces it; the browser's calls may be any JSON object."""
    for conversation in conversations():
        for step in (step for turn in conversation.turns for step in turn.steps if step.call and step.text):
            space, _, name = step.call.partition(".")
            if space == "functions" and step.json:
                schema = function(name, conversation)["parameters"] or {"properties": {"input": {}}}
            elif space in tools()["namespaces"]:
                schema = tools()["namespaces"][space][name]["parameters"]
            else:
                continue
            assert ordered(json.loads(step.text), dict(schema)), f"{conversation.id}: {step.text}"
        if conversation.format and "schema" in conversation.format:
            assert ordered(json.loads(conversation.turns[0].steps[0].text), conversation.format["schema"])


def test_built_in_tools_are_called_only_where_they_are_offered() -> None:
    for name in BUILTIN:
        calls = said(name)
        assert calls
        assert all(name in conversation.builtin for conversation, _ in calls)


def test_json_answers_fit_their_format() -> None:
    with_format = [c for c in conversations() if c.format and "schema" in c.format]
    assert len(with_format) >= 3
    for conversation in with_format:
        for turn in conversation.turns:
            jsonschema.validate(json.loads(turn.steps[-1].text), conversation.format["schema"])


def test_two_conversations_that_look_alike_differ_in_what_the_prompt_shows() -> None:
    """Same user message, same setting: the model could not distinguish them."""
    seen: dict[tuple[object, ...], str] = {}
    for c in conversations():
        setting = (c.turns[0].user, c.instructions, c.effort, c.tools is None, c.history)
        assert setting not in seen, f"{c.id} and {seen[setting]}"
        seen[setting] = c.id


def test_a_dataset_holds_every_step_and_the_fallback() -> None:
    data = dataset.build(1200, seed=3)
    assert set(data["steps"].tolist()) == set(range(len(dataset.steps()) + 1))
    assert data["tokens"].max() == len(data["used"])
    assert set(data["marks"].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "cited"),
    [
        ("br-dam", {(1, 4): "87 metres high"}),
        ("br-lighthouse", {(1, 2): "designed by Ingrid Thorsen", (1, 4): "1887"}),
        ("br-search-only", {(0, 4): "glass library"}),
        ("br-external", {(0, 4): "1902", (0, 2): "12,000 glass plates"}),
        ("br-and-python", {(0, 5): "87 metres"}),
    ],
)
async def test_citations_name_the_lines_that_say_so(name: str, cited: dict[tuple[int, int], str]) -> None:
    (conversation,) = (c for c in conversations() if c.id == name)
    provider = BrowserProvider(BrowserConfig(backend="offline", documents=DOCUMENTS), environ={})
    await provider.start()
    session = await provider.open(name, SessionOptions())
    steps = conversation.turns[0].steps
    shown = []
    for step in steps:
        if step.call and step.call.startswith("browser."):
            result = await session.call(ToolCall("1", "browser", step.call.split(".")[1], step.text))
            assert result.error is None
            shown.append(result.text)
    await session.aclose()
    await provider.aclose()
    named = {(int(c), int(line)) for c, line in re.findall(r"【(\d+)†L(\d+)】", steps[-1].text)}
    assert named == set(cited)
    for (cursor, line), words in cited.items():
        assert words in re.findall(rf"^L{line}: (.*)$", shown[cursor], re.MULTILINE)[0]
