"""The command: all forms of a recipe agree, and errors have an exit code and a remedy."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner

from tests.support import warm
from vllm_gptoss.cli.main import app
from vllm_gptoss.cli.recipes import draw, probe

ID = "20b-h100-latency-eagle3"
AITER = "20b-mi355x-agent"


def recipe(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`vllm-gptoss recipe …` in this process, except for `serve`, which becomes vLLM."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "GPTOSS_"))} | environ
    if arguments[0] == "serve":
        return warm.run(["-m", "vllm_gptoss.cli", "recipe", *arguments], environment)
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ, environment, clear=True):
        patch.setattr(probe, "subprocess", warm.PROBING)
        done = CliRunner().invoke(app, ["recipe", *arguments], catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def test_every_form_says_the_same() -> None:
    config = yaml.safe_load(recipe("show", ID, "--config").stdout)
    words = shlex.split(recipe("show", ID, "--command").stdout)
    assert words[:3] == ["vllm", "serve", config["model"]]
    assert json.loads(words[words.index("--speculative-config") + 1]) == config["speculative-config"]


def test_without_a_form_all_of_a_recipe_is_said() -> None:
    said = recipe("show", "120b-h100-latency").stdout
    assert said.startswith("120b-h100-latency: measured, hopper.yaml:")
    assert "measured: 2.49 ms per token, 1 at once, stock vLLM 4.61 (decode-h100-120b-latency-" in said
    assert "command: vllm serve openai/gpt-oss-120b --max-num-seqs 64 --max-num-batched-tokens 2048\n\nmodel:" in said


def test_variables_come_with_every_form() -> None:
    name = "120b-8xmi300x-latency"
    assert "export VLLM_ROCM_USE_AITER=1\n" in recipe("show", name, "--env").stdout
    assert recipe("show", name, "--command").stdout.startswith("VLLM_ROCM_USE_AITER=1 ")
    assert "-e VLLM_ROCM_USE_AITER=1" in recipe("show", name, "--docker").stdout
    assert recipe("show", ID, "--env").stdout == ""


def serve(folder: Path, *extra: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`recipe serve` of a recipe with a variable, with a `vllm` that prints its arguments."""
    program = folder / "vllm"
    program.write_text('#!/bin/sh\necho "$VLLM_ROCM_USE_AITER" "$@"\nexit 7\n')
    program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return recipe("serve", AITER, *extra, PATH=path, **environ)


def test_serve_runs_what_dry_run_prints_with_the_flags_that_come_after(tmp_path: Path) -> None:
    command = shlex.split(recipe("show", AITER, "--command").stdout)
    more = ["--port", "9000", "--served-model-name", "two words"]
    done = serve(tmp_path, "--", *more)
    assert (done.returncode, done.stdout) == (7, " ".join(["1", *command[2:], *more]) + "\n")
    dry = serve(tmp_path, "--dry-run", "--", *more)
    assert shlex.split(dry.stdout) == [*command, *more]
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"], "no file is written"


def test_serve_says_which_variable_of_the_user_the_recipe_wins_over(tmp_path: Path) -> None:
    done = serve(tmp_path, VLLM_ROCM_USE_AITER="0")
    assert done.stdout.startswith("1 serve")
    assert done.stderr.endswith("VLLM_ROCM_USE_AITER=1, as the recipe has it, instead of 0\n")
    other = serve(tmp_path, VLLM_ROCM_USE_AITER="1").stderr
    assert other.startswith(f"{AITER} is for MI355X, this machine has "), "and runs"
    assert other.count("\n") == 1


def test_serve_takes_no_second_file(tmp_path: Path) -> None:
    done = serve(tmp_path, "--", "--config", "mine.yaml")
    assert done.returncode == 2
    assert f"a copy of it: vllm-gptoss recipe show {AITER} --config" in done.stderr


def test_serve_without_vllm_says_what_to_do() -> None:
    done = recipe("serve", ID, PATH="/nonexistent")
    assert done.returncode == 1
    assert "vllm-gptoss doctor" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "20b-h10-latency"], "near: 20b-h100-latency"),
        (["show", "120b-rtx"], "near: 120b-rtx-pro-6000-latency, 120b-rtx-pro-6000-throughput, "),
        (["show", "120b-4xr9700"], "near: 120b-4xr9700-latency, 120b-4xr9700-agent\n"),
        (["show", ""], "recipe list"),
        (["list", "--device", "H10"], "there is H100"),
        (["check", "/nowhere.yaml"], "/nowhere.yaml: No such file"),
        (["check", str(Path(__file__).parent)], "no .yaml file is here"),
        (["check", "20b-h10-latency"], "near: 20b-h100-latency"),
        (["check", "--release", "--today", "yesterday"], "yesterday"),
        (["check", "--today", "2027-01-01"], "give --release as well"),
        (["check", "20b-h100-agent", "--source", "/nowhere"], "no vLLM is unpacked in /nowhere"),
        (["check", "20b-h100-agent", "20b-h10-agent"], "near: 20b-h100-agent"),
        (["plan", "--", "vllm"], "plan what?"),
        (["plan"], "plan what?"),
        (["plan", "20b-cpu-latency"], "VLLM_CPU_KVCACHE_SPACE"),
        (["plan", "--device", "H100", "--", "vllm", "serve", "m", "--max-model-len", "262144"], "131,072 positions"),
        (["plan", "--device", "H100", "--", "vllm", "serve", "m", "--dtype", "float16"], "--dtype float16 is refused"),
        (["plan", "--device", "H100", "--", "vllm", "serve", "m", "--max-num-seqs", "many"], "'many' is no number"),
        (["plan", "--device", "RTX-3060", "--model", "120b", "--users", "1"], "larger GPUs, or llama.cpp"),
        (["plan", "--device", "RTX-4090", "--model", "120b", "--users", "1"], "larger GPUs, gpt-oss-20b, or llama.cpp"),
        (["list", "--model", "30b"], "'30b' is neither 20b nor 120b"),
        (["list", "--device", "M3 Max"], "llama.cpp serves gpt-oss there"),
        (["plan", "20b-h100-agent", "20b-h200-agent"], "plan what? the id of one recipe,"),
        (["plan", "20b-h100-agent", "--device", "T4"], "compute capability 8.0"),
    ],
)
def test_what_is_asked_wrongly_ends_with_2(arguments: list[str], said: str) -> None:
    done = recipe(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_machine_without_recipes_gets_no_empty_table() -> None:
    done = recipe("list", "--device", "V100")
    assert (done.returncode, done.stdout) == (0, "")
    assert "V100 is sm_70" in done.stderr


def test_the_command_shows_a_plan() -> None:
    shown = recipe("plan", "120b-2xh200-latency")
    assert (shown.returncode, "measured: 94.9 GiB of KV cache" in shown.stdout) == (0, True)
    bar = shown.stdout.splitlines()[1]
    assert (len(bar), set(bar)) == (draw.WIDTH, {"█", "░"})
    found = json.loads(recipe("plan", "120b-h100-latency", "--device", "RTX-5090", "--json").stdout)
    assert (found["fits"], found["advice"]) == (False, ["--tensor-parallel-size 4, on 4xRTX-5090"])


def test_a_plan_and_a_recipe_say_when_drafts_pay() -> None:
    name = "120b-h200-latency-eagle3"
    planned = recipe("plan", name, "--accepted", "4").stdout.splitlines()
    lines = [line.removeprefix("drafts: ") for line in planned if line.startswith("drafts: ")]
    assert lines
    assert all(" pay above " in line and "; 4.00 pay: " in line for line in lines)
    assert json.loads(recipe("plan", name, "--accepted", "4", "--json").stdout)["drafts"] == lines
    shown = recipe("show", name).stdout
    assert all(f"drafts: {line.partition(';')[0]}\n" in shown for line in lines)
    assert "drafts: " not in recipe("show", "120b-h200-latency").stdout


def test_a_question_of_users_gets_a_command() -> None:
    done = recipe("plan", "--model", "openai/gpt-oss-20b", "--device", "2xL40S", "--context", "32k", "--users", "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("vllm serve openai/gpt-oss-20b --max-model-len 32000\n")
    done = recipe("plan", "--model", "120b", "--device", "2xL40S", "--context", "32k", "--users", "20", "--json")
    assert done.returncode == 1
    assert "nearest that fits" in done.stderr
    found = json.loads(done.stdout)
    assert found["command"].startswith("vllm serve openai/gpt-oss-120b --max-model-len 32000 ")
    assert 10 < found["requests"] < 20


@pytest.mark.parametrize(
    ("device", "rows", "reason"), [("RTX-4090", 0, "no measurement of these 5 recipes exists"), ("H200", 2, "")]
)
def test_an_empty_table_of_evidence_has_a_reason(device: str, rows: int, reason: str) -> None:
    done = recipe("list", "--device", device, "--markdown")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) >= rows
    assert bool(done.stdout) is bool(rows)
    assert reason in done.stderr
    assert bool(done.stderr) is bool(reason)


def test_a_list_is_filtered_and_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = recipe("list", "--goal", "agent", "--model", "safeguard-20b").stdout.splitlines()
    assert len(lines) > 10
    assert all(re.match("20b-.*-agent", line.strip()) for line in lines[1:])
    rows = json.loads(recipe("list", "--fits", "--device", "RTX-3090", "--json").stdout)
    assert {row["model"] for row in rows} == {"openai/gpt-oss-20b"}
    for words, device in ((["8xH100"], "8xH100"), (["sm89", "--memory-gib", "30"], "RTX-4090")):
        rows = json.loads(recipe("list", "--device", *words, "--json").stdout)
        assert {row["device"] for row in rows} == {device}


def test_a_flag_that_a_plan_does_not_read_is_reported() -> None:
    done = recipe("plan", "--device", "H100", "--", "vllm", "serve", "openai/gpt-oss-20b", "--max-modle-len", "8192")
    assert (done.returncode, done.stderr) == (0, "the plan does not depend on --max-modle-len\n")
    done = recipe("plan", "--device", "H100", "--", "/nowhere/vllm", "serve", "openai/gpt-oss-20b")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_reads_the_model_the_goal_and_the_claims() -> None:
    (row,) = (row for row in json.loads(recipe("list", "--json").stdout) if row["id"] == "120b-h200-latency")
    assert (row["model"], row["goal"], row["status"]) == ("openai/gpt-oss-120b", "latency", "measured")
    assert [(claim["requests"], claim["tpot_ms"]) for claim in row["claims"]] == [(1, 1.78), (8, 5.23)]


def test_a_probe_that_does_not_start_is_reported_with_its_last_line() -> None:
    with pytest.raises(probe.ProbeError, match=r"vLLM does not start here \(exit code 1\): .*No module named nowhere$"):
        probe.answer_of("nowhere", "vLLM")


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
    mine.write_text("model: openai/gpt-oss-20b\nkv-cache-dtype: fp8_e5m2\n")
    done = recipe("check", str(mine), "--device", "H100")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(f"advice: {mine}:2: --kv-cache-dtype fp8_e5m2 costs the fused layers")
    mine.write_text("model: /models/mine\nmax-num-seqs: 8\n")
    done = recipe("check", str(mine), "--device", "2xH100")
    assert done.stdout.endswith(": nothing found wrong\n")
    assert done.stderr == "/models/mine is taken for gpt-oss-20b\n"
    done = recipe("check", ID, AITER)
    assert (done.returncode, done.stdout.split(",")[0]) == (0, "2 recipes")
    done = recipe("plan", "--device", "H100", "--", "vllm", "serve", "m", "-cc", '{"full_cuda_graph": true}')
    assert done.returncode == 2
    assert "full_cuda_graph became cudagraph_mode" in done.stderr
    done = recipe("check", ID)
    assert (done.returncode, done.stdout.split(",")[0]) == (0, ID)
    done = recipe("plan", "--device", "H100", "--", "vllm", "serve", "/models/mine")
    assert (done.returncode, done.stderr) == (0, "/models/mine is taken for gpt-oss-20b\n")
    mine.write_text("model: openai/gpt-oss-20b\nenable-prefix-caching: false\nmonokernel: true\nmax-num-seqs: many\n")
    done = recipe("check", str(mine), "--device", "H100")
    assert done.returncode == 1
    assert f"error: {mine}:4 (vLLM" in done.stdout
    assert "argument --max-num-seqs: invalid int value: 'many'" in done.stdout
