"""Talks to a kernel in a cage: Jupyter's messages over ZeroMQ's protocol on unix sockets, read with suspicion.

Whatever the confined program sends is bounded in size and number, signed with a key (which the program can find),
parsed as JSON and never unpickled. Protocol: jupyter-client.readthedocs.io/en/stable/messaging.html, version 5.4.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from jupyter_client.session import Session

from .zmtp import ProtocolError, ZmtpConnection

_SHELL, _IOPUB = 1, 2  # as in `payload`
_THREAD_ABOVE = 256 << 10  # bytes; parsing a larger message would stall the event loop by more than about a millisecond

Message = dict[str, Any]


class KernelError(Exception):
    """The kernel broke the protocol or its bounds, or is gone; it cannot be used any more."""


class KernelClient:
    """One kernel; `connect` makes it."""

    def __init__(self, session: Session, shell: ZmtpConnection, iopub: ZmtpConnection, max_total: int) -> None:
        self._session = session
        self._shell = shell
        self._iopub = iopub
        self._max_total = max_total

    @classmethod
    async def connect(
        cls, directory: int, name: str, key: str, *, max_message: int, max_total: int, timeout_s: float
    ) -> KernelClient:
        """`directory`: descriptor of the directory with the kernel's sockets, `name` their prefix; sizes in bytes.

        Returns when both channels carry messages. Raises KernelError.
        """
        # /proc/self/fd names the cage's directory although it is mounted nowhere on this side. There is no second
        # connect: later the program inside could put a link to some other socket in place of its own.
        prefix = f"/proc/self/fd/{directory}/{name}"
        opened: list[ZmtpConnection] = []
        try:
            async with asyncio.timeout(timeout_s):
                opened.append(await ZmtpConnection.connect(f"{prefix}-{_SHELL}", "DEALER", max_message))
                opened.append(await ZmtpConnection.connect(f"{prefix}-{_IOPUB}", "SUB", max_message))
                client = cls(Session(key=key.encode(), username="server"), opened[0], opened[1], max_total)
                await client._greet()
                return client
        except BaseException as error:
            for connection in opened:
                await connection.aclose()
            if isinstance(error, (ProtocolError, OSError)):  # TimeoutError is one
                raise KernelError(f"the kernel does not answer: {error or f'{timeout_s:.0f} s'}") from error
            raise

    async def _greet(self) -> None:
        request = await self._send("kernel_info_request", {})
        await self._reply(request)
        while (await self._receive(self._iopub))[0]["msg_type"] not in ("iopub_welcome", "status"):
            pass

    async def _send(self, kind: str, content: dict[str, Any]) -> str:
        """Sends a request on the shell channel and returns its id."""
        message = self._session.msg(kind, content)
        await self._shell.send([bytes(f) for f in self._session.serialize(message)])
        return str(message["header"]["msg_id"])

    async def _receive(self, connection: ZmtpConnection) -> tuple[Message, int]:
        """The next well-formed message and its size in bytes."""
        while True:
            frames = await connection.receive()
            size = sum(len(f) for f in frames)
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                _, parts = self._session.feed_identities(frames)
                if size > _THREAD_ABOVE:
                    return await asyncio.to_thread(self._session.deserialize, parts), size
                return self._session.deserialize(parts), size
            # else not signed, replayed or not JSON: not from the kernel's protocol code

    async def _reply(self, msg_id: str) -> Message:
        while True:
            message, _ = await self._receive(self._shell)
            if message["parent_header"].get("msg_id") == msg_id:
                return message

    async def execute(self, code: str, on_output: Callable[[str, Message], None]) -> Message:
        """Runs `code` as one cell. `on_output` gets each output's type and content. Returns the reply's content.

        Raises KernelError when the kernel sends more than it may.
        """
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
        try:
            msg_id = await self._send("execute_request", content | {"allow_stdin": False, "stop_on_error": False})
            await self._outputs(msg_id, on_output)
            reply: Message = (await self._reply(msg_id))["content"]
            return reply
        except ProtocolError as error:
            raise KernelError(str(error)) from error

    async def _outputs(self, msg_id: str, on_output: Callable[[str, Message], None]) -> None:
        total = 0
        while True:
            message, size = await self._receive(self._iopub)
            total += size
            if total > self._max_total:
                raise KernelError(f"the kernel sent more than {self._max_total} bytes")
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            kind, body = message["msg_type"], message["content"]
            if kind == "status" and body.get("execution_state") == "idle":
                return
            with contextlib.suppress(AttributeError, TypeError, KeyError, ValueError):  # malformed content
                on_output(kind, body)

    async def aclose(self) -> None:
        await self._shell.aclose()
        await self._iopub.aclose()
