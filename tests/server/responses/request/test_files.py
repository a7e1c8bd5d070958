"""Files in a request: PDFs are read where they can do no harm."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.support.responses.pdf import file_part, pdf
from tests.support.responses.server import MODEL, Start, create
from tests.support.responses.turns import HELLO


@pytest.mark.parametrize("head", ["", "data:application/pdf;base64,"])
def test_a_pdf_is_read_page_by_page(start: Start, head: str) -> None:
    server = start(HELLO)
    part = file_part(pdf("The first page.", "And the second."), head)
    result = [{"type": "function_call_output", "call_id": "c", "output": [part]}]
    call = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}
    with server.http() as http:
        for body in ([{"role": "user", "content": [part]}], [{"role": "user", "content": "hi"}, call, *result]):
            made = http.post("/responses", json={"input": body}).raise_for_status().json()
            assert "[file: a.pdf]" in server.prompt()
            assert re.search(r"The first page\..*And the second\.", server.prompt(), re.DOTALL)
        http.get(f"/responses/{made['id']}/input_items").raise_for_status()
    with connect(f"{server.url.replace('http', 'ws')}/v1/responses") as socket:
        message = {"type": "response.create", "model": MODEL, "input": [{"role": "user", "content": [part]}]}
        socket.send(json.dumps(message))
        while json.loads(socket.recv(timeout=30))["type"] != "response.completed":
            pass
    assert "And the second." in server.prompt()


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        ([file_part(b"%PDF-1.7 nothing")], 0),
        ([file_part(pdf("a")[:-300])], 0),
        ([{**file_part(b""), "file_data": "data:application/pdf;base64,\x80"}], 0),
        ([{**file_part(b""), "file_data": "data:application/pdf,%PDF-"}], 0),
        ([file_part(pdf("a"))] * 9, 8),
    ],
    ids=["broken", "cut", "no base64", "no base64 said", "many"],
)
def test_a_pdf_that_cannot_be_read_is_refused_by_name(start: Start, parts: list[Any], where: int) -> None:
    server = start(HELLO)
    with server.http() as http:
        answer = http.post("/responses", json={"input": [{"role": "user", "content": parts}]})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == f"input[0].content[{where}].file_data"
        assert create(http, input="hi")["status"] == "completed"


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
SHOWN = "[image, image/png, 8 bytes: not shown, because this model reads text only]"


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
def test_a_tools_image_does_not_end_the_conversation(start: Start, kind: str) -> None:
    """Results like Codex's `view_image`, which the history of every later turn contains, and unreadable PDFs."""
    server = start(HELLO)
    made = {"call_id": "c", "name": "f", **({"arguments": "{}"} if kind == "function_call" else {"input": ""})}
    broken = [file_part(b"%PDF-1.7 nothing"), *[file_part(pdf("a"))] * 8, {"type": "input_file", "file_id": "f"}]
    output = [{"type": "input_text", "text": "p.png"}, IMAGE, {**IMAGE, "detail": "high"}, *broken]
    items = [
        {"role": "user", "content": "hi"},
        {"type": kind, **made},
        {"type": f"{kind}_output", "call_id": "c", "output": output},
    ]
    with server.http() as http:
        first = create(http, input=items)
        assert server.prompt().count(SHOWN) == 2
        assert server.prompt().count("[file, ") == 3, "the broken one, the ninth, and the one that is not there"
        create(http, input="And now?", previous_response_id=first["id"])
        assert server.prompt().count(SHOWN) == 2
        assert create(http, input=[*items, {"role": "user", "content": "More"}])["status"] == "completed"
        output[0] = {"type": "input_text"}
        assert http.post("/responses", json={"input": items}).json()["error"]["param"] == "input[2].output[0].text"


@pytest.mark.parametrize("kind", ["text", "output_text"])
def test_a_tools_text_is_read_whatever_its_type(start: Start, kind: str) -> None:
    """MCP's content blocks are of type `text`, and gateways send `output_text`; OpenAI's type is `input_text`."""
    server = start(HELLO)
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": kind, "text": "sunny"}]},
    ]
    with server.http() as http:
        create(http, input=items)
        assert "<|message|>sunny<|end|>" in server.prompt()
        items[2]["output"] = [{"type": kind, "text": None}]
        create(http, input=items)
        assert f"[content of type {kind}: not shown" in server.prompt()
