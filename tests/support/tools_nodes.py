"""Nodes of a tools service as separate processes, killed and started again at the same address."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from demo.server import reserved
from tests.support.places import ROOT
from tests.support.replicas import Restarted


@dataclass
class ToolsNode(Restarted):
    """`vllm-gptoss tools serve`. `options` are the python tool's."""

    home: Path
    keys: Path
    options: dict[str, object] = field(default_factory=dict)
    held: socket.socket = field(default_factory=reserved)
    process: Any = None

    def __post_init__(self) -> None:
        self.log = self.home / f"node-{self.port}.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def spawn(self) -> None:
        spec = self.home / f"node-{self.port}.yaml"
        small = {"warm": 0, "timeout_s": 20, "memory_mib": 512, "preload": []}
        spec.write_text(yaml.safe_dump({"python": small | self.options}))
        command = [sys.executable, "-m", "vllm_gptoss.cli", "tools", "serve", str(spec), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--keys-file", str(self.keys)], cwd=ROOT, stdout=log, stderr=log)

    def is_there(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.HTTPError:
            return False
