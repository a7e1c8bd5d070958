"""Both distributions are complete, and in a separate environment the package runs as far as possible without vLLM and
reports what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def files(data_at: str) -> set[str]:
    """Files of a distribution. data_at: its place of the folder recipes/."""
    package, recipes = ROOT / "vllm_gptoss", ROOT / "recipes"
    there = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    data = [path for path in recipes.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    moved = {f"{data_at}/{path.relative_to(recipes).as_posix()}" for path in data}
    assert {f"{data_at}/schema.json", f"{data_at}/deploy/Dockerfile"} <= moved
    return {path.relative_to(ROOT).as_posix() for path in there} | moved


def build(kind: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves folders behind, and takes up what an earlier build left."""
    base = tmp_path_factory.mktemp("package")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, base)
    for name in ("vllm_gptoss", "recipes"):
        shutil.copytree(ROOT / name, base / name, ignore=shutil.ignore_patterns("__pycache__"))
    return build("sdist", base, base)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as pip does where there is no wheel."""
    base = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(base, filter="data")
    return build("wheel", base / sdist.name.removesuffix(".tar.gz"), base)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with what its metadata names, and nothing else: the environment. What is named is linked from the
    environment of the tests: pip would download the same versions."""
    environment = tmp_path_factory.mktemp("empty") / "environment"
    venv.create(environment)
    command = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--no-index", str(wheel)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    site = site_packages(environment)
    (ours,) = importlib.metadata.distributions(path=[str(site)])
    for name in named_by(ours):
        for link, file in links(name, site):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    return environment


def site_packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))


def named_by(distribution: importlib.metadata.Distribution, extra: str = "") -> set[str]:
    """Distributions that this one requires here, and those that they require."""
    found = set()
    for requirement in map(Requirement, distribution.requires or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if (name := canonicalize_name(requirement.name)) not in found:
            below = importlib.metadata.distribution(name)
            found |= {name}.union(*(named_by(below, each) for each in ("", *requirement.extras)))
    return found


def links(name: str, site: Path) -> Iterator[tuple[Path, Path]]:
    """Where a distribution's files would be in `site`, and where they are; scripts are left out."""
    for file in importlib.metadata.files(name) or []:
        if ".." not in file.parts and "__pycache__" not in file.parts and (target := Path(file.locate())).exists():
            yield site / file, target


def run(environment: Path, command: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    """Outside the checkout, without pytest's environment variables."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_", "GPTOSS_", "COV"))}
    whole = [str(environment / "bin" / command[0]), *command[1:]]
    return subprocess.run(whole, cwd=where, env=environ, capture_output=True, text=True, timeout=120)


def doctor(installed: Path, where: Path) -> tuple[int, dict[str, dict[str, str]], str]:
    done = run(installed, ["vllm-gptoss", "doctor", "--json"], where)
    assert done.stdout, done.stderr
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)}, done.stderr


def problems(found: dict[str, dict[str, str]]) -> dict[str, str]:
    others = ("engine without a server",)  # of another test on this machine
    return {
        name: each["fix"] for name, each in found.items() if each["status"] not in ("ok", "info") and name not in others
    }


def test_both_distributions_are_whole(sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files("recipes") <= names
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files("vllm_gptoss/cli/recipes/data")


def test_doctor_names_what_is_missing_and_nothing_else(installed: Path, tmp_path: Path) -> None:
    code, found, said = doctor(installed, tmp_path)
    assert code == 1
    assert said == ""
    vllm = (
        "pip install 'vllm>=0.32,<0.34'; for AMD vLLM's ROCm wheels, or its image vllm/vllm-openai-rocm: docs/guide.md"
    )
    assert problems(found) == {"package vllm": vllm, "package torch": f"vLLM brings the torch it needs: {vllm}"}
    assert not [finding for finding in found.values() if "failed" in finding["detail"] or "Error" in finding["detail"]]


def test_what_works_without_vllm_works(installed: Path, tmp_path: Path) -> None:
    """A package that these import and our metadata does not name would be missing here."""
    done = run(installed, ["vllm-gptoss", "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"doctor", "tools", "bench", "recipe"} <= set(done.stdout.split())
    modules = (
        "server.harmony.parser",
        "server.harmony.prompt",
        "tools.check",
        "tools.serve",
        "tools.python",
        "engine.checkpoint.check",
    )
    code = "".join(f"import vllm_gptoss.{module}\n" for module in modules)
    done = run(installed, ["python", "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_recipes_are_there(installed: Path, tmp_path: Path) -> None:
    done = run(installed, ["vllm-gptoss", "recipe", "show", "20b-h100-latency", "--command"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "vllm serve openai/gpt-oss-20b\n"), done.stderr


def test_lines_are_planned_and_checked_without_vllm_and_torch(installed: Path, tmp_path: Path) -> None:
    line = ["--", "vllm", "serve", "openai/gpt-oss-120b", "--dtype", "float16"]
    for command, code, said in (
        (["plan", "--device", "H100", *line[:-2]], 0, "requests of 131,072 tokens"),
        (["plan", "--device", "H100", *line], 2, "--dtype float16 is refused"),
        (["check", "--device", "H100", *line], 1, "--dtype float16 is refused"),
        (["check", "120b-h100-latency"], 0, "no vLLM: 0 found wrong"),
        (["serve", "120b-h100-latency", "--dry-run"], 0, "vllm serve openai/gpt-oss-120b --max-num-seqs"),
        (["list", "--device", "auto"], 0, ""),
    ):
        done = run(installed, ["vllm-gptoss", "recipe", *command], tmp_path)
        assert done.returncode == code, done.stderr
        assert said in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_doctor_runs_without_what_the_tools_need(installed: Path, tmp_path: Path) -> None:
    """As after `pip install --no-deps`. Last, because it removes packages."""
    for name in ("mcp", "httpx"):
        shutil.rmtree(site_packages(installed) / name)  # a real folder: importing wrote its __pycache__
        for link, _ in links(name, site_packages(installed)):
            link.unlink(missing_ok=True)
    code, found, _ = doctor(installed, tmp_path)
    assert code == 1
    assert problems(found).keys() == {"package vllm", "package torch", "package mcp", "package httpx"}
    assert problems(found)["package httpx"] == "pip install 'httpx>=0.28'"
    done = run(installed, ["vllm-gptoss", "tools", "check"], tmp_path)
    assert done.stderr.startswith("vllm-gptoss tools cannot run: No module named")
