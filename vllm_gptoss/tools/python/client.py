"""Talks to a kernel in a cage: Jupyter's messages over ZeroMQ's protocol on unix sockets, read with suspicion.

All that the confined program sends is bounded in size and number, signed with a key (which the program can find),
parsed as JSON and never unpickled: small messages here, large ones in a confined worker (`messages`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from jupyter_client.session import Session

from vllm_gptoss.tools.confined import BusyError, ConfinedError, Limit, Refused, pool

from .messages import KernelMessage, read, read_message
from .zmtp import ProtocolError, ZmtpConnection

_SHELL, _IOPUB = 1, 2  # as in `payload`
_HERE = 64 << 10  # bytes; reading a larger message would stall the event loop by more than about two milliseconds
_FRAME_COST = 256  # bytes that a frame counts in addition: reading one of two bytes takes as long
_MAX_MALFORMED = 100  # the kernel's protocol code sends none
LIMIT = Limit(seconds=20.0, cpu_s=5, memory=512 << 20, payload=128 << 20, answer=64 << 20)
"""Limit of the worker that reads one message."""


class KernelError(Exception):
    """The kernel broke the protocol or its bounds, or is gone; it cannot be used any more."""


class KernelClient:
    def __init__(
        self, session: Session, shell: ZmtpConnection, iopub: ZmtpConnection, max_total: int, keep: int
    ) -> None:
        self._session = session
        self._shell = shell
        self._iopub = iopub
        self._max_total = max_total
        self._keep = keep
        self._total = 0
        self._malformed = 0

    @classmethod
    async def connect(
        cls, directory: int, name: str, key: str, *, max_message: int, max_total: int, keep: int, timeout_s: float
    ) -> KernelClient:
        """`directory`: descriptor of the directory with the kernel's sockets, `name` their prefix; sizes in bytes;
        `keep`: characters of either end of a text that remain.

        Returns when both channels carry messages. Raises KernelError.
        """
        # /proc/self/fd names the cage's directory although it is mounted nowhere on this side. There is no second
        # connect: later the program inside could put a link to some other socket in its place.
        prefix = f"/proc/self/fd/{directory}/{name}"
        opened: list[ZmtpConnection] = []
        try:
            async with asyncio.timeout(timeout_s):
                opened.append(await ZmtpConnection.connect(f"{prefix}-{_SHELL}", "DEALER", max_message))
                opened.append(await ZmtpConnection.connect(f"{prefix}-{_IOPUB}", "SUB", max_message))
                client = cls(Session(key=key.encode(), username="server"), opened[0], opened[1], max_total, keep)
                await client._greet()
                return client
        except BaseException as error:
            for connection in opened:
                await connection.aclose()
            if isinstance(error, (ProtocolError, OSError)):  # TimeoutError is one
                raise KernelError(f"the kernel does not answer: {error or f'{timeout_s:.0f} s'}") from error
            raise

    async def _greet(self) -> None:
        """Returns when the kernel is idle, not when it replies: between the two ipykernel flushes its streams.

        The pool stops a warm kernel at once. If that happens during the flush, the ten seconds of
        `IOStream.flush_timeout` are over when the kernel continues, and its first cell prints `IOStream.flush timed
        out`.
        """
        await self._reply(await self._send("kernel_info_request", {}))
        while (await self._receive(self._iopub)).kind not in ("iopub_welcome", "status"):
            pass  # what is published from here on arrives
        request = await self._send("kernel_info_request", {})
        await self._outputs(request, lambda message: None)
        await self._reply(request)

    async def _send(self, kind: str, content: dict[str, Any]) -> str:
        """Sends a request on the shell channel and returns its id."""
        message = self._session.msg(kind, content)
        await self._shell.send([bytes(f) for f in self._session.serialize(message)])
        return str(message["header"]["msg_id"])

    async def _receive(self, connection: ZmtpConnection) -> KernelMessage:
        """The next well-formed message. Raises KernelError for too many bytes, and too much that is no message."""
        while True:
            frames = await connection.receive()
            self._total += sum(len(frame) + _FRAME_COST for frame in frames)
            if self._total > self._max_total:
                raise KernelError(f"the kernel sent more than {self._max_total} bytes")
            try:
                return await self._read(frames)
            except Refused:  # not signed or not JSON: not from the kernel's protocol code
                self._malformed += 1
                if self._malformed > _MAX_MALFORMED:
                    raise KernelError("the kernel sends what are no messages") from None

    async def _read(self, frames: list[bytes]) -> KernelMessage:
        if sum(map(len, frames)) <= _HERE:
            return read(frames, self._session.key, self._keep)
        try:
            packed = msgspec.msgpack.encode(frames)
            return await pool().run(read_message, packed, LIMIT, key=self._session.key, keep=self._keep)
        except (ConfinedError, BusyError) as error:
            raise KernelError(f"the kernel sent a message that cannot be read: {error}") from error

    async def _reply(self, msg_id: str) -> KernelMessage:
        while True:
            message = await self._receive(self._shell)
            if message.parent == msg_id:
                return message

    async def execute(self, code: str, on_output: Callable[[KernelMessage], None]) -> KernelMessage:
        """Runs `code` as one cell. `on_output` gets each output. Returns the reply.

        Raises KernelError when the kernel sends more than it may.
        """
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
        self._total = self._malformed = 0
        try:
            msg_id = await self._send("execute_request", content | {"allow_stdin": False, "stop_on_error": False})
            await self._outputs(msg_id, on_output)
            return await self._reply(msg_id)
        except ProtocolError as error:
            raise KernelError(str(error)) from error

    async def _outputs(self, msg_id: str, on_output: Callable[[KernelMessage], None]) -> None:
        while True:
            message = await self._receive(self._iopub)
            if message.parent != msg_id:
                continue
            if message.kind == "status" and message.content["state"] == "idle":
                return
            on_output(message)

    async def aclose(self) -> None:
        await self._shell.aclose()
        await self._iopub.aclose()
