"""ZeroMQ's wire protocol for a client that does not trust its peer: ZMTP 3.0, NULL mechanism, over a unix socket.

Why not libzmq on this side: the program in the cage owns the descriptors of its kernel's sockets and can write anything
to them. libzmq bounds a frame's size and the number of whole messages, but not the frames of a message that never ends
(`pipe_t::check_hwm` counts messages), so a peer can grow the server's memory without limit. Here all is bounded, and
without a reader, the socket's buffer fills and the peer blocks. Specification: rfc.zeromq.org/spec/23.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Sequence

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_FRAMES = 64  # of one message; Jupyter's have about seven and one per binary buffer
_MAX_COMMAND = 512
_AT_ONCE = 64  # frames, well below a millisecond


class ProtocolError(Exception):
    """The peer broke the protocol or its bounds, or is gone."""


class ZmtpConnection:
    """One connected socket; at most one reader and one writer at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_message: int) -> None:
        self._reader = reader
        self._writer = writer
        self._max_message = max_message
        self._at_once = 0

    @classmethod
    async def connect(cls, path: str, socket_type: str, max_message: int) -> ZmtpConnection:
        """`socket_type`: DEALER or SUB (which subscribes to everything). Messages have at most `max_message` bytes.

        Raises ProtocolError, OSError.
        """
        reader, writer = await asyncio.open_unix_connection(path, limit=1 << 18)
        self = cls(reader, writer, max_message)
        try:
            await self._handshake(socket_type)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _handshake(self, socket_type: str) -> None:
        self._writer.write(_GREETING)
        greeting = await self._exactly(64)
        if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3 or greeting[12:16] != b"NULL":
            raise ProtocolError("the peer does not speak ZMTP 3 with the NULL mechanism")
        name, value = b"Socket-Type", socket_type.encode()
        ready = b"\x05READY" + bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        self._writer.write(bytes([_COMMAND, len(ready)]) + ready)
        flags, size = await self._header()
        if not flags & _COMMAND or size > _MAX_COMMAND or not (await self._exactly(size)).startswith(b"\x05READY"):
            raise ProtocolError("the peer did not get ready")
        if socket_type == "SUB":
            await self.send([b"\x01"])

    async def _exactly(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ProtocolError("the connection was closed") from error

    async def _header(self) -> tuple[int, int]:
        flags, size = await self._exactly(2)
        if flags & _LONG:
            size = struct.unpack(">Q", bytes([size]) + await self._exactly(7))[0]
        return flags, size

    async def _let_others_run(self) -> None:
        """Yields to the event loop after `_AT_ONCE` frames: reading buffered frames of two bytes would block it."""
        self._at_once += 1
        if self._at_once >= _AT_ONCE:
            self._at_once = 0
            await asyncio.sleep(0)

    async def send(self, frames: Sequence[bytes]) -> None:
        last = len(frames) - 1
        for i, frame in enumerate(frames):
            flags = _MORE if i < last else 0
            if len(frame) > 255:
                self._writer.write(struct.pack(">BQ", flags | _LONG, len(frame)))
            else:
                self._writer.write(bytes([flags, len(frame)]))
            self._writer.write(frame)
        try:
            await self._writer.drain()
        except OSError as error:
            raise ProtocolError("the connection was closed") from error

    async def receive(self) -> list[bytes]:
        """The next message's frames. Raises ProtocolError when it is over the bounds."""
        frames: list[bytes] = []
        total = commands = 0
        while True:
            await self._let_others_run()
            flags, size = await self._header()
            total += size
            if total > self._max_message or len(frames) >= _MAX_FRAMES or (flags & _COMMAND and size > _MAX_COMMAND):
                raise ProtocolError(f"the peer sent a message of more than {self._max_message} bytes")
            body = await self._exactly(size)
            if flags & _COMMAND:
                if (commands := commands + 1) > _MAX_FRAMES:
                    raise ProtocolError("the peer sends commands alone")
                continue
            frames.append(body)
            if not flags & _MORE:
                return frames

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
