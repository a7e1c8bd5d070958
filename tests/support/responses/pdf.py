"""PDFs made by hand, as parts of a request."""

from __future__ import annotations

import base64
from typing import Any


def pdf(*pages: str, title: str = "") -> bytes:
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
    objects.append(b"<</Title(%s)>>" % title.encode())
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size, start = len(objects) + 1, len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R" % (size, table, size)
    out += b"/Info %d 0 R>>\n" % len(objects)
    return bytes(out + b"startxref\n%d\n%%%%EOF" % start)


def file_part(data: bytes, head: str = "data:application/pdf;base64,") -> dict[str, Any]:
    return {"type": "input_file", "filename": "a.pdf", "file_data": head + base64.b64encode(data).decode()}
