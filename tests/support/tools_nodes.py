"""Nodes of a tools service as separate processes, killed and started again at the same address."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml

from demo.server import reserved
from tests.support.places import ROOT

PATIENCE = 120.0  # seconds for a process to start on a busy machine


@dataclass
class ToolsNode:
    """`vllm-gptoss tools serve`. `options` are the python tool's."""

    home: Path
    keys: Path
    options: dict[str, object] = field(default_factory=dict)
    held: socket.socket = field(default_factory=reserved)
    process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return int(self.held.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.home / f"node-{self.port}.log"

    def start(self) -> None:
        """Returns when it answers."""
        self.spawn()
        self.wait()

    def spawn(self) -> None:
        """Starts the process."""
        spec = self.home / f"node-{self.port}.yaml"
        small = {"warm": 0, "timeout_s": 20, "memory_mib": 512, "preload": []}
        spec.write_text(yaml.safe_dump({"python": small | self.options}))
        command = [sys.executable, "-m", "vllm_gptoss.cli", "tools", "serve", str(spec), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--keys-file", str(self.keys)], cwd=ROOT, stdout=log, stderr=log)

    def wait(self) -> None:
        """Returns when it answers."""
        began = time.monotonic()
        assert self.process is not None
        while True:
            try:
                httpx.get(f"{self.url}/health").raise_for_status()
                return
            except httpx.HTTPError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() - began < PATIENCE, self.log.read_text()
                time.sleep(0.1)

    def kill(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None
