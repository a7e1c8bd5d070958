"""A fresh interpreter for a test of commands, forked from `warm_vllm`, which has vLLM imported but not this package.

So are the processes in which the plugin's commands query vLLM. Coverage does not follow a fork, so with coverage an
ordinary process is started.

Run as a program, `python -m tests.support.warm FOLDER ARGUMENTS` is what is forked so.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from demo.server import on_gpu
from tests.support import warm_vllm

LIMIT_S = 300
_run = subprocess.run
ASKING = ("vllm_gptoss.cli.doctor.probe", "vllm_gptoss.cli.recipes.probe")
"""Modules that the plugin's commands start as processes of vLLM."""


def run(
    arguments: Sequence[str], environ: Mapping[str, str] | None = None, limit_s: float = LIMIT_S, said: str = ""
) -> subprocess.CompletedProcess[str]:
    """Output of `python ARGUMENTS`, of the forms `-c CODE` and `-m MODULE …`. environ: all of it, or this process's;
    said: its standard input.

    Raises:
        subprocess.TimeoutExpired: it took more than `limit_s`; it is killed.
    """
    environment = dict(os.environ if environ is None else environ)
    command = [sys.executable, *arguments]
    if "COVERAGE_PROCESS_CONFIG" in os.environ or on_gpu():
        return _run(command, input=said, capture_output=True, text=True, env=environment, timeout=limit_s)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "wb") as nothing:
        asked = [command[0], "-m", "tests.support.warm", folder, *command[1:]]
        process = warm_vllm.Process(asked, stdin=subprocess.PIPE, stdout=nothing, env=environment)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(said.encode())
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(command, code, out, err)


def probed(command: Sequence[str], **options: Any) -> Any:
    """`subprocess.run`, but one of `ASKING` is forked unless it has another vLLM."""
    environ = dict(options.get("env") or os.environ)
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if command[3:4] not in [[name] for name in ASKING] or any(Path(path, "vllm").is_dir() for path in paths):
        return _run(command, **options)
    return run(command[2:], environ, options["timeout"], options["input"])


PROBING = SimpleNamespace(run=probed, TimeoutExpired=subprocess.TimeoutExpired)
"""In place of the module `subprocess` where probes are started."""


def _redirect(folder: Path) -> None:
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)


def _become(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path.insert(0, os.getcwd())
    form, what, *rest = arguments
    if form == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        exec(what, {"__name__": "__main__"})


def _run_to_its_end(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Ends the process, without taking down what was imported: that takes longer than many a command."""
    gc.freeze()
    code = 1
    try:
        _become(arguments, environ)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _redirect(Path(sys.argv[1]))
    subprocess.run = probed
    _run_to_its_end(sys.argv[2:], dict(os.environ))
