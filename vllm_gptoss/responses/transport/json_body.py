"""JSON of a client as values that can be rendered, kept and sent back."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from vllm_gptoss.responses.errors import ApiError

MAX_DEPTH = 128
"""Objects and lists inside each other. Schemas are read recursively; OpenAI allows ten levels of them."""


def parse_json(raw: str | bytes) -> Any:
    """The value of a JSON text. Half a surrogate pair, which JavaScript sends of a cut emoji, becomes U+FFFD.

    Raises:
        ApiError: no JSON, a number that is none or too large for one, or too many levels.
    """
    try:
        return _clean(json.loads(raw, parse_constant=_refuse, parse_float=_finite), MAX_DEPTH)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The request body is not JSON: {error}.", code="invalid_json") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(number: str) -> float:
    value = float(number)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{number[:40]} is too large")
    return value


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _text(value)
    if isinstance(value, dict):
        return {_clean(key, depth): _clean(entry, _down(depth)) for key, entry in value.items()}
    if isinstance(value, list):
        return [_clean(entry, _down(depth)) for entry in value]
    return value


def _down(depth: int) -> int:
    if depth == 0:
        raise ValueError(f"it has more than {MAX_DEPTH} levels")
    return depth - 1


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value
