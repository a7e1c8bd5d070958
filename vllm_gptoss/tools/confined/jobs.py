"""The jobs of workers: functions of bytes. Their modules register them; a worker imports these before it is confined.

A job takes the payload and keyword options (plain data, from the server) and returns its declared type: a dataclass, or
another type that msgspec encodes. It is pure: no files, no late imports, no state from one call to the next.
"""

from __future__ import annotations

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
    """The modules of all registered jobs, which workers import. A module registers its jobs when it is imported. The
    modules should be small, because all are in the fork server's memory."""
    return tuple(dict.fromkeys(function.__module__ for function in REGISTERED.values()))


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"
