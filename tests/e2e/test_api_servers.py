"""Several API servers of one `vllm serve`: each has the endpoint and the tools, and they share one state.

A connection stays with the process that accepted it, so a client knows its process. The last test
kills them: what a server started would keep its memory and its port.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from demo.server import NAME, Server, serve
from tests.support import scale, warm_vllm
from tests.support.machine import without_namespaces
from tests.support.places import ROOT
from tests.support.tools_nodes import ToolsNode
from vllm_gptoss.cli.doctor.orphans import orphans

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.serve,
    pytest.mark.soak,
    pytest.mark.namespaces,
    pytest.mark.timeout(600),
    pytest.mark.skipif(without_namespaces() is not None, reason=str(without_namespaces())),
]
KEY = "key of these servers"
PATIENCE_S = 120
GONE_WITHIN_S = 60
"""Ten until an engine is killed, and what a busy machine takes to let go of it."""
POPEN = subprocess.Popen if scale.SOAK else warm_vllm.popen
"""Five processes that import vLLM take 170 s of processor; forked ones take 15."""
PYTHON = [{"type": "code_interpreter", "container": {"type": "auto"}}]


@dataclass
class Servers:
    """The process group of one command, and a client for each of its API servers."""

    server: Server
    clients: list[httpx.Client] = field(default_factory=list)

    def connect(self, wanted: int) -> None:
        """Opens connections until there is one with each of `wanted` processes.

        A look at who has a connection can miss it, because the system's list of sockets changes while it is read.
        """
        found: dict[int, httpx.Client] = {}
        began = time.monotonic()
        while len(found) < wanted and time.monotonic() - began < PATIENCE_S:
            client = httpx.Client(base_url=self.server.api, timeout=180)
            stream = client.get("/models").raise_for_status().extensions["network_stream"]
            own = stream.get_extra_info("client_addr")[1]
            pid = next((process.pid for process in self.processes() if own in peers(process)), None)
            if pid is None or pid in found:
                client.close()
            else:
                found[pid] = client
        self.clients = list(found.values())

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.server.process.pid)
        return [main, *main.children(recursive=True)]


def peers(process: psutil.Process) -> set[int]:
    """Ports at the other end of what `process` has accepted."""
    try:
        return {each.raddr.port for each in process.net_connections("tcp") if each.raddr}
    except psutil.Error:
        return set()


@pytest.fixture(scope="module")
def servers(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    home = tmp_path_factory.mktemp("api-servers")
    keys = home / "keys"
    keys.write_text(f"{KEY}\n")
    node = ToolsNode(home, keys)
    node.start()
    environment = {
        "XDG_STATE_HOME": str(home),
        "GPTOSS_TOOLS_KEY": KEY,
        "GPTOSS_BROWSER_DOCUMENTS": str(ROOT / "demo" / "documents"),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # each client keeps its connection to one process
    }
    arguments = ["--api-server-count", "2", "--distributed-executor-backend", "mp"]
    arguments += ["--tool-server", f"browser,service:{node.url}"]
    try:
        with serve(model_dir, home / "serve.log", arguments, environment, popen=POPEN) as server:
            servers = Servers(server)
            servers.connect(2)
            yield servers
    finally:
        node.kill()


def ask(client: httpx.Client, question: str, **fields: Any) -> dict[str, Any]:
    body = {"model": NAME, "input": question, "temperature": 0, **fields}
    answered = client.post("/responses", json=body)
    assert answered.status_code == 200, answered.text
    return dict(answered.json())


def text(response: dict[str, Any]) -> str:
    return str(response["output"][-1]["content"][0]["text"])


def test_every_server_has_the_endpoint_and_the_engine_says_once_that_the_plugin_is_active(servers: Servers) -> None:
    log = servers.server.log.read_text()
    assert len(re.findall(r"vllm-gptoss \S+ is active", log)) == 1
    assert {*re.findall(r"\((ApiServer_\d) .*Responses API of vllm-gptoss", log)} == {"ApiServer_0", "ApiServer_1"}
    assert len(servers.clients) == 2


def test_a_conversation_and_its_notebook_go_from_one_api_server_to_the_other(servers: Servers) -> None:
    one, other = servers.clients
    for first, second in ((one, other), (other, one)):
        made = ask(first, "Set x to 20 in Python, then double it.", tools=PYTHON)
        assert text(made) == "x is now 40."
        assert second.get(f"/responses/{made['id']}").json() == made
        include = ["code_interpreter_call.outputs"]
        more = ask(second, "Add one to it.", tools=PYTHON, previous_response_id=made["id"], include=include)
        assert text(more) == "x + 1 is 41."
        (call,) = (item for item in more["output"] if item["type"] == "code_interpreter_call")
        assert call["outputs"][0]["logs"].strip() == "41"


def test_a_background_response_is_followed_and_cancelled_at_the_other_api_server(servers: Servers) -> None:
    one, other = servers.clients
    made = ask(one, "What is the capital of France?", background=True)
    with other.stream("GET", f"/responses/{made['id']}", params={"stream": True, "starting_after": 2}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(3, 3 + len(events)))
    assert text(events[-1]["response"]) == "The capital of France is Paris."
    endless = ask(one, "Hello", background=True, ignore_eos=True, max_output_tokens=8000)
    cancelled = other.post(f"/responses/{endless['id']}/cancel").raise_for_status().json()
    assert cancelled["status"] == "cancelled"
    assert one.get(f"/responses/{endless['id']}").json()["status"] == "cancelled"


def test_everything_ends_with_the_killed_server(servers: Servers) -> None:
    """In `make soak` spawned, as vLLM does on a CPU for any VLLM_WORKER_MULTIPROC_METHOD."""
    main, *started = servers.processes()
    names = {child.pid: " ".join(child.cmdline()).strip() for child in started}
    for name, count in (("EngineCore", 1), ("Worker", 1), ("APIServer", 2)):
        assert sum(each.startswith(f"VLLM::{name}") for each in names.values()) == count, "\n".join(names.values())
    main.kill()
    servers.server.process.wait()
    began = time.monotonic()
    _, alive = psutil.wait_procs(started, timeout=GONE_WITHIN_S)
    assert not alive, f"still there after {time.monotonic() - began:.0f} s: {[names[each.pid] for each in alive]}"
    assert not names.keys() & {orphan.pid for orphan in orphans()}
