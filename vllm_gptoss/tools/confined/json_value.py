"""From JSON text to values that can be rendered, stored and sent back. `json_tree` has counted them before."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec

from vllm_gptoss.tools.confined.jobs import Refused, job


def decode(raw: bytes) -> Any:
    """The value of a JSON text. Half a surrogate pair, which JavaScript sends for a cut emoji, becomes U+FFFD.

    Raises ValueError if the text is not JSON, or has a number that is not finite.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # also of half a pair, of a byte order mark and of UTF-16
        return _whole(json.loads(raw, parse_constant=_refuse, parse_float=_finite))


@job
def decoded(payload: bytes) -> Any:
    try:
        return decode(payload)
    except ValueError as error:
        raise Refused(str(error)) from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(number: str) -> float:
    value = float(number)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{number[:40]} is too large")
    return value


def _whole(value: Any) -> Any:
    """`value` without halves of surrogate pairs."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, dict):
        return {_whole(key): _whole(entry) for key, entry in value.items()}
    return [_whole(entry) for entry in value] if isinstance(value, list) else value
