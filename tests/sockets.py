"""Sockets for the servers that tests run in an asyncio loop of their own."""

from __future__ import annotations

import socket


def listening() -> socket.socket:
    """A socket that listens on a free port of the loopback."""
    # asyncio turns Nagle's delay (40 ms an answer) off only where the protocol is named; create_server does not.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener
