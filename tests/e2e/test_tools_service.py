"""Replicas with python on separate nodes: a notebook follows its conversation to every replica, and a node's losses are
reported."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.server import NAME
from tests.support import scale
from tests.support.machine import without_namespaces
from tests.support.places import ROOT
from tests.support.s3 import IS_HERE, storage
from tests.support.tools_nodes import ToolsNode

pytestmark = [
    pytest.mark.slow,
    pytest.mark.namespaces,
    pytest.mark.skipif(without_namespaces() is not None, reason=str(without_namespaces())),
]
KEY = "key of these replicas"
NEW = "This python session is new"
DONE = "<|channel|>final<|message|>Done.<|return|>"


@dataclass
class Service:
    """Two nodes of the tools service, and replicas that share a store. `ask` runs code through one replica."""

    nodes: list[ToolsNode]
    replicas: list[httpx.Client] = field(default_factory=list)

    def ask(self, replica: int, code: str, **fields: Any) -> dict[str, Any]:
        turns = [f"<|channel|>analysis to=python code<|message|>{code}<|call|>", DONE]
        body = {"model": NAME, "input": json.dumps(turns), "tools": [PYTHON], **fields}
        body["include"] = ["code_interpreter_call.outputs"]
        answered = self.replicas[replica].post("/v1/responses", json=body)
        assert answered.status_code == 200, answered.text
        response: dict[str, Any] = answered.json()
        assert response["status"] == "completed", response
        return response

    def holder(self) -> ToolsNode:
        """The node that a call was made on, of those that have not been looked at."""
        busy = [node for node in self.nodes if "tool call response_id" in node.log.read_text()]
        assert len(busy) == 1
        return busy[0]


PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}


def call_of(response: dict[str, Any]) -> dict[str, Any]:
    (call,) = [item for item in response["output"] if item["type"] == "code_interpreter_call"]
    return dict(call)


def said(response: dict[str, Any]) -> str:
    """The call's result as the model read it."""
    return "".join(out["logs"] for out in call_of(response)["outputs"] if out["type"] == "logs")


def replica(stack: ExitStack, tools: str, home: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.e2e.replay_server", tools, str(home / "store.sqlite")]
    environment = {**os.environ, "GPTOSS_TOOLS_KEY": KEY}
    with (home / "replicas.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    stack.callback(process.stdout.close)
    stack.callback(process.wait)
    stack.callback(process.send_signal, signal.SIGKILL)
    return process


def client(stack: ExitStack, process: subprocess.Popen[str], home: Path) -> httpx.Client:
    port = process.stdout.readline().strip()
    assert port, (home / "replicas.log").read_text()
    return stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("service")
    keys = home / "keys"
    keys.write_text(f"{KEY}\n")
    with ExitStack() as stack:
        place = stack.enter_context(storage()) if IS_HERE else str(home / "kept")
        nodes = [ToolsNode(home, keys, {"files": place}) for _ in range(2)]
        for node in nodes:
            stack.callback(node.kill)
            node.spawn()
        for node in nodes:
            node.wait()
        tools = ",".join(f"service:{node.url}" for node in nodes)
        processes = [replica(stack, tools, home) for _ in range(2)]
        yield Service(nodes, [client(stack, process, home) for process in processes])


def test_a_notebook_follows_its_conversation_over_replicas_and_is_told_when_its_node_dies(service: Service) -> None:
    first = service.ask(0, "x = 41; open('/mnt/data/kept.txt', 'w').write('kept')")
    container = call_of(first)["container_id"]
    # The other replica has never met this container.
    (file,) = service.replicas[1].get(f"/v1/containers/{container}/files").json()["data"]
    second = service.ask(1, "print(x + 1)", previous_response_id=first["id"])
    assert said(second) == "42\n"
    assert call_of(second)["container_id"] == container
    lost = service.holder()
    lost.kill()
    third = service.ask(0, "print('x' in globals())", previous_response_id=second["id"])
    assert NEW in said(third)
    assert said(third).endswith("False\n")
    fourth = service.ask(1, "x = 1; print(x)", previous_response_id=third["id"])
    assert said(fourth) == "1\n"
    content = f"/v1/containers/{container}/files/{file['id']}/content"
    for each in service.replicas:
        assert each.get(content).text == "kept", "the other node gives it out: both keep files in one place"
        assert each.get(content, headers={"Authorization": "Bearer somebody else"}).status_code == 404
    lost.start()
    fifth = service.ask(0, "print(x)", previous_response_id=fourth["id"])
    assert said(fifth) == "1\n", "it stays where it went"
    anew = [service.ask(n % 2, "print(1)") for n in range(6)]
    assert {said(response) for response in anew} == {"1\n"}


def test_a_node_that_dies_in_a_call_costs_that_call_and_says_so(service: Service) -> None:
    start = service.ask(0, "import os; print(os.getpid())")
    marks = {node.url: node.log.stat().st_size for node in service.nodes}
    following = service.ask(1, "print('here')", previous_response_id=start["id"])
    (node,) = [n for n in service.nodes if "tool call" in n.log.read_text()[marks[n.url] :]]
    killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(3); os.kill({node.process.pid}, 9)"])
    broken = service.ask(0, "import time; time.sleep(15)", previous_response_id=following["id"])
    killer.wait()
    node.kill()
    assert "may have run" in said(broken)
    after = service.ask(1, "print(2)", previous_response_id=broken["id"])
    assert NEW in said(after)
    assert said(after).endswith("2\n")
    node.start()


TOLD = (NEW, "may have run", "No node of the tools service can be reached", "not the one that earlier calls ran in")
COUNT = "n = globals().get('n', 0) + 1; print('n =', n)"
TURNS, AT_ONCE = 6, 6


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_what_a_conversation_had_is_there_or_its_loss_is_told_whoever_is_killed(service: Service) -> None:
    """Each turn counts one up. Both nodes are killed and started again in turn, all the time."""
    count, over, seen = scale.count(200, 20), threading.Event(), Counter[str]()
    numbers = iter(range(count))
    began = time.monotonic()

    def converse() -> None:
        for number in numbers:
            chance, last, certain = random.Random(number), 0, True
            where: dict[str, Any] = {}
            history = []
            for _ in range(TURNS):
                response = service.ask(chance.randrange(2), COUNT, **where)
                text = said(response)
                history.append(text)
                found = re.search(r"n = (\d+)$", text.strip())
                if any(note in text for note in TOLD):
                    seen["told"] += 1
                    last, certain = (int(found[1]), True) if found else (last, False)
                else:
                    assert found, history
                    assert int(found[1]) in ((last + 1,) if certain else (last + 1, last + 2)), history
                    seen["counted on"] += 1
                    last, certain = int(found[1]), True
                where = {"previous_response_id": response["id"]}

    def chaos() -> None:
        while not over.is_set():
            for node in service.nodes:
                node.kill()
                seen["killed"] += 1
                node.start()
                over.wait(1)

    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        killing = pool.submit(chaos)
        talking = [pool.submit(converse) for _ in range(AT_ONCE)]
        try:
            for each in talking:
                each.result()
        finally:
            took = time.monotonic() - began
            over.set()
        killing.result()
    print(f"{count} conversations of {TURNS} turns in {took:.0f} s: {dict(seen)}")
    assert seen["counted on"] > seen["told"]
