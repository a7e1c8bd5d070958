"""`doctor --ray`: doctor's checks on every node of a Ray cluster, one task each, and what differs between nodes.

Ray starts the tasks. A task asks for no CPU and no GPU, so that it runs beside a server that has them all, and starts
an interpreter of its node: a node whose packages are broken or missing is told, and breaks nothing else.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_gptoss.doctor.findings import Finding, Findings, Status

LIMIT_S = 180.0
"""For one node's checks; all nodes work at once. vLLM's discovery alone may take a minute on a cold disk."""
CONNECT_S = 30.0
MODULE = "vllm_gptoss.doctor.node"
EXPECTED_DEATHS = (1, 4)
"""`EXPECTED_TERMINATION`, `AUTOSCALER_DRAIN_IDLE` of ray.rpc.NodeDeathInfo: Ray lists nodes that were meant to go."""


class ClusterError(RuntimeError):
    """No cluster can be asked; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster. facts: what `doctor.node` said, empty where it said nothing; trouble: then why."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""


def ask(address: str, limit_s: float) -> list[Node]:
    """Every node that Ray lists, those that have died included, in the order of their names.

    Raises:
        ClusterError: ray is not installed, or no cluster answers at `address`.
    """
    with contextlib.redirect_stdout(sys.stderr):  # where Ray tells what happens to nodes; ours may be JSON
        ray = _connected(address)
        try:
            listed = ray.nodes()
            alive = {node["NodeID"]: _name(node) for node in listed if node["Alive"]}
            dead = [Node(_name(node), trouble=why) for node in listed if not node["Alive"] and (why := _death(node))]
            return sorted([*_answers(ray, alive, limit_s), *dead], key=lambda node: node.name)
        finally:
            ray.shutdown()


def _connected(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise ClusterError(
            "ray is not installed here: run this in the image of the cluster's nodes, or pip install"
            " 'vllm-gptoss[ray]' with the version of ray that the cluster has"
        ) from None
    failed: list[Exception] = []

    def connect() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # ConnectionError, or another of a cluster that does not fit
            failed.append(error)

    # Ray itself tries for minutes where nobody answers, and nothing interrupts it.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    if thread.is_alive() or failed:
        why = str(failed[0]).strip() if failed else f"nothing answered in {CONNECT_S:.0f} s"
        raise ClusterError(
            f"no Ray cluster at {address}: {why}. Run this on a node of the cluster, in its head's container for"
            " instance, and name another cluster with --ray-address"
        )
    return ray


def _answers(ray: Any, alive: Mapping[str, str], limit_s: float) -> Iterator[Node]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(_task(limit_s))
    asked = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(identifier, soft=False)).remote(): name
        for identifier, name in alive.items()
    }
    deadline = time.monotonic() + limit_s + 10  # a worker must start first, and end its child after
    for reference, name in asked.items():
        try:
            code, said, complained = ray.get(reference, timeout=max(deadline - time.monotonic(), 0))
        except ray.exceptions.GetTimeoutError:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
            yield Node(name, trouble=f"did not answer in {limit_s:.0f} s")
        except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
            yield Node(name, trouble="died: it went while it was asked")
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            yield Node(name, trouble=f"the check could not run: {lines[-1].strip()}")
        else:
            yield _read(name, code, said, complained)


def _task(limit_s: float) -> Any:
    """What runs on a node. It is pickled by value, being no module's: a node without the plugin can run it too."""
    module = MODULE

    def check() -> tuple[int | None, str, str]:
        import os
        import subprocess
        import sys

        # Ray hides GPUs from a task that asks for none.
        hidden = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        environ = {name: value for name, value in os.environ.items() if name not in hidden}
        command = [sys.executable, "-P", "-m", module]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environ)
        except subprocess.TimeoutExpired:
            return None, "", f"its checks took more than {limit_s:.0f} s"
        return done.returncode, done.stdout[-1_000_000:], done.stderr[-2000:]

    return check


def _read(name: str, code: int | None, said: str, complained: str) -> Node:
    try:
        if code == 0:
            return Node(name, json.loads(said.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        complained = "its answer is not whole"
    if f"No module named '{MODULE.partition('.')[0]}'" in complained:
        return Node(name, trouble="vllm-gptoss is not installed there")
    last = complained.strip().splitlines()[-1:] or [f"exit code {code}"]
    return Node(name, trouble=last[0])


def _name(node: Mapping[str, Any]) -> str:
    """As Ray's dashboard has it, and enough of the id to tell nodes of one host apart."""
    return f"{node['NodeManagerAddress']} {node['NodeID'][:8]}"


def _death(node: Mapping[str, Any]) -> str:
    """Why a node that died did so; empty where that was meant."""
    if node.get("DeathReason") in EXPECTED_DEATHS:
        return ""
    return f"died: {str(node.get('DeathReasonMessage') or 'Ray does not say why').strip()}"


def judge(nodes: Sequence[Node]) -> list[Finding]:
    """What is wrong on a node, with its name, and what differs between nodes."""
    there = [node for node in nodes if node.facts]
    # A node without a GPU, as a cluster's head often is, runs no engine where others have GPUs.
    engines = [node for node in there if node.facts["accelerators"]] or there
    checks = (_silent(nodes), _troubles(engines), _differences(there, engines))
    return [finding for check in checks for finding in check]


def _silent(nodes: Sequence[Node]) -> Findings:
    for node in nodes:
        if node.trouble.startswith("died: "):
            fix = "start it again, or leave it out for good"
            yield Finding(Status.WARNING, "node is dead", f"{node.name} {node.trouble}", fix)
        elif "not installed" in node.trouble:
            fix = "build the image of every node from one recipes/deploy/Dockerfile: Ray's workers import it too"
            yield Finding(Status.PROBLEM, "node without the plugin", f"{node.name}: {node.trouble}", fix)
        elif node.trouble:
            fix = "run `vllm-gptoss doctor` on that node"
            yield Finding(Status.PROBLEM, "node did not answer", f"{node.name}: {node.trouble}", fix)


def _troubles(nodes: Sequence[Node]) -> Findings:
    """Each problem and warning once, with the nodes that have it."""
    seen: dict[Finding, list[str]] = {}
    for node in nodes:
        for each in node.facts["findings"]:
            finding = Finding(Status(each["status"]), each["check"], each["detail"], each["fix"])
            if finding.status in (Status.WARNING, Status.PROBLEM):
                seen.setdefault(finding, []).append(node.name)
    for finding, names in seen.items():
        where = "every node" if len(names) == len(nodes) else ", ".join(names)
        yield Finding(finding.status, finding.check, f"{where}: {finding.detail}", finding.fix)


def _differences(nodes: Sequence[Node], engines: Sequence[Node]) -> Findings:
    """All nodes must have the same versions; those of one engine must be alike in everything."""
    fix = "give every node the same image and the same driver, or keep nodes that differ in clusters of their own"
    for name in ("vllm-gptoss", "vllm", "torch"):
        values = {node.name: node.facts["versions"][name] for node in nodes}
        yield from _difference(f"nodes differ: {name}", values, fix)
    for name in ("device", "driver"):
        yield from _difference(f"nodes differ: {name}", {node.name: node.facts[name] for node in engines}, fix)
    fix = "set the same GPTOSS_* variables on every node: one engine must choose alike on all of them"
    for name in dict.fromkeys(name for node in engines for name in node.facts["choices"]):
        values = {node.name: node.facts["choices"].get(name, "nothing") for node in engines}
        yield from _difference(f"nodes differ: {name}", values, fix)


def _difference(check: str, values: Mapping[str, str], fix: str) -> Findings:
    by_value: dict[str, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault(value, []).append(name)
    if len(by_value) > 1:
        detail = "; ".join(f"{value} on {', '.join(names)}" for value, names in by_value.items())
        yield Finding(Status.PROBLEM, check, detail, fix)


def as_data(nodes: Sequence[Node], findings: Sequence[Finding]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"nodes": [asdict(node) for node in nodes], "findings": [asdict(finding) for finding in findings]}


def rows(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """(name, what it is and chose) of each node, for the table."""
    for node in nodes:
        if not node.facts:
            yield node.name, node.trouble
            continue
        facts = node.facts
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        chosen = (f"{name}: {choice}" for name, choice in facts["choices"].items())
        yield node.name, "\n".join([f"{facts['device']}, CUDA driver {facts['driver']}", versions, *chosen])
