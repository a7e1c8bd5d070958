"""Files in a request: PDFs are read where they can do no harm."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.support.responses.server import MODEL, Start, create
from tests.support.responses.turns import HELLO


def pdf(*pages: str) -> bytes:
    """A PDF by hand: pypdf writes no text."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>"
        % (b" ".join(b"%d 0 R" % (4 + 2 * n) for n in range(len(pages))), len(pages)),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, text in enumerate(pages):
        shown = b"BT /F 12 Tf 9 99 Td (%s) Tj ET" % text.encode()
        font = b"/Resources<</Font<</F 3 0 R>>>>"
        objects.append(b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 300]%s/Contents %d 0 R>>" % (font, 5 + 2 * number))
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(shown), shown))
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size, start = len(objects) + 1, len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\n" % (size, table, size)
    return bytes(out + b"startxref\n%d\n%%%%EOF" % start)


def file_part(data: bytes, head: str = "data:application/pdf;base64,") -> dict[str, Any]:
    return {"type": "input_file", "filename": "a.pdf", "file_data": head + base64.b64encode(data).decode()}


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
