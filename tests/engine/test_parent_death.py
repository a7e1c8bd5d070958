"""A server that is killed leaves no engine behind; engines of other models, and what else forks, are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SERVER = """
import multiprocessing, os, signal, sys, time

from vllm_gptoss.engine import parent_death

MODEL, MANNER, METHOD, LOADED, *CHILDREN = sys.argv[1:]

def load_plugin():
    if MODEL == "gpt-oss":
        sys.modules["vllm_gptoss.engine.experts.config"] = sys
    parent_death.watch()
    parent_death.watch()

def engine(depth):
    if MANNER == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        parent_death.GRACE_S = 0.5
    if LOADED == "in every process" or METHOD == "spawn":
        load_plugin()
    if depth:
        start(depth - 1)
    os.write(1, b"%d\\n" % os.getpid())  # whole, though others write too
    time.sleep(60)

def start(depth):
    multiprocessing.get_context(METHOD).Process(target=engine, args=(depth,)).start()

def stranger():
    if not os.fork():
        os.write(1, b"%d\\n" % os.getpid())  # whole, though others write too
        time.sleep(60)
        os._exit(0)

if __name__ == "__main__":
    if LOADED == "in the server":
        load_plugin()
    for child in CHILDREN:
        {"engine": lambda: start(0), "engine with a worker": lambda: start(1), "stranger": stranger}[child]()
    time.sleep(60)
"""


@contextmanager
def killed_server(folder: Path, arguments: Sequence[str], processes: int) -> Iterator[list[psutil.Process]]:
    """The children and grandchildren of a server that has just been killed; they end with the test."""
    script = folder / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    found: list[psutil.Process] = []
    with subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True) as server:
        try:
            found += [psutil.Process(int(server.stdout.readline())) for _ in range(processes)]
            server.send_signal(signal.SIGKILL)
            server.wait()
            yield found
        finally:
            for process in found:
                if process.is_running():
                    process.kill()


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("model", "manner", "ends"),
    [("gpt-oss", "willing", True), ("gpt-oss", "stubborn", True), ("other", "willing", False)],
)
def test_an_engine_ends_with_its_killed_server(
    tmp_path: Path, model: str, manner: str, ends: bool, method: str
) -> None:
    with killed_server(tmp_path, [model, manner, method, "in every process", "engine"], 1) as engines:
        gone, _ = psutil.wait_procs(engines, timeout=20 if ends else 2)
        assert bool(gone) is ends


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_engine_whose_plugin_was_loaded_by_the_server_ends_too(tmp_path: Path, method: str) -> None:
    """vLLM loads plugins once per process, and a forked engine has its server's."""
    with killed_server(tmp_path, ["gpt-oss", "willing", method, "in the server", "engine"], 1) as engines:
        _, alive = psutil.wait_procs(engines, timeout=20)
        assert not alive


@pytest.mark.parametrize("children", [["engine"] * 3, ["engine", "stranger"], ["engine with a worker"]])
def test_brothers_and_children_of_forked_engines_do_not_keep_them(tmp_path: Path, children: list[str]) -> None:
    """A brother forked later, and a process that we know nothing of, hold the pipes of those before them."""
    processes = len(children) + ("engine with a worker" in children)
    with killed_server(tmp_path, ["gpt-oss", "willing", "fork", "in the server", *children], processes) as found:
        _, alive = psutil.wait_procs(found, timeout=20 if "stranger" not in children else 5)
        assert len(alive) == children.count("stranger"), "processes forked by another library must survive"


def test_a_worker_follows_its_engine_not_the_server(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    command = [sys.executable, str(script), "gpt-oss", "willing", "fork", "in the server", "engine with a worker"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        processes = [psutil.Process(int(server.stdout.readline())) for _ in range(2)]
        engine = next(process for process in processes if process.ppid() == server.pid)
        (worker,) = (process for process in processes if process != engine)
        try:
            os.kill(engine.pid, signal.SIGKILL)
            gone, _ = psutil.wait_procs([worker], timeout=20)
            assert gone
            assert server.poll() is None
        finally:
            server.kill()
            if worker.is_running():
                worker.kill()
