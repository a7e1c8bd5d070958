"""Messages between server, zygote and supervisors: one JSON object per packet, with file descriptors riding along."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

MAX_PACKET = 128 * 1024  # below the kernel's default send buffer (net.core.wmem_default, 208 KiB)
_MAX_FDS = 4


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends. Packets keep their borders; the other side's death reads as end of file."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Raises ValueError for a message over `MAX_PACKET`, OSError if the other side is gone."""
    data = json.dumps(message).encode()
    if len(data) > MAX_PACKET:
        raise ValueError(f"message of {len(data)} bytes is over the limit of {MAX_PACKET}")
    socket.send_fds(sock, [data], fds, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message, or None when the other side is gone."""
    try:
        data, fds, flags, _ = socket.recv_fds(sock, MAX_PACKET, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    except (ConnectionResetError, BrokenPipeError):
        return None
    if not data or flags & socket.MSG_TRUNC:
        return None
    return json.loads(data), list(fds)
