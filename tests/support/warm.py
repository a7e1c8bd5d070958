"""A fresh interpreter for a test that imports vLLM, forked from one that has torch and transformers already.

They are two thirds of the 7 to 9 s of processor that `import vllm` takes; vLLM and this package are imported anew each
time. What is forked tells coverage nothing, so that where lines are counted an ordinary process is started.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = ("torch", "torch._dynamo", "torch._inductor", "transformers", "openai", "aiohttp", "tests.support.lazy")
LIMIT_S = 300


def run(
    arguments: Sequence[str], environ: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` says, of the forms `-c CODE` and `-m MODULE …`. environ: all of it, or this process's.

    Raises:
        subprocess.TimeoutExpired: it took more than `limit_s`; it is killed.
    """
    environment = dict(os.environ if environ is None else environ)
    command = [sys.executable, *arguments]
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_in_child, args=(list(arguments), environment, Path(folder)))
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, limit_s)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _in_child(arguments: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
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
