"""Servers on one store behind HAProxy, killed without a word and started again at the same address."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from demo.server import ARGUMENTS, ENVIRONMENT, command, reserved
from tests.support import warm_vllm

HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
NO_HAPROXY = "there is no haproxy: the distribution's package has it"
PATIENCE = 400.0  # seconds for a process to start on a busy machine
SERVED_BY = "x-replica"
"""The balancer's header with the replica that answered: `r0`, `r1`, …"""

BALANCER = """
defaults
  mode http
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  retries 3
  option redispatch
frontend all
  bind 127.0.0.1:{port}
  http-response set-header {served_by} %s
  default_backend replicas
backend replicas
  balance random(1)
  default-server check inter 100ms fall 1 rise 1
{servers}
"""


class Restarted:
    """A server that is killed without a word and started again at the same address."""

    log: Path
    held: socket.socket
    process: Any

    @property
    def port(self) -> int:
        return int(self.held.getsockname()[1])

    def start(self) -> None:
        """Returns when it answers."""
        self.spawn()
        self.wait()

    def spawn(self) -> None:
        raise NotImplementedError

    def is_there(self) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        """Returns when it answers."""
        began = time.monotonic()
        assert self.process is not None
        while not self.is_there():
            assert self.process.poll() is None, self.log.read_text()[-10_000:]
            assert time.monotonic() - began < PATIENCE, self.log.read_text()[-10_000:]
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@dataclass
class Replica(Restarted):
    """A replay server. `store`: the database's URL; `tools`: what `--tool-server` takes. `later`: of the next release,
    from its next start on."""

    store: str
    tools: str
    log: Path
    clock: float = 0.0
    heartbeat: float = 3.0
    environment: Mapping[str, str] = field(default_factory=dict)
    later: bool = False
    held: socket.socket = field(default_factory=reserved)
    process: Any = None

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def spawn(self) -> None:
        with self.log.open("a") as log:
            self.process = warm_vllm.popen(
                self.command(), env={**os.environ, **self.settings()}, stdout=log, stderr=subprocess.STDOUT
            )

    def settings(self) -> dict[str, str]:
        return {"GPTOSS_RESPONSES_HEARTBEAT": str(self.heartbeat), **self.environment}

    def command(self) -> Sequence[str]:
        command = [sys.executable, "-m", "tests.e2e.replay_server", self.tools, self.store, "--port", str(self.port)]
        return [*command, "--rate", "100", "--clock", str(self.clock), *(["--later"] if self.later else [])]

    def is_there(self) -> bool:
        try:
            return httpx.get(f"{self.api}/responses/none", timeout=5).status_code == 404
        except httpx.HTTPError:
            return False

    async def has(self, kept: Mapping[str, Any]) -> None:
        async with httpx.AsyncClient(base_url=self.api, timeout=60) as http:
            for identifier, response in kept.items():
                assert (await http.get(f"/responses/{identifier}")).json() == response


@dataclass
class VllmReplica(Replica):
    """`vllm serve` with the bundled model; the real engine in a separate process."""

    model: Path = Path()

    def command(self) -> Sequence[str]:
        return command(self.model, self.port, ARGUMENTS, ["--tool-server", self.tools])

    def settings(self) -> dict[str, str]:
        return {**super().settings(), **ENVIRONMENT, "GPTOSS_STORE": self.store}


@contextmanager
def balancer(replicas: Sequence[Replica], home: Path) -> Iterator[str]:
    """HAProxy in front of `replicas`; its address."""
    held = reserved()
    port = held.getsockname()[1]
    servers = "\n".join(f"  server r{n} 127.0.0.1:{replica.port}" for n, replica in enumerate(replicas))
    config = home / "haproxy.cfg"
    config.write_text(BALANCER.format(port=port, servers=servers, served_by=SERVED_BY))
    assert HAPROXY is not None, NO_HAPROXY
    with held, subprocess.Popen([HAPROXY, "-db", "-q", "-f", str(config)]) as process:
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()
