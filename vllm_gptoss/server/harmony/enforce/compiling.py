"""Writes and caches grammars of schemas: in workers, or in this process if the caller cannot wait."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError, NotNowError
from vllm_gptoss.server.harmony.enforce.job import Written, attempt, written, written_pattern
from vllm_gptoss.server.harmony.enforce.json_grammar import write
from vllm_gptoss.server.harmony.metrics import UNENFORCED
from vllm_gptoss.tools.confined import BusyError, ConfinedError, FaultError, Limit, pool

logger = logging.getLogger(__name__)

LIMIT = Limit(seconds=10, cpu_s=5, memory=512 << 20, payload=2 << 20, answer=1 << 20)
"""Limit of the worker that writes one schema's grammar. The largest allowed grammar takes under a second."""

MAX_WHITESPACE = 32
"""Whitespace in a row inside JSON. Without a bound a model that is unsure writes blanks until it is cut."""

HERE = 8_192
"""Bytes of schema up to which `grammar_of` writes a grammar in the calling thread."""

MAX_GRAMMARS, MAX_COST = 400_000, 5_000
"""Bytes of all grammars of one request, and milliseconds in which the engine compiles them."""

_KEPT = 512
_known: OrderedDict[bytes, Written] = OrderedDict()
_told: set[bytes] = set()


async def prepare(schema: Mapping[str, Any]) -> Written:
    """The grammar of `schema`, written in a confined worker the first time.

    Raises:
        NotEnforceableError: the schema has no grammar, or the grammar was not written within `LIMIT`.
        NotNowError: the workers are busy or failed; the result is not cached.
    """
    text = json.dumps(schema).encode()
    return await _apart(_key(text), lambda: pool().run(written, text, LIMIT, whitespace=MAX_WHITESPACE))


async def prepare_all(schemas: Iterable[Mapping[str, Any]]) -> None:
    """Prepares every schema that has a grammar. Raises NotNowError; the others are reported by `grammar_of`."""
    for schema in schemas:
        try:
            await prepare(schema)
        except NotNowError:
            raise
        except NotEnforceableError:
            continue


async def prepare_pattern(pattern: str) -> Written:
    """The grammar of plain text that `pattern` matches as a whole; otherwise as `prepare`."""
    text = pattern.encode("utf-8", "surrogatepass")
    return await _apart(_key(b"pattern " + text), lambda: pool().run(written_pattern, text, LIMIT))


async def _apart(key: bytes, run: Callable[[], Awaitable[Written]]) -> Written:
    if key not in _known:
        try:
            _keep(key, await run())
        except (BusyError, FaultError) as error:
            raise NotNowError("schema", f"was not read: {error}") from None
        except ConfinedError as error:
            _keep(key, Written(keyword="schema", why=f"was not read: {error}"))
    return _result(_known[key])


def _key(text: bytes) -> bytes:
    return sha256(text).digest()


class Room:
    """The remaining size and cost for the grammars of one request."""

    def __init__(self) -> None:
        self._bytes, self._cost = MAX_GRAMMARS, float(MAX_COST)

    def take(self, found: Written) -> None:
        """Reserves size and cost for a grammar.

        Raises:
            NotEnforceableError: too little is left; nothing was reserved.
        """
        if len(found.grammar) > self._bytes:
            raise NotEnforceableError("tools", f"need grammars of more than {MAX_GRAMMARS} bytes together")
        if found.cost > self._cost:
            raise NotEnforceableError("tools", "have schemas that take too long to compile together")
        self._bytes -= len(found.grammar)
        self._cost -= found.cost


def grammar_of(schema: Mapping[str, Any], room: Room | None = None) -> str:
    """As `prepare`, but synchronous: writes a small grammar here if it was not prepared.

    Raises:
        NotEnforceableError: the schema has no grammar, is too large to write here, or exceeds `room`.
    """
    text = json.dumps(schema)
    key = _key(text.encode())
    if key not in _known:
        if len(text) > HERE:
            raise NotEnforceableError("schema", f"has more than {HERE} bytes")
        _keep(key, attempt(lambda: write(text, MAX_WHITESPACE)))
    found = _result(_known[key])
    if room:
        room.take(found)
    return found.grammar


def _keep(key: bytes, found: Written) -> None:
    _known[key] = found
    while len(_known) > _KEPT:
        _known.popitem(last=False)


def _result(found: Written) -> Written:
    if not found.grammar:
        raise NotEnforceableError(found.keyword, found.why)
    return found


def tell(what: str, error: NotEnforceableError) -> None:
    """Counts that `what` is constrained to JSON only, and logs that once per schema."""
    UNENFORCED.labels(error.keyword).inc()
    key = _key(f"{what} {error}".encode())
    if key not in _told and len(_told) < _KEPT:
        _told.add(key)
        logger.warning("The schema of %s is not enforced, any JSON is accepted (logged once): %s", what, error)
