"""A client of /v1/responses over a WebSocket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.support.responses.server import MODEL, Running


@contextmanager
def dial(server: Running, key: str = "alice") -> Iterator[ClientConnection]:
    url = server.url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers={"Authorization": f"Bearer {key}"}) as socket:
        yield socket


def ask(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    socket.send(json.dumps({"type": "response.create", "model": MODEL, **fields}))
    events = []
    while True:
        events.append(json.loads(socket.recv(20)))
        kind = events[-1]["type"]
        if kind == "error" or kind in ("response.completed", "response.failed", "response.incomplete"):
            return events
