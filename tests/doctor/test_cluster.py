"""`doctor --ray` over a real Ray cluster: every node is asked, a difference is told, a node that is gone is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import rays
from tests.support.places import ROOT
from tests.support.sockets import listening
from vllm_gptoss.doctor import cluster
from vllm_gptoss.doctor.cluster import Node

needs_ray = pytest.mark.skipif(not rays.can("doctor"), reason=rays.MISSING)


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_gptoss.cli", "doctor", "--ray", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, timeout=800)


@dataclass
class Cluster:
    process: subprocess.Popen[str]
    address: str

    def kill_the_second(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "killed\n"


@pytest.fixture
def two_nodes() -> Iterator[Cluster]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_cluster"], cwd=ROOT, env=os.environ | rays.environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield Cluster(process, process.stdout.readline().strip())
    finally:
        process.communicate(timeout=60)


@needs_ray
@pytest.mark.slow
@pytest.mark.vllm
def test_every_node_is_asked_and_what_differs_is_a_finding(two_nodes: Cluster) -> None:
    # Two interpreters that import vLLM beside another test's engine took more than 180 s of two slow cores.
    done = doctor("--ray-address", two_nodes.address, "--json", "--node-timeout", "600", **rays.environment())
    said: dict[str, Any] = json.loads(done.stdout)
    first, second = said["nodes"]
    assert not first["trouble"] + second["trouble"]
    assert first["facts"]["versions"] == second["facts"]["versions"]
    chosen = {node["facts"]["choices"]["experts"].split()[0] for node in said["nodes"]}
    assert chosen > {"upstream"}
    (difference,) = (each for each in said["findings"] if each["check"].startswith("nodes differ"))
    assert difference["check"] == "nodes differ: experts"
    assert all(node["name"] in difference["detail"] for node in said["nodes"])
    assert done.returncode == 1
    two_nodes.kill_the_second()
    late = doctor("--ray-address", two_nodes.address, "--json", "--node-timeout", "1", **rays.environment())
    said = json.loads(late.stdout)
    assert [node["name"] for node in said["nodes"]] == [first["name"], second["name"]]
    # As far as Ray has noticed, and as busy as the machine is.
    ends = ("died: ", "did not answer in 1 s", "its checks took more than 1 s", "the check could not run: ")
    assert all(node["trouble"].startswith(ends) for node in said["nodes"])
    assert len(said["findings"]) == 2
    assert late.returncode == 1


def test_without_ray_the_error_says_what_to_install() -> None:
    done = doctor()
    assert done.returncode == 2
    assert "pip install 'vllm-gptoss[ray]'" in done.stderr
    assert "Traceback" not in done.stderr


@needs_ray
def test_where_no_cluster_answers_the_error_says_where_to_run() -> None:
    with listening() as listener:  # it accepts, and says nothing
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        code = (
            "from vllm_gptoss import cli; from vllm_gptoss.doctor import cluster; cluster.CONNECT_S = 3;"
            f"cli.app(['doctor', '--ray', '--ray-address', '{address}'])"
        )
        environment = os.environ | rays.environment()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert f"no Ray cluster at {address}: nothing answered in 3 s" in done.stderr
    assert "Run this on a node of the cluster" in done.stderr


def facts(**changed: Any) -> dict[str, Any]:
    return {
        "versions": {"vllm-gptoss": "1", "vllm": "0.33.0", "torch": "2.14"},
        "device": "8 x H100", "accelerators": 8, "driver": "13.0", "choices": {"experts": "gptoss (measured)"},
        "findings": [], **changed,
    }  # fmt: skip


def checks(*nodes: Node) -> list[str]:
    return [finding.check for finding in cluster.judge(nodes)]


def test_nodes_that_are_alike_have_no_finding() -> None:
    assert checks(Node("a", facts()), Node("b", facts())) == []


@pytest.mark.parametrize("name", ["device", "driver"])
def test_another_gpu_or_driver_is_told(name: str) -> None:
    assert checks(Node("a", facts()), Node("b", facts(**{name: "other"}))) == [f"nodes differ: {name}"]


def test_a_head_without_a_gpu_differs_in_versions_only() -> None:
    problem = {"status": "problem", "check": "vLLM", "detail": "it finds no device", "fix": "give it one"}
    head = facts(device="a CPU", accelerators=0, driver="none", choices={"experts": "native"}, findings=[problem])
    assert checks(Node("head", head), Node("b", facts())) == []
    head["versions"] = {**head["versions"], "vllm": "0.32.0"}
    assert checks(Node("head", head), Node("b", facts())) == ["nodes differ: vllm"]


def test_a_problem_of_every_node_is_told_once() -> None:
    problem = {"status": "problem", "check": "harmony", "detail": "two own it", "fix": "remove one"}
    (found,) = cluster.judge([Node("a", facts(findings=[problem])), Node("b", facts(findings=[problem]))])
    assert found.detail == "every node: two own it"
    (found,) = cluster.judge([Node("a", facts(findings=[problem])), Node("b", facts())])
    assert found.detail == "a: two own it"


def test_a_node_without_the_plugin_is_told_what_to_do() -> None:
    node = cluster._read("a", 1, "", "/usr/bin/python3: Error: No module named 'vllm_gptoss'")
    (found,) = cluster.judge([node, Node("b", facts())])
    assert found.check == "node without the plugin"
    assert "image" in found.fix
