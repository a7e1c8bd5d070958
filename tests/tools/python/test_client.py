"""A kernel is stopped between calls: it must not be in the middle of anything then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from jupyter_client.session import Session

from vllm_gptoss.tools.python.client import KernelClient

KEY, NAME = "key", "kernel"
BOUNDS = {"max_message": 1 << 20, "max_total": 1 << 20, "keep": 1000}


class SlowKernel:
    """Replies at once and flushes for a while before it is idle, as ipykernel may where it gets no processor."""

    def __init__(self, folder: Path, flush_s: float) -> None:
        self.session, self.flush_s = Session(key=KEY.encode()), flush_s
        self.unfinished = self.finished = 0
        context = zmq.asyncio.Context()
        self.shell, self.iopub = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        for socket, number in ((self.shell, 1), (self.iopub, 2)):
            socket.bind(f"ipc://{folder}/{NAME}-{number}")

    async def run(self) -> None:
        while True:
            identities, frames = self.session.feed_identities(await self.shell.recv_multipart())
            request = self.session.deserialize(frames)
            self.unfinished += 1
            await self._say(self.iopub, "status", {"execution_state": "busy"}, request)
            await self._say(self.shell, "kernel_info_reply", {"status": "ok"}, request, identities)
            await asyncio.sleep(self.flush_s)
            self.unfinished, self.finished = self.unfinished - 1, self.finished + 1
            await self._say(self.iopub, "status", {"execution_state": "idle"}, request)

    async def _say(
        self, socket: zmq.asyncio.Socket, kind: str, content: dict[str, str], parent: dict[str, object],
        identities: list[bytes] | None = None,
    ) -> None:  # fmt: skip
        message = self.session.msg(kind, content, parent=parent)
        await socket.send_multipart([*(identities or []), *self.session.serialize(message)])


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[SlowKernel]:
    slow = SlowKernel(tmp_path, flush_s=0.2)
    task = asyncio.create_task(slow.run())
    yield slow
    task.cancel()
    for socket in (slow.shell, slow.iopub):
        socket.close(linger=0)


async def test_a_kernel_is_ready_when_it_has_finished_and_not_when_it_has_replied(
    kernel: SlowKernel, tmp_path: Path
) -> None:
    directory = os.open(tmp_path, os.O_PATH)
    try:
        client = await KernelClient.connect(directory, NAME, KEY, **BOUNDS, timeout_s=20)
        assert (kernel.unfinished, kernel.finished) == (0, 2)
        await client.aclose()
    finally:
        os.close(directory)
