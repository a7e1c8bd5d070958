"""What all tests share: one real `vllm serve` of the small model per session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from demo.server import Server, serve
from tests.e2e.mcp_servers import McpServers

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("GPTOSS_CACHE", ROOT / ".cache"))

# Short enough to wait for twice, long enough for a plot on two busy cores.
PYTHON = {"timeout_s": 6, "interrupt_grace_s": 1, "memory_mib": 512, "max_conversations": 12}


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small gpt-oss, expanded once and kept between runs."""
    from demo.expand import model_dir

    return model_dir(CACHE)


@pytest.fixture(scope="session")
def mcp_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[McpServers]:
    """MCP servers over streamable HTTP, SSE and stdio, which `served` knows."""
    servers = McpServers.under(tmp_path_factory.mktemp("mcp"))
    for server in servers.all:
        server.start()
    yield servers
    for server in servers.all:
        server.stop()


@pytest.fixture(scope="session")
def served(model_dir: Path, mcp_servers: McpServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the plugin and its own tools, started as a user would start it: `.url`, `.api`, `.log`."""
    home = tmp_path_factory.mktemp("served")
    tools = home / "tools.yaml"
    requests = {"allowed_hosts": ["127.0.0.1"]}
    tools.write_text(yaml.safe_dump({"python": PYTHON, "mcp": mcp_servers.config, "requests": requests}))
    environment = {"XDG_STATE_HOME": str(home), "GPTOSS_BROWSER_DOCUMENTS": str(ROOT / "demo" / "documents")}
    with serve(model_dir, home / "serve.log", ["--tool-server", f"demo,{tools}"], environment) as server:
        yield server
