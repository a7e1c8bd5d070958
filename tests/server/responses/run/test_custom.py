"""Custom tools: their input streams as it is written, wrapped in JSON or not, and is the same however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.responses.events import kinds, stream
from tests.support.responses.server import MODEL, Start
from vllm_gptoss.server.responses.run.events import Output
from vllm_gptoss.server.responses.run.item_writers import CustomCallWriter

PATCH = '*** Begin Patch\n+ "quoted" \\ 👩‍🚀\n*** End Patch'
TOOL = {"type": "custom", "name": "patch", "description": "Applies a patch."}
REGEX = {"type": "grammar", "syntax": "regex", "definition": r"[\s\S]+"}


def called(text: str, end: str = "<|call|>") -> str:
    return f" to=functions.patch<|channel|>commentary json<|message|>{text}{end}"


def written(pieces: list[str], *, raw: bool = False, cut: bool = False) -> tuple[list[str], str]:
    """The deltas and the whole input of a call with its text in `pieces`."""
    out = Output()
    writer = CustomCallWriter(out, "patch", None, raw=raw)
    events = [event for piece in pieces for event in writer.delta(piece)]
    events += writer.end("".join(pieces), cut=cut)
    (done,) = [event for event in events if event["type"].endswith("input.done")]
    assert out.items[0]["input"] == done["input"]
    return [event["delta"] for event in events if event["type"].endswith("input.delta")], done["input"]


@pytest.mark.parametrize("escapes", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_the_input_streams(start: Start, wrapped: bool, escapes: bool) -> None:
    text = json.dumps({"input": PATCH}, ensure_ascii=escapes) if wrapped else PATCH
    tool = TOOL if wrapped else {**TOOL, "format": REGEX}
    server = start(called(text))
    with server.http() as http:
        events = stream(http, {"model": MODEL, "input": "?", "tools": [tool]})
    assert server.engine.samplings[0].structural_tag
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == PATCH == events[-1]["response"]["output"][0]["input"]
    assert kinds(events)[-3:] == ["custom_tool_call_input.done", "output_item.done", "completed"]


@given(st.text(), st.booleans(), st.data())
def test_any_cut_of_the_json_gives_the_string(text: str, escapes: bool, data: Any) -> None:
    whole = json.dumps({"input": text}, ensure_ascii=escapes)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    deltas, value = written([whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)])
    assert "".join(deltas) == value == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("*** Begin", "*** Begin"),  # the model forgot the JSON around it
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("", ""),
        (r'{"input": "a\ud83dz"}', "a�z"),
        (r'{"input": "a\ud83d\u0041z"}', "a�Az"),
        (r'{"input": "a\udc00z"}', "a�z"),
        (r'{"input": "a\xz"}', r'a\xz"}'),  # no JSON: the client gets the raw text
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "a", "more": 1}', "a"),
    ],
)
def test_what_is_no_such_json_is_not_lost(text: str, value: str) -> None:
    assert written([text])[1] == value
    deltas, whole = written(list(text))
    assert "".join(deltas) == whole == value


def test_a_cut_call_is_incomplete_and_has_what_was_written(start: Start) -> None:
    with start(called(json.dumps({"input": "one two three four"}))).http() as http:
        body = {"model": MODEL, "input": "?", "tools": [TOOL], "max_output_tokens": 14}
        response = stream(http, body)[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["output"][0]["status"] == "incomplete"
    assert "one two three".startswith(response["output"][0]["input"])
    assert written(['{"input": "a\\u00'], cut=True) == (["a"], "a")
