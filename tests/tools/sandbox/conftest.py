"""A host with something to find, and a provider with programs that look for it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.tools.sandbox.attempts import OPTIONS, SHOWS_TMP, Host
from vllm_gptoss.tools.python import PythonProvider


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """All of it is open to everybody: what keeps a program away must be the cage, not the file's permissions."""
    secret = f"canary-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shown = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # not below: its path is seen inside
        model, sample = directory / "model-00001-of-00001.safetensors", shown / "sample.csv"
        for path in (model, sample):
            path.write_text(secret if path == model else "1,2")
            path.chmod(0o666)
        directory.chmod(0o777)
        shown.chmod(0o777)
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("GPTOSS_TEST_TOKEN", secret)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + secret)
        abstract.listen()
        path_socket = str(directory / "s")
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(path_socket)
        os.chmod(path_socket, 0o666)
        local.listen()
        yield Host(secret, directory, model, shown, tcp.getsockname()[1], os.getpid(), secret, path_socket)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(host: Host) -> AsyncIterator[PythonProvider]:
    shown = (host.shown,) if SHOWS_TMP else ()
    provider = PythonProvider(OPTIONS.model_copy(update={"read_only_paths": shown}))
    await provider.start()
    assert provider.unavailable is None, provider.unavailable
    yield provider
    await provider.aclose()
