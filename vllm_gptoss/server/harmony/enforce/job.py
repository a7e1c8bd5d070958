"""Writes a schema's grammar in a confined worker: a hostile schema can end only that process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.json_grammar import write, write_pattern
from vllm_gptoss.tools.confined import job


@dataclass(frozen=True)
class Written:
    """`grammar` and the milliseconds that it may take to compile, or the `keyword` that has none and `why`."""

    grammar: str = ""
    cost: float = 0.0
    keyword: str = ""
    why: str = ""


def attempt(write_it: Callable[[], tuple[str, float]]) -> Written:
    try:
        return Written(*write_it())
    except NotEnforceableError as error:
        return Written(keyword=error.keyword, why=error.why)


@job
def written(schema: bytes, *, whitespace: int) -> Written:
    """The grammar of a schema in JSON."""
    return attempt(lambda: write(schema.decode(), whitespace))


@job
def written_pattern(pattern: bytes) -> Written:
    """The grammar of plain text that a regular expression matches as a whole."""
    return attempt(lambda: write_pattern(pattern.decode()))
