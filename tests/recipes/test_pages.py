"""The guide's commands are recipes, its Chinese twin has the same, every finding has its line in troubleshooting."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_gptoss import cli
from vllm_gptoss.recipes import check, find, load, render, variables

ROOT = Path(__file__).resolve().parents[2]
GUIDES = (ROOT / "docs" / "guide.md", ROOT / "docs" / "zh" / "guide.md")
FENCE = re.compile(r"(?:<!-- recipe: (\S+) -->\n)?```\w*\n(.*?)```", re.DOTALL)
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def fences(path: Path) -> list[tuple[str, str]]:
    """(recipe, code) of each block; an empty name where it is no recipe's."""
    return [(name or "", code) for name, code in FENCE.findall(path.read_text())]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.parent.name)
def test_every_serve_command_is_a_recipes(path: Path) -> None:
    blocks = fences(path)
    assert len([name for name, _ in blocks if name]) >= 6
    for name, code in blocks:
        if name:
            assert code == render.command(find.by_id(load.shipped(), name))
        else:
            assert not code.startswith(("vllm serve", "VLLM_"))


def test_both_languages_have_the_same_blocks_headings_and_numbers() -> None:
    english, chinese = GUIDES
    assert fences(english) == fences(chinese)
    headings = [len(re.findall(r"^#+ ", path.read_text(), re.MULTILINE)) for path in GUIDES]
    assert headings[0] == headings[1]
    scores = [re.findall(r"\d\d\.\d", path.read_text()) for path in GUIDES]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("path", [*GUIDES, ROOT / "docs" / "troubleshooting.md", ROOT / "recipes" / "README.md"])
def test_our_commands_exist(path: Path) -> None:
    lines = re.findall(r"^vllm-gptoss (.*)$|`vllm-gptoss ([a-z][^`]*)`", path.read_text(), re.MULTILINE)
    for line in {"".join(pair) for pair in lines}:
        words = shlex.split(line.split("#")[0].replace("\n", " "))
        parts = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
        done = CliRunner().invoke(cli.app, [*parts[: 2 if parts[0] in ("recipe", "tools", "bench") else 1], "--help"])
        assert done.exit_code == 0, line


def strings(node: ast.expr) -> str:
    """A constant, or the constant beginning of an f-string."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return str(node.value) if isinstance(node, ast.Constant) else ""


def calls(path: Path, name: str) -> list[ast.Call]:
    tree = ast.parse(path.read_text())
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_every_bad_finding_of_doctor_has_its_line() -> None:
    made = calls(ROOT / "vllm_gptoss" / "doctor" / "findings.py", "Finding")
    bad = [call for call in made if re.search("PROBLEM|WARNING|^status$", ast.unparse(call.args[0]))]
    names = {strings(call.args[1]).strip() for call in bad} - {""}
    assert len(names) > 12
    assert not {name for name in names if f"`{name}" not in PAGE}


def test_every_rule_has_its_line() -> None:
    made = calls(Path(check.__file__), "Trouble")
    rules = {strings(call.args[1]) for call in made}
    ours = {"expects", "gpus", "defaults", "claims", "release", "numbers"}
    """Of recipes alone: no user's command has them."""
    assert len(rules) > 10
    assert not {rule for rule in rules - ours if f"`serve line: {rule}`" not in PAGE}


def test_every_dead_variable_and_what_replaced_it_has_its_line() -> None:
    for name, instead in variables.REPLACED.items():
        assert f"| `{name}` | {instead} |" in PAGE


def test_every_renamed_key_has_its_line() -> None:
    for name in ("full_cuda_graph", "flashinfer_trtllm_mxfp8"):
        assert name in check.RENAMED
        assert name in PAGE
