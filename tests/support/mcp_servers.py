"""MCP servers for the session's model server, one per transport: a test may delay one, kill it, restart it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.server import reserved

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class McpServer:
    """One server. Over stdio the model server starts it; over HTTP we do, at a port that stays its own."""

    transport: str
    folder: Path
    held: socket.socket = field(default_factory=reserved)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir()

    @property
    def port(self) -> int:
        return int(self.held.getsockname()[1])

    @property
    def arguments(self) -> list[str]:
        return ["-m", "tests.support.mcp_server", self.transport, str(self.folder), str(self.port)]

    @property
    def config(self) -> dict[str, Any]:
        """Its entry in tools.yaml."""
        if self.transport == "stdio":
            return {"command": sys.executable, "args": self.arguments, "cwd": str(ROOT)}
        path = "sse" if self.transport == "sse" else "mcp"
        return {"url": f"http://127.0.0.1:{self.port}/{path}"}

    def start(self) -> None:
        if self.transport != "stdio":
            self.process = subprocess.Popen([sys.executable, *self.arguments], cwd=ROOT)

    def hold(self) -> None:
        """From now on its calls never answer."""
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "hold").touch()

    def kill_in_call(self, patience: float = 60) -> None:
        """Waits until a call hangs in it, and kills it as `kill -9` does. The next process answers again."""
        began = time.monotonic()
        while not (self.folder / "held").exists():
            assert time.monotonic() - began < patience, "no call arrived"
            time.sleep(0.02)
        (self.folder / "hold").unlink()
        os.kill(int((self.folder / "held").read_text()), signal.SIGKILL)
        if self.process:
            self.process.wait()

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
        self.held.close()


@dataclass(frozen=True)
class McpServers:
    """All three, and the tools.yaml that names them; nothing listens at the third port."""

    streamable_http: McpServer
    stdio: McpServer
    sse: McpServer
    nobody: socket.socket

    @classmethod
    def under(cls, folder: Path) -> McpServers:
        servers = {name: McpServer(name, folder / name) for name in ("streamable_http", "stdio", "sse")}
        return cls(**servers, nobody=reserved())

    @property
    def all(self) -> tuple[McpServer, ...]:
        return (self.streamable_http, self.stdio, self.sse)

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """By the labels that the small model knows. `clock` is configured, and no server listens there."""
        http, stdio, sse = (server.config for server in self.all)
        return {
            "weather": http | {"allowed_tools": ["get_forecast", "get_alerts"]},
            "files": http | {"allowed_tools": ["delete_file"]},
            "calc": stdio | {"allowed_tools": ["add"]},
            "echo": sse | {"allowed_tools": ["repeat"]},
            "media": sse | {"allowed_tools": ["picture"]},
            "clock": {"url": f"http://127.0.0.1:{self.nobody.getsockname()[1]}/mcp"},
        }
