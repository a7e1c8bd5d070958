"""The command: each form of a recipe says the same, and what is wrong ends with a code and a remedy."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ID = "20b-h100-latency-eagle3"


def recipe(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_gptoss.cli", "recipe", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "GPTOSS_"))} | environ
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_every_form_says_the_same() -> None:
    config = yaml.safe_load(recipe("show", ID, "--config").stdout)
    words = shlex.split(recipe("show", ID, "--command").stdout)
    docker = shlex.split(recipe("show", ID, "--docker").stdout)
    upstream = yaml.safe_load(recipe("show", ID, "--upstream").stdout)["model"]
    assert words[:3] == ["vllm", "serve", config["model"]]
    assert docker[-len(words) + 2 :] == words[2:]
    assert [upstream["model_id"], *upstream["base_args"]] == words[2:]
    assert json.loads(words[words.index("--speculative-config") + 1]) == config["speculative-config"]


def test_variables_come_with_every_form() -> None:
    name = "120b-8xmi300x-latency"
    assert "export VLLM_ROCM_USE_AITER=1\n" in recipe("show", name, "--env").stdout
    assert recipe("show", name, "--command").stdout.startswith("VLLM_ROCM_USE_AITER=1 ")
    assert "-e VLLM_ROCM_USE_AITER=1" in recipe("show", name, "--docker").stdout
    assert recipe("show", ID, "--env").stdout == ""


def test_serve_runs_vllm_with_the_recipe_and_what_comes_after(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "$VLLM_ROCM_USE_AITER" "$@"\nexit 7\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = recipe("serve", "20b-mi355x-agent", "--", "--port", "9000", PATH=path)
    assert done.returncode == 7
    first, *words = done.stdout.split()
    assert first == "1"
    assert words[:2] == ["serve", "openai/gpt-oss-20b"]
    assert words[-2:] == ["--port", "9000"]


def test_serve_without_vllm_says_what_to_do() -> None:
    done = recipe("serve", ID, PATH="/nonexistent")
    assert done.returncode == 1
    assert "vllm-gptoss doctor" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "20b-h10-latency"], "near: 20b-h100-latency"),
        (["list", "--device", "H10"], "there are"),
        (["check", "/nowhere.yaml"], "/nowhere.yaml: No such file"),
        (["check", "--release", "--today", "yesterday"], "yesterday"),
    ],
)
def test_what_is_asked_wrongly_ends_with_2(arguments: list[str], said: str) -> None:
    done = recipe(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_list_is_for_the_machine_that_is_named() -> None:
    rows = json.loads(recipe("list", "--device", "8xH100", "--json").stdout)
    assert {row["device"] for row in rows} == {"8xH100"}
    done = recipe("list", "--device", "5xH100", "--json")
    assert "these use fewer" in done.stderr
    assert json.loads(done.stdout)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_users_command_and_file_are_judged(tmp_path: Path) -> None:
    line = ["vllm", "serve", "openai/gpt-oss-120b", "--attention-backend", "ROCM_AITER_UNIFIED_ATTN", "-tp", "4"]
    done = recipe("check", "--device", "MI300X", "--", *line, VLLM_USE_TRTLLM_ATTENTION="1")
    assert done.returncode == 1
    assert "is AITER's, which is off; set VLLM_ROCM_USE_AITER=1" in done.stdout
    assert "uses 4 GPUs, MI300X has 1" in done.stdout
    assert "nothing reads VLLM_USE_TRTLLM_ATTENTION" in done.stdout
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: openai/gpt-oss-20b\nkv-cache-dtype: fp8\n")
    done = recipe("check", str(mine), "--device", "H100")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("advice: vllm serve: --kv-cache-dtype fp8 costs the fused layers")
