"""Packages that lie outside an interpreter's own folders are there in the sandbox, and nothing else of the host."""

from __future__ import annotations

import site
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.support.notebooks import run_in, started
from vllm_gptoss.tools.python.options import PythonOptions
from vllm_gptoss.tools.python.view import build_view
from vllm_gptoss.tools.sandbox.launcher import SandboxError


def bare(folder: Path) -> tuple[Path, Path]:
    """A new environment without packages: its interpreter, and the folder for packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    return folder / "venv" / "bin" / "python", packages


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of another, and a checkout installed editable."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "checkout").mkdir()
    (folder / "checkout" / ".env").write_text("TOKEN=secret")
    _, own = bare(folder)
    lines = [f"import site; site.addsitedir({where!r})" for where in site.getsitepackages()]
    (own / "others.pth").write_text("\n".join([*lines, str(folder / "checkout"), ""]))
    return folder


async def test_packages_of_another_environment_are_shown_and_a_checkout_is_not(environment: Path) -> None:
    view = await build_view(PythonOptions(python=environment / "venv" / "bin" / "python"))
    for where in site.getsitepackages():
        assert where in view.read_only
    assert str(environment / "checkout") not in view.read_only


async def test_packages_that_no_program_would_see_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    python, own = bare(tmp_path)
    packages = tmp_path / "packages"
    (packages / "ipykernel").mkdir(parents=True)
    (packages / "ipykernel" / "__init__.py").touch()
    (own / "packages.pth").write_text(f"{packages}\n")
    with pytest.raises(SandboxError, match=rf"packages in {packages}, which programs are not shown: .*read_only_paths"):
        await build_view(PythonOptions(python=python))
    view = await build_view(PythonOptions(python=python, read_only_paths=(packages,)))
    assert str(packages) in view.read_only


@pytest.mark.namespaces
async def test_a_program_imports_what_another_environment_has(environment: Path) -> None:
    async with aclosing(
        await started(python=environment / "venv" / "bin" / "python", warm=0, max_conversations=1, preload=[])
    ) as provider:
        result = await run_in(provider, "import IPython.core.debugger, numpy; print(numpy.ones(3).sum())", "a")
        assert result.error is None, result
        assert "3.0" in str(result)
        result = await run_in(provider, f"open({str(environment / 'checkout' / '.env')!r}).read()", "a")
        assert "secret" not in str(result)
