"""The text of a document that a client sent, read in a confined worker. A face of its own, which is not about tools."""

from __future__ import annotations

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
"""Of one document."""


class DocumentError(ValueError):
    """A document that cannot be read; the message says why."""


async def pdf_text(data: bytes, name: str, caller: str) -> str:
    """The text of a PDF with a heading for each page. `caller` is whose turn at the workers it is.

    Raises:
        DocumentError: it is none, or takes too long or too much.
    """
    if _MISSING:
        raise DocumentError(_MISSING)
    CALLER.set(caller)
    try:
        return (await Reader().pdf(data, name)).text
    except PageError as error:
        raise DocumentError(str(error)) from None
