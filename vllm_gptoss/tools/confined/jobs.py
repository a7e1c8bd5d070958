"""What workers can do: functions of bytes, registered by their modules, which a worker imports before it is confined.

A job takes the payload and keyword options (plain data, from the server) and returns its declared type: a dataclass,
or what msgspec can encode. It is pure: no files, no imports left for later, no state from one call to the next.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

REGISTERED: dict[str, Callable[..., Any]] = {}


class Refused(Exception):  # noqa: N818 - a job's word about its payload, not a failure of the job
    """A job cannot read its payload. The caller gets the message, cut to 500 characters."""


def job(function: _F) -> _F:
    """Registers `function` under its module and name."""
    REGISTERED[name_of(function)] = function
    return function


def modules() -> tuple[str, ...]:
    """Of all jobs that this process knows, which workers import: a module registers its own when it is imported here.
    Light ones: each is in the fork server's memory."""
    return tuple(dict.fromkeys(function.__module__ for function in REGISTERED.values()))


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def result_type(function: Callable[..., Any]) -> Any:
    return typing.get_type_hints(function)["return"]
