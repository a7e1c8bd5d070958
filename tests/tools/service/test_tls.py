"""A proxy that ends TLS in front of a node, as docs/tools.md has it: calls, images and files come through it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import certificate
from tests.support.machine import without_namespaces
from tests.support.notebooks import started
from tests.support.places import ROOT
from tests.support.servers import running
from tests.support.sockets import listening
from vllm_gptoss.tools.gate import gated
from vllm_gptoss.tools.protocol import File, SessionOptions, ToolCall
from vllm_gptoss.tools.serve import http_app
from vllm_gptoss.tools.service.access import VARIABLE, load_keys
from vllm_gptoss.tools.service.nodes import ServiceProvider
from vllm_gptoss.tools.service.settings import ServiceConfig

HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
KEY = "a key that is long enough"


def documented() -> str:
    """HAProxy's configuration in docs/tools.md."""
    (found,) = re.findall(r"```haproxy\n(.*?)```", (ROOT / "docs" / "tools.md").read_text(), re.DOTALL)
    return str(found)


@pytest.mark.skipif(HAPROXY is None, reason="there is no haproxy: the distribution's package has it")
@pytest.mark.skipif(without_namespaces() is not None, reason=str(without_namespaces()))
async def test_calls_and_files_pass_the_documented_proxy(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "localhost")
    (tmp_path / "both.pem").write_text(Path(cert).read_text() + Path(key).read_text())
    with listening() as listener:
        port = listener.getsockname()[1]
    python = await started(warm=0, preload=[], timeout_s=20, memory_mib=512)
    keys = load_keys(None, {VARIABLE: KEY})
    async with running(http_app([gated(python)], "127.0.0.1", keys)) as url:
        config = documented().replace("/etc/haproxy/tools-1.pem", str(tmp_path / "both.pem"))
        config = config.replace("bind :8443", f"bind 127.0.0.1:{port}").replace("127.0.0.1:8001", url[7:])
        (tmp_path / "haproxy.cfg").write_text(config)
        command = [str(HAPROXY), "-db", "-q", "-f", str(tmp_path / "haproxy.cfg")]
        proxy = await asyncio.create_subprocess_exec(*command)
        node = f"https://localhost:{port}"
        service = ServiceProvider(
            ServiceConfig(nodes=[node], ca_file=Path(cert), connect_timeout_s=30), {"GPTOSS_TOOLS_KEY": KEY}
        )
        try:
            async with asyncio.timeout(60), httpx.AsyncClient(verify=False) as client:
                while True:
                    try:
                        if (await client.get(f"{node}/health")).status_code == 200:
                            break
                    except httpx.TransportError:
                        await asyncio.sleep(0.05)
            await service.start()
            assert service.unavailable is None
            session = await service.open("c", SessionOptions())
            made = await session.call(ToolCall("1", "python", None, "open('/mnt/data/f', 'w').write('x')"))
            (file,) = [part for part in made.content if isinstance(part, File)]
            found = await service.read_file(file.container_id, file.file_id)
            assert found.data == b"x"
            await session.aclose()
        finally:
            proxy.kill()
            await proxy.wait()
            await service.aclose()
            await python.aclose()
