"""`recipes/deploy/seccomp.json`, loaded with libseccomp as Docker does, and the python tool under it."""

from __future__ import annotations

import ctypes.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(ctypes.util.find_library("seccomp") is None, reason="needs libseccomp")

PROFILE = Path(__file__).resolve().parents[3] / "recipes" / "deploy" / "seccomp.json"
FORK_ONLY = [{"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]
"""Docker's own rule for clone: no flag of a new namespace."""
UNDER_PROFILE = """
import json, os, sys
import pyseccomp as kernel

def action(rule):
    return kernel.ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else kernel.ERRNO(rule["errnoRet"])

def argument(each):
    return kernel.Arg(each["index"], getattr(kernel, each["op"][9:]), each["value"], each.get("valueTwo", 0))

profile = json.loads(sys.argv[1])
syscalls = kernel.SyscallFilter(kernel.ERRNO(profile["defaultErrnoRet"]))
for rule in profile["syscalls"]:
    for name in rule["names"]:
        syscalls.add_rule(action(rule), name, *map(argument, rule.get("args", ())))
syscalls.load()
os.execv(sys.executable, [sys.executable, "-m", "vllm_gptoss.cli", "tools", "check", "python", "--json"])
"""


def tier(profile: dict[str, Any]) -> str:
    """The isolation that `tools check` reports for the python tool in a process with this profile."""
    command = [sys.executable, "-c", UNDER_PROFILE, json.dumps(profile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (line,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert line["problem"] is None, line
    return str(line["isolation"]).partition(":")[0]


def ours() -> tuple[dict[str, Any], dict[str, Any]]:
    """The profile, and its rule for the sandbox."""
    profile = json.loads(PROFILE.read_text())
    (rule,) = (rule for rule in profile["syscalls"] if "sandbox" in rule.get("comment", ""))
    return profile, rule


@pytest.mark.slow
def test_the_sandbox_uses_namespaces_under_the_profile_and_none_under_dockers_own() -> None:
    profile, rule = ours()
    assert tier(profile) == "namespaces"
    rule.update(names=["clone"], args=FORK_ONLY)
    assert tier(profile) == "portable"


def test_the_profile_is_of_the_form_that_docker_and_kubernetes_read() -> None:
    """Docker's own form has conditions, which the kubelet's runtimes ignore: these rules have none."""
    profile, _ = ours()
    assert set(profile) == {"defaultAction", "defaultErrnoRet", "architectures", "syscalls"}
    assert {key for each in profile["syscalls"] for key in each} <= {"names", "action", "args", "errnoRet", "comment"}
    names = [name for each in profile["syscalls"] if "args" not in each for name in each["names"]]
    assert len(set(names)) == len(names)
    refused = {"bpf", "setns", "init_module", "kexec_load", "open_by_handle_at", "keyctl", "io_uring_setup", "reboot"}
    assert not refused & set(names)
