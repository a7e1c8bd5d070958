"""A fresh interpreter for a test of commands, forked from `warm_vllm`, which has vLLM imported but not this package.

So are the processes in which the plugin's commands query vLLM. Coverage does not follow a fork, so with coverage an
ordinary process is started.

Run as a program, `python -m tests.support.warm FOLDER ARGUMENTS` is what is forked so.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from demo.server import on_gpu
from tests.support import warm_vllm

LIMIT_S = 300
ASKING = ("vllm_gptoss.cli.doctor.probe", "vllm_gptoss.cli.recipes.probe")
"""Modules that the plugin's commands start as processes of vLLM."""


def run(
    arguments: Sequence[str], environ: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Output of `python ARGUMENTS`, of the forms `-c CODE` and `-m MODULE …`. environ: all of it, or this process's.

    Raises:
        subprocess.TimeoutExpired: it took more than `limit_s`; it is killed.
    """
    environment = dict(os.environ if environ is None else environ)
    command = [sys.executable, *arguments]
    if "COVERAGE_PROCESS_CONFIG" in os.environ or on_gpu():
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "wb") as nothing:
        asked = [command[0], "-m", "tests.support.warm", folder, *command[1:]]
        process = warm_vllm.Process(asked, stdout=nothing, env=environment)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(command, code, out, err)


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


class Forking(subprocess.Popen[Any]):
    """A process. It is forked from this one, which has imported vLLM, if it is one of `ASKING`."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        environ = dict(options.get("env") or os.environ)
        if list(args[:3]) == [sys.executable, "-P", "-m"] and args[3] in ASKING and not _has_another_vllm(environ):
            options["preexec_fn"] = functools.partial(_instead, args[2:], environ)
        super().__init__(args, *rest, **options)


def _has_another_vllm(environ: Mapping[str, str]) -> bool:
    return any(Path(path, "vllm").is_dir() for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path)


def _instead(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Of the program that would be started after this."""
    os.closerange(3, 1024)  # signals the parent that the program has started
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_gptoss"]:
        del sys.modules[name]
    for metric in {metric for name, metric in REGISTRY._names_to_collectors.items() if name.startswith("gptoss_")}:
        REGISTRY.unregister(metric)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "rw"[number > 0]) for number in range(3))
    _run_to_its_end(arguments, environ)


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
    subprocess.Popen = Forking  # type: ignore[misc]
    _run_to_its_end(sys.argv[2:], dict(os.environ))
