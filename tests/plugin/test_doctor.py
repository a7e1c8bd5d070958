"""Doctor must see what is wrong, say what to do, and fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_gptoss.doctor import Finding, Status, findings, variables

pytestmark = pytest.mark.vllm


def doctor(*arguments: str, **environ: str) -> tuple[int, list[dict[str, str]]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "GPTOSS_"))} | environ
    command = [sys.executable, "-m", "vllm_gptoss.cli", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def of(found: list[dict[str, str]], check: str) -> dict[str, str]:
    return next(finding for finding in found if finding["check"] == check)


def test_a_good_environment_passes_and_proves_the_plugin_active() -> None:
    code, found = doctor()
    assert code == 0, [finding for finding in found if finding["status"] == "problem"]
    assert of(found, "plugin: model")["detail"].endswith("vllm_gptoss.model.gpt_oss:GptOssForCausalLM")
    assert of(found, "plugin: endpoint")["status"] == "ok"
    assert "(" in of(found, "experts")["detail"]


def test_a_bad_environment_fails_with_a_fix_for_each_problem(tmp_path: Path) -> None:
    (tmp_path / "openai_harmony-0.0.8.dist-info").mkdir()
    (tmp_path / "openai_harmony-0.0.8.dist-info" / "METADATA").write_text("Name: openai-harmony\nVersion: 0.0.8\n")
    code, found = doctor(
        VLLM_PLUGINS="someone_else",
        VLLM_ATTENTION_BACKEND="TRITON_ATTN_VLLM_V1",
        VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8="1",
        VLLM_NO_SUCH_THING="1",
        GPTOSS_EXPERTS="marlin",
        PYTHONPATH=str(tmp_path),
    )
    assert code == 1
    assert "add gptoss to it" in of(found, "plugin: model")["fix"]
    assert "add gptoss to it" in of(found, "plugin: endpoint")["fix"]
    assert "--attention-backend" in of(found, "variable VLLM_ATTENTION_BACKEND")["fix"]
    assert "flashinfer_trtllm_mxfp8" in of(found, "variable VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8")["fix"]
    assert "no such variable" in of(found, "variable VLLM_NO_SUCH_THING")["fix"]
    assert "native" in of(found, "experts")["detail"] or "dequantize" in of(found, "experts")["detail"]
    assert of(found, "harmony")["status"] == "problem"
    assert all(finding["fix"] for finding in found if finding["status"] == "problem")


def test_no_replaced_variable_is_read_by_this_vllm() -> None:
    import vllm.envs as envs

    assert not set(variables.REPLACED) & set(envs.environment_variables)
    assert set(variables.IGNORED_BY_US) <= set(envs.environment_variables)


def test_a_second_triton_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        def __init__(self, name: str) -> None:
            self.metadata = {"Name": name}

    both = [Distribution("triton"), Distribution("pytorch-triton"), Distribution("oss-harmony")]
    monkeypatch.setattr(findings.importlib.metadata, "distributions", lambda: both)
    found = {finding.check: finding for finding in findings.clashes()}
    assert found["triton"].status is Status.PROBLEM
    assert "pytorch-triton and triton" in found["triton"].detail


def test_missing_tool_parser_flags_matter_only_without_our_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = findings.serve_command(["vllm", "serve", "openai/gpt-oss-20b"])
    assert found.status is Status.INFO
    monkeypatch.setenv("GPTOSS_PARSER", "0")
    (found,) = findings.serve_command(["vllm", "serve", "openai/gpt-oss-20b"])
    assert found.status is Status.PROBLEM
    assert "add both flags" in found.fix
    complete = ["vllm", "serve", "m", "--enable-auto-tool-choice", "--tool-call-parser", "openai"]
    assert not list(findings.serve_command(complete))


def test_a_check_that_breaks_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> findings.Findings:
        raise OSError("disk on fire")
        yield Finding(Status.OK, "", "")

    monkeypatch.setattr(findings, "clashes", breaks)
    found = findings.examine()
    assert any("disk on fire" in finding.detail for finding in found)
    assert any(finding.check == "plugin: model" for finding in found)
