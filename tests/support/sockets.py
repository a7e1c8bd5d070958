"""Sockets for the servers that tests run in a separate asyncio loop."""

from __future__ import annotations

import socket


def listening(port: int = 0) -> socket.socket:
    """A socket that listens on the loopback, on a free port where none is named."""
    # asyncio turns Nagle's delay (40 ms an answer) off only where the protocol is named; create_server does not.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that was killed comes back at once
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener
