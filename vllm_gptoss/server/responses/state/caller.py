"""The client of a request: its tenant, its share of queues, and its connection's unstored responses."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic_core import to_json

from vllm_gptoss.server.responses.state.stored import Stored

logger = logging.getLogger(__name__)

MEMORY_BYTES = 16 << 20
"""JSON of unstored responses of one WebSocket: many times a context window of text."""


class UnstoredResponses:
    """Responses of one WebSocket that are in no store and can be continued; evicts the least recently used."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self._bytes = 0

    def add(self, stored: Stored) -> None:
        """Stores the part of a finished response that a later turn needs: its items."""
        self.forget(stored.id)
        needed = {name: stored.body[name] for name in ("id", "status", "output")}
        slim = replace(stored, body=needed)
        size = len(to_json([needed, slim.input, slim.hidden]))
        self._kept[stored.id] = slim, size
        self._bytes += size
        while self._bytes > MEMORY_BYTES:
            oldest = next(iter(self._kept))
            logger.info("A WebSocket forgets the unstored response %s: it holds %d bytes", oldest, self._bytes)
            self.forget(oldest)

    def get(self, identifier: str) -> Stored | None:
        """The response, marked as used now; None if it is unknown or was evicted."""
        if identifier not in self._kept:
            return None
        self._kept.move_to_end(identifier)
        return self._kept[identifier][0]

    def forget(self, identifier: str) -> None:
        """Removes a response, if it is here."""
        self._bytes -= self._kept.pop(identifier, (None, 0))[1]


@dataclass(slots=True)
class Caller:
    """tenant: owner of stored data; memory: unstored responses of a WebSocket, None over HTTP

    owner: key for fair shares of tools and queues; "" where API keys are not checked
    adds_search: the client is an agent that sends `web_search` with every request
    priority, session_id, data_parallel_rank: from headers of routers in front of vLLM
    """

    tenant: str
    owner: str
    adds_search: bool
    trace_headers: Mapping[str, str] | None
    priority: int | None
    session_id: str | None
    data_parallel_rank: int | None
    memory: UnstoredResponses | None = None
