"""Doctor must find problems, name their remedies, and fail."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support import warm
from vllm_gptoss._vllm import compatibility
from vllm_gptoss.cli.doctor import Status, findings
from vllm_gptoss.cli.recipes import variables
from vllm_gptoss.engine.choose import devices

pytestmark = pytest.mark.vllm


def doctor(*arguments: str, **environ: str) -> tuple[int, list[dict[str, str]]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "GPTOSS_"))} | environ
    done = warm.run(["-m", "vllm_gptoss.cli", "doctor", "--json", *arguments], environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def of(found: list[dict[str, str]], check: str) -> dict[str, str]:
    return next(finding for finding in found if finding["check"] == check)


def test_a_good_environment_passes_and_proves_the_plugin_active() -> None:
    code, found = doctor("--tokens", "64")
    assert code == 0, [finding for finding in found if finding["status"] == "problem"]
    assert of(found, "a step of 64 tokens")["detail"].startswith("layers: upstream; attention: ")
    assert of(found, "plugin: model")["detail"].endswith("vllm_gptoss.engine.model.gpt_oss:GptOssForCausalLM")
    assert of(found, "plugin: endpoint")["status"] == "ok"
    assert of(found, "plugin: streams")["status"] == "ok"
    runner, why = of(found, "plugin: runner and scheduler"), compatibility.why_not("runner")
    assert runner["status"] == ("info" if why else "ok")
    assert (why or "ours: ") in runner["detail"]
    assert "(" in of(found, "experts")["detail"]
    assert of(found, "browser tool")["detail"].startswith("no search backend")
    assert "GPTOSS_BROWSER_DOCUMENTS" in of(found, "browser tool")["fix"]
    assert of(found, "layers")["detail"].startswith(("gptoss (", "upstream ("))
    assert "vllm-gptoss recipe list --device auto" in of(found, "recipes")["detail"]


@pytest.mark.parametrize(
    ("name", "tokens", "ran"),
    [
        ("H200", 1, "layers: one launch; attention: gptoss; experts: gptoss"),
        ("H200", 16, "layers: six launches; attention: gptoss; experts: gptoss"),
        ("H200", 513, "layers: upstream; attention: FLASH_ATTN, planned once a step; experts: gptoss"),
        ("A100", 1, "layers: upstream; attention: TRITON_ATTN; experts: marlin"),
    ],
)
def test_what_runs_a_step_is_reported(monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, ran: str) -> None:
    monkeypatch.setattr(findings, "detect", lambda: devices.named(name))
    *_, last = findings.settings_and_choices(tokens)
    assert (last.check, last.detail) == (f"a step of {tokens} tokens", ran)


def test_a_setting_that_cannot_run_leaves_no_step_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "detect", lambda: devices.named("A100"))
    monkeypatch.setenv("GPTOSS_LAYERS", "gptoss")
    found = list(findings.settings_and_choices(1))
    assert [each.check for each in found if each.status is Status.PROBLEM] == ["layers"]
    assert found[-1].check == "KV cache"


def test_a_bad_environment_fails_with_a_fix_for_each_problem(tmp_path: Path) -> None:
    (tmp_path / "openai_harmony-0.0.8.dist-info").mkdir()
    (tmp_path / "openai_harmony-0.0.8.dist-info" / "METADATA").write_text("Name: openai-harmony\nVersion: 0.0.8\n")
    code, found = doctor(
        VLLM_PLUGINS="someone_else",
        VLLM_ATTENTION_BACKEND="TRITON_ATTN_VLLM_V1",
        VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8="1",
        VLLM_NO_SUCH_THING="1",
        VLLM_USE_RUST_FRONTEND="1",
        GPTOSS_EXPERTS="marlin",
        PYTHONPATH=str(tmp_path),
    )
    assert code == 1
    assert "add gptoss to it" in of(found, "plugin: model")["fix"]
    assert "add gptoss to it" in of(found, "plugin: endpoint")["fix"]
    assert "unset VLLM_USE_RUST_FRONTEND" in of(found, "Rust front end")["fix"]
    assert "--attention-backend" in of(found, "variable VLLM_ATTENTION_BACKEND")["fix"]
    assert "flashinfer_trtllm_mxfp8" in of(found, "variable VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8")["fix"]
    assert "no such variable" in of(found, "variable VLLM_NO_SUCH_THING")["fix"]
    path = "native" if "amx" in findings.detect().features else "dequantize"
    assert path in of(found, "experts")["detail"]
    assert of(found, "harmony")["status"] == "problem"
    assert all(finding["fix"] for finding in found if finding["status"] == "problem")


def test_no_replaced_variable_is_read_by_this_vllm() -> None:
    import vllm.envs as envs

    assert not set(variables.REPLACED) & set(envs.environment_variables)
    assert set(variables.IGNORED_BY_US) <= set(envs.environment_variables)


@pytest.mark.parametrize("second", ["pytorch-triton", "triton-rocm"])
def test_a_second_triton_is_a_problem(monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    class Distribution:
        def __init__(self, name: str) -> None:
            self.metadata = {"Name": name}

    both = [Distribution("triton"), Distribution(second), Distribution("oss-harmony")]
    monkeypatch.setattr(findings.importlib.metadata, "distributions", lambda: both)
    found = {finding.check: finding for finding in findings.clashes()}
    assert found["triton"].status is Status.PROBLEM
    assert " and ".join(sorted([second, "triton"])) in found["triton"].detail


def test_an_amd_gpu_without_rocm_is_told_where_vllm_for_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(findings, "detect", lambda: devices.named("CPU"))
    monkeypatch.setattr(findings, "AMD", tmp_path)
    assert [(each.status, each.fix) for each in findings.toolkit()] == [(Status.WARNING, f"use {findings.ROCM}")]


def test_missing_tool_parser_flags_matter_only_without_our_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = findings.serve_command(["vllm", "serve", "openai/gpt-oss-20b"])
    assert found.status is Status.INFO
    monkeypatch.setenv("GPTOSS_PARSER", "0")
    found, _ = findings.serve_command(["vllm", "serve", "openai/gpt-oss-20b"])
    assert found.status is Status.PROBLEM
    assert "add both flags" in found.fix
    complete = ["vllm", "serve", "m", "--enable-auto-tool-choice", "--tool-call-parser", "openai"]
    complete += ["--api-server-count", "2"]
    assert not list(findings.serve_command(complete))


BREAKING = """
import json
from vllm_gptoss.cli.doctor import findings
def breaks():
    raise OSError("disk on fire")
    yield
findings.clashes = breaks
print(json.dumps([[finding.check, finding.detail] for finding in findings.examine()]))
"""


def test_a_check_that_breaks_hides_no_other() -> None:
    done = warm.run(["-c", BREAKING])
    found = dict(json.loads(done.stdout))
    assert any("disk on fire" in detail for detail in found.values())
    assert "plugin: model" in found


@pytest.mark.slow
def test_a_serve_line_of_an_old_guide_is_judged_by_vllms_own_parser() -> None:
    line = ["vllm", "serve", "openai/gpt-oss-120b", "--compilation-config", '{"full_cuda_graph": true}']
    code, found = doctor("--", *line, PYTHON_EXECUTION_BACKEND="UV", TRITON_HIP_PRESHUFFLE_SCALES="1")
    assert code == 1
    assert "became cudagraph_mode" in of(found, "serve line: parses")["fix"]
    assert "the plugin's own sandbox" in of(found, "variable PYTHON_EXECUTION_BACKEND")["fix"]
    assert of(found, "variable TRITON_HIP_PRESHUFFLE_SCALES")["status"] == "problem"


@pytest.mark.slow
def test_what_a_serve_line_chooses_is_said_with_its_reason() -> None:
    line = ["vllm", "serve", "openai/gpt-oss-20b", "--async-scheduling", "--kv-cache-dtype", "fp8"]
    code, found = doctor("--", "VLLM_USE_V1=1", *line, "--dtype", "float16")
    assert "--dtype float16 is refused" in of(found, "serve line: engine")["detail"]
    assert of(found, "serve line: async")["status"] == "warning"
    assert of(found, "serve line: variables")["fix"] == "unset it: there is only one engine"
    assert code == 1
    code, found = doctor("--", *line)
    assert code == 0, [finding for finding in found if finding["status"] == "problem"]
    assert of(found, "serve line: layers")["detail"].startswith("upstream (vLLM's own choice; not gptoss: ")
    assert of(found, "serve line: experts")["detail"].startswith(("dequantize (", "native ("))


def test_the_readme_shows_what_doctor_and_the_start_up_line_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one H200. `…` in the README marks omitted text."""
    monkeypatch.setattr(findings, "detect", lambda: devices.named("H200"))
    probe = {"model": "vllm_gptoss.engine.model.gpt_oss:GptOssForCausalLM", "endpoint_plugins": ["gptoss"]}
    found = [*findings.settings_and_choices(), *findings.active({**probe, "VLLM_PLUGINS": "gptoss,others"})]
    found += findings.dead_variables({})
    said = {finding.check: finding.detail for finding in found}
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    shown = re.findall(r"^ ok +(\S+(?: \S+)*) {2,}(.*)$", readme, re.MULTILINE)
    (line,) = re.findall(r"^… vllm-gptoss \S+ is active\. (.*); …$", readme, re.MULTILINE)
    started = [tuple(part.split(": ", 1)) for part in line.split("; ")]
    assert len(shown) == 6
    assert [name for name, _ in started] == ["experts", "layers"]
    for name, text in (*shown, *started):
        pattern = ".*".join(map(re.escape, text.split("…")))
        assert re.fullmatch(pattern, said[name]), (name, said[name])


def test_aiter_is_chosen_only_where_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "detect", lambda: devices.named("MI300X"))
    monkeypatch.delenv("VLLM_ROCM_USE_AITER", raising=False)
    off = {finding.check: finding.detail for finding in findings.settings_and_choices()}
    assert off["experts"].startswith("upstream (")
    assert "VLLM_ROCM_USE_AITER is not set to 1" in off["experts"]
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    on = {finding.check: finding.detail for finding in findings.settings_and_choices()}
    assert on["experts"].startswith("aiter (")
