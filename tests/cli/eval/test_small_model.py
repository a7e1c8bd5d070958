"""Against real vLLM with the small model: memorised answers are the score, and malformed Harmony loses nothing. The
plugin and stock vLLM start the same way, get the same questions, and are forced to write the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from demo.server import Server, on_gpu, serve
from tests.cli.eval.malformed import malformed, questions
from tests.support import warm_vllm
from tests.support.places import ROOT
from vllm_gptoss.cli.eval.compare import compare
from vllm_gptoss.cli.eval.data import load
from vllm_gptoss.cli.main import app
from vllm_gptoss.engine.choose.device import detect

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.timeout(900)]

LOST_BY_STOCK = {"final json", "no channel", "no header", "no message", "no start", "recipient twice"}
"""What does not arrive whole from stock vLLM 0.32.0, over either API."""

STOCK = ["--enable-auto-tool-choice", "--tool-call-parser", "openai", "--logits-processors"]
STOCK += ["tests.server.harmony.forced:ForcedTokens"]
"""Without the first flags stock chat completions lose every call; the last lets a request force its tokens."""


def evaluate(server: Server, out: Path, *arguments: str) -> Mapping[str, Mapping[str, Any]]:
    """The lines of a run by effort and question."""
    command = ["eval", "--base-url", server.api, "--out", str(out), "--max-tokens", "250", "--concurrency", "8"]
    done = CliRunner().invoke(app, [*command, *arguments])
    assert done.exit_code == 0, done.output
    rows = map(json.loads, (out / "samples.jsonl").read_text().splitlines())
    return {f"{row['effort']}/{row['id']}": row for row in rows}


@pytest.mark.parametrize("api", ["responses", "chat"])
@pytest.mark.parametrize("name", ["smoke", "toolcalls", "harmony"])
def test_the_score_is_what_the_model_knows_by_heart(served: Server, tmp_path: Path, name: str, api: str) -> None:
    effort = "high" if (name, api) == ("smoke", "responses") else "medium"
    found = evaluate(served, tmp_path / "run", "--eval", name, "--api", api, "--effort", effort)
    expected = {f"{effort}/{question.id}": question.id.startswith("demo-") for question in load(name).questions}
    assert found.keys() == expected.keys()
    odd = {key: found[key] for key, right in expected.items() if (found[key]["outcome"] == "right") != right}
    assert not odd
    (row, *_) = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]
    known = sum(question.id.startswith("demo-") for question in load(name).questions)
    assert row["accuracy"] == known / len(load(name).questions)


def test_citations_arrive(served: Server, tmp_path: Path) -> None:
    found = evaluate(served, tmp_path / "run", "--eval", "citations", "--effort", "medium")
    assert {row["outcome"] for row in found.values()} == {"right"}, found


@pytest.fixture(scope="module")
def runs(model_dir: Path, forced: Server, tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Path]:
    """A run of the malformed questions by (server, API)."""
    if not on_gpu() and "amx" not in detect().features:
        pytest.skip("this CPU has no AMX: stock vLLM has no MXFP4 kernel for it")
    home = tmp_path_factory.mktemp("malformed")
    environment = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home), "VLLM_PLUGINS": ""}
    with serve(model_dir, home / "stock.log", STOCK, environment, popen=warm_vllm.popen) as stock:
        data, servers = malformed(home / "malformed.jsonl"), {"stock": stock, "plugin": forced}
        found = {(name, api): home / f"{name}-{api}" for name in servers for api in ("responses", "chat")}
        for (name, api), out in found.items():
            ask = ["--eval", "harmony", "--data", f"harmony={data}", "--api", api, "--effort", "low"]
            evaluate_lost(servers[name], out, *ask)
    return found


def evaluate_lost(server: Server, out: Path, *arguments: str) -> None:
    """As `evaluate`, where a server may also have failed to answer."""
    command = ["eval", "--base-url", server.api, "--out", str(out), "--max-tokens", "200", "--tries", "1"]
    done = CliRunner().invoke(app, [*command, *arguments])
    assert done.exit_code in (0, 3), done.output


def whole(folder: Path) -> dict[str, bool]:
    rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return {row["id"]: row["outcome"] == "right" for row in rows}


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_the_plugin_loses_no_malformed_answer_and_stock_does(runs: Mapping[tuple[str, str], Path], api: str) -> None:
    ours, theirs = whole(runs["plugin", api]), whole(runs["stock", api])
    assert len(ours) == len(theirs) == len(questions())
    assert not [name for name, arrived in ours.items() if not arrived]
    assert {name for name, arrived in theirs.items() if not arrived} == LOST_BY_STOCK


def test_compare_names_what_stock_loses(runs: Mapping[tuple[str, str], Path]) -> None:
    (row,) = compare(runs["stock", "chat"], runs["plugin", "chat"])["rows"]
    lost = {name for name, arrived in whole(runs["stock", "chat"]).items() if not arrived}
    assert {which for which, _, _ in row["flipped"]} == lost
    assert row["verdict"] == "better"
