"""vLLM's parallelism, with two processes as two nodes: the plugin is active in each and logs one line for the group;
endpoint and tools work in every process that serves HTTP.

The weights are dummies: vLLM's CPU experts cannot split the small model's.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.server import ARGUMENTS, NAME, Server, reserved, serve
from tests.support import many_cpus, scale
from tests.support.machine import without_namespaces

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.serve,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not scale.SOAK, reason="two engines each: `make soak` runs it"),
    pytest.mark.skipif(without_namespaces() is not None, reason=str(without_namespaces())),
]
TWO = ["--data-parallel-size", "2"]
ADDRESS = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port"]
HYBRID = ["--data-parallel-hybrid-lb", "--data-parallel-size-local", "1", "--data-parallel-start-rank"]
CASES = {
    "internal": [[*TWO, "--api-server-count", "2"]],
    "external": [[*TWO, "--data-parallel-rank", rank, *ADDRESS, "{port}"] for rank in "01"],
    "hybrid": [[*TWO, *HYBRID, rank, *ADDRESS, "{port}"] for rank in "01"],
}


@pytest.fixture(scope="module")
def wide_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's files without its weights, and experts that two ranks can share."""
    folder = tmp_path_factory.mktemp("wide")
    for path in model_dir.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((model_dir / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    return folder


@pytest.fixture(params=CASES)
def nodes(request: pytest.FixtureRequest, wide_model: Path, tmp_path: Path) -> Iterator[list[Server]]:
    """The servers of a case. They wait for one another, so that all are started at once."""
    with reserved() as held:
        port = str(held.getsockname()[1])
    environment = {
        "XDG_STATE_HOME": str(tmp_path),
        "GPTOSS_STRICT_TOOLS": "0",
        **many_cpus.environment(tmp_path / "plugin"),
    }
    base = [*ARGUMENTS, "--load-format", "dummy", "--logits-processors", "tests.support.call_once:CallsOnce"]
    started: dict[int, Server] = {}
    with ExitStack() as stack:

        def start(number: int, words: list[str]) -> None:
            arguments = [word.format(port=port) for word in words]
            log = tmp_path / f"serve-{number}.log"
            up = serve(wide_model, log, [*arguments, "--tool-server", "demo"], environment, base_arguments=base)
            started[number] = stack.enter_context(up)

        threads = [threading.Thread(target=start, args=each) for each in enumerate(CASES[request.param])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(started) == len(threads), [log.read_text()[-2000:] for log in tmp_path.glob("*.log")]
        yield [started[number] for number in sorted(started)]


def test_the_group_says_once_that_it_is_active_and_each_server_has_endpoint_and_tools(nodes: list[Server]) -> None:
    logs = "".join(node.log.read_text() for node in nodes)
    assert len(re.findall(r"vllm-gptoss \S+ is active", logs)) == 1
    assert {*re.findall(r"\((?:Worker_DP)(\d)", logs)} == {"0", "1"}
    tools = [{"type": "code_interpreter", "container": {"type": "auto"}}]
    body: dict[str, Any] = {"model": NAME, "input": "x", "tools": tools, "include": ["code_interpreter_call.outputs"]}
    for node in nodes:
        for _ in range(4):  # a connection each: every API server, every engine
            answered = httpx.post(f"{node.api}/responses", json=body, timeout=180)
            assert answered.status_code == 200, answered.text
            response = answered.json()
            kinds = {item["type"]: item for item in response["output"]}
            assert kinds["code_interpreter_call"]["outputs"][0]["logs"].strip() == "42"
            assert kinds["message"]["content"][0]["text"] == "It is 42."
            for other in nodes:
                assert httpx.get(f"{other.api}/responses/{response['id']}", timeout=60).json() == response
