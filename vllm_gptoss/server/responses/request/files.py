"""PDFs in a request, converted to text in a confined worker before the request is validated."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from vllm_gptoss.server.responses.errors import ApiError, unsupported
from vllm_gptoss.tools.documents import MAX_PDFS, DocumentError, pdf_text

_MAGIC = base64.b64encode(b"%PDF-")[:6].decode()
_Place = tuple[Any, Any, str]
"""A list or mapping, the index or key of a part in it, and its path in the request."""


async def read_pdfs(body: Any, caller: str) -> None:
    """Replaces every PDF in `body`, an unchecked request, by a text part. `caller`: owner, for fair use of the workers.

    An unreadable PDF of a tool stays, and is described later.

    Raises:
        ApiError: a PDF of the user cannot be read, or there are too many.
    """
    places = sorted(_pdfs(body), key=lambda place: _is_output(place[2]))  # the user's first
    for number, (parts, index, where) in enumerate(places):
        try:
            if number >= MAX_PDFS:
                raise unsupported(where, f"a request may have {MAX_PDFS} PDF files")
            parts[index] = await _as_text(parts[index], where, caller)
        except ApiError:
            if not _is_output(where):
                raise


def _is_output(where: str) -> bool:
    return ".output[" in where


def _pdfs(body: Any) -> Iterator[_Place]:
    for field in ("input", "items"):
        for at, item in enumerate(_list(body, field)):
            for name in ("content", "output"):
                parts = _list(item, name)
                for index, part in enumerate(parts):
                    if _is_pdf(part):
                        yield parts, index, f"{field}[{at}].{name}[{index}].file_data"
    prompt = body.get("prompt") if isinstance(body, dict) else None
    variables = prompt.get("variables") if isinstance(prompt, dict) else None
    if isinstance(variables, dict):
        yield from ((variables, name, f"prompt.variables.{name}") for name, part in variables.items() if _is_pdf(part))


def _list(value: Any, field: str) -> list[Any]:
    inner = value.get(field) if isinstance(value, dict) else None
    return inner if isinstance(inner, list) else []


def _is_pdf(part: Any) -> bool:
    data = part.get("file_data") if isinstance(part, dict) and part.get("type") == "input_file" else None
    if not isinstance(data, str):
        return False
    return data.startswith("data:application/pdf") or data.partition(",")[2].startswith(_MAGIC) or data[:6] == _MAGIC


async def _as_text(part: dict[str, Any], where: str, caller: str) -> dict[str, Any]:
    name = part.get("filename") if isinstance(part.get("filename"), str) else None
    head, _, data = part["file_data"].rpartition(",")
    try:
        if head and not head.endswith(";base64"):
            raise DocumentError("only base64 can be read")
        return {"type": "input_text", "text": await pdf_text(data, name or "unnamed", caller)}
    except DocumentError as error:
        raise ApiError(f"'{where}': {error}.", param=where, code="invalid_value") from None
