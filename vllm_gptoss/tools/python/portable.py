"""The python tool where namespaces cannot be had: a notebook on WebAssembly's CPython. No Jupyter, no libzmq.

The program owns its end of the pipes and can write anything to them: lines and their sum are bounded, what is no frame
is text, and a reply counts only with the id of its request.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_gptoss.tools.confined import BusyError, ConfinedError, Refused, pool
from vllm_gptoss.tools.sandbox.launcher import SandboxError
from vllm_gptoss.tools.sandbox.portable import PortableLauncher, PortableProcess, Streams

from .client import LIMIT, KernelError
from .messages import KernelMessage, read_pair, reduced
from .options import PythonOptions

_GUEST, _INSIDE = Path(__file__).parent / "guest", "/usr/lib/notebook"
_PROGRAM = f"import sys; sys.path.append({_INSIDE!r}); import notebook; notebook.main()"
_FRAME = b"\x1e"
_HERE = 64 << 10  # bytes, as in `client`
_LINE_COST = 256
_AT_ONCE = 64
_MAX_MEMORY = (4 << 30) - (1 << 16)  # what 32 bits can address
_CANNOT = {
    "python": "it brings its own interpreter",
    "cgroup": "it knows no cgroups",
    "read_only_paths": "it shows no files of the host",
    "hidden_paths": "it shows no files of the host",
    "allow_network": "it has no network",
}


async def make(options: PythonOptions) -> PortableLauncher:
    """Raises SandboxError, also for an option that this tier cannot honour."""
    for name, reason in _CANNOT.items():
        if name in options.model_fields_set and getattr(options, name) != PythonOptions.model_fields[name].default:
            raise SandboxError(f"the portable tier cannot do `{name}`: {reason}")
    limits = options.limits(max_memory=_MAX_MEMORY)
    user = options.run_as_uid, options.run_as_gid
    launcher = PortableLauncher(limits, user, (_GUEST, _INSIDE), ["python", "-c", _PROGRAM])
    await launcher.start()
    return launcher


async def connect(options: PythonOptions, process: PortableProcess) -> PortableClient:
    """Starts the notebook in a place that has none (any more). Raises SandboxError."""
    limit = options.max_message_mib << 20
    preload = options.preload if "preload" in options.model_fields_set else ()
    settings = {
        "max_output_chars": max(4 * options.max_output_chars, 1 << 20),
        "max_message_bytes": limit,
        "required": [*options.packages, *preload],
    }
    streams = await process.start(limit + (1 << 20))
    client = PortableClient(streams, 8 * limit, options.max_output_chars)
    try:
        async with asyncio.timeout(options.start_timeout_s):
            await client.greet(settings)
    except BaseException as error:
        await client.aclose()
        if isinstance(error, (KernelError, TimeoutError)):
            why = str(error) or f"no answer in {options.start_timeout_s:.0f} s"
            raise SandboxError(f"the portable tier's interpreter did not start: {why}") from error
        raise
    return client


class PortableClient:
    """`client.KernelClient` for the notebook in `guest`."""

    def __init__(self, streams: Streams, max_total: int, keep: int) -> None:
        self._streams = streams
        self._max_total = max_total
        self._keep = keep
        self._lines = 0

    async def _send(self, value: dict[str, Any]) -> None:
        try:
            self._streams.writer.write(json.dumps(value).encode() + b"\n")
            await self._streams.writer.drain()
        except OSError as error:
            raise KernelError("the interpreter is gone") from error

    async def _receive(self) -> tuple[bytes, KernelMessage | None, int]:
        """Text between the frames, the next frame, and what both cost in bytes."""
        try:
            line = await self._streams.reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            raise KernelError("the kernel sent a line that never ends") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            words = error.partial if isinstance(error, asyncio.IncompleteReadError) else b""
            raise KernelError(f"the interpreter ended {words.decode(errors='replace')[-500:]}".strip()) from error
        self._lines += 1
        if self._lines % _AT_ONCE == 0:  # what is buffered is read without a pause
            await asyncio.sleep(0)
        text, mark, frame = line.partition(_FRAME)
        cost = len(line) + _LINE_COST
        if not mark:
            return line, None, cost
        try:
            if len(frame) <= _HERE:
                return text, read_pair(frame, self._keep), cost
            return text, await pool().run(read_pair, frame, LIMIT, keep=self._keep), cost
        except Refused:
            return line, None, cost
        except (ConfinedError, BusyError) as error:
            raise KernelError(f"the kernel sent a frame that cannot be read: {error}") from error

    async def greet(self, settings: dict[str, Any]) -> None:
        """Waits until the notebook takes cells. Raises KernelError with its last words."""
        await self._send(settings)
        words = b""
        while len(words) < self._max_total:
            try:
                text, message, _ = await self._receive()
            except KernelError as error:
                raise KernelError(f"{error}: {words.decode(errors='replace').strip()[-500:]}") from error
            words += text
            if message is not None and message.kind == "ready":
                return
        raise KernelError("it does not stop talking")

    async def execute(self, code: str, on_output: Callable[[KernelMessage], None]) -> KernelMessage:
        """Runs `code` as one cell, as `client.KernelClient` does. Raises KernelError."""
        request = secrets.token_hex(8)
        await self._send({"id": request, "code": code})
        total = 0
        while True:
            text, message, cost = await self._receive()
            total += cost
            if total > self._max_total:
                raise KernelError(f"the kernel sent more than {self._max_total} bytes")
            if text:
                printed = {"text": text.decode(errors="replace")}
                on_output(reduced("stream", "", printed, self._keep))
            if message is not None and message.kind == "reply":
                if message.parent == request:
                    return message
            elif message is not None:
                on_output(message)

    async def aclose(self) -> None:
        self._streams.close()
