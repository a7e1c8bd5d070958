"""The text of a document that a client sent, read in a confined worker. A separate interface, independent of tools."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Final

from vllm_gptoss.tools.confined import Limit
from vllm_gptoss.tools.missing import reason
from vllm_gptoss.tools.protocol import CALLER

_MISSING = ""
try:
    from vllm_gptoss.tools.browser.markup import PageError
    from vllm_gptoss.tools.browser.reader import Reader
except ImportError as error:
    _MISSING = f"this server cannot read PDF files: {reason(error)}"
    logging.getLogger(__name__).warning("Requests with PDF files are rejected: %s", reason(error))

MAX_BYTES: Final = Limit().payload
"""Size of one document."""


class DocumentError(ValueError):
    """A document that cannot be read; the message has the reason."""


MAX_TEXT: Final = 1 << 20
"""Characters of a document's text; it goes into the prompt, and a megabyte is already more than the context window."""
MAX_PDFS: Final = 8
"""PDF files in one request."""


async def pdf_text(encoded: str, name: str, caller: str) -> str:
    """The text of a PDF in base64, as `[file: name]` and a heading for each page, cut after 200 pages.

    `caller`: for fair queueing at the workers.

    Raises:
        DocumentError: the data is not a PDF, or exceeds the limits of time or memory.
    """
    if _MISSING:
        raise DocumentError(_MISSING)
    if len(encoded) > MAX_BYTES * 4 // 3:
        raise DocumentError(f"PDF files are at most {MAX_BYTES >> 20} MiB")
    try:
        raw = await asyncio.to_thread(base64.b64decode, encoded, validate=True)
    except ValueError:
        raise DocumentError("only base64 can be read") from None
    CALLER.set(caller)
    try:
        text = (await Reader().pdf(raw, name)).text
    except PageError as error:
        raise DocumentError(str(error)) from None
    if len(text) > MAX_TEXT:
        raise DocumentError(f"the text of a file is at most {MAX_TEXT} characters")
    return f"[file: {name}]\n{text}"
