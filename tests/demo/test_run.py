"""`make serve` leaves no process behind, however it ends. Its server is a fake with an engine that ignores SIGTERM; the
last test starts vLLM."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from demo.run import port_number
from tests.support.places import CACHE, ROOT
from tests.support.waiting import soon
from vllm_gptoss.cli.bench.worker import free_port

SERVER = """
import http.server, multiprocessing, signal, sys, time

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def engine():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

multiprocessing.get_context("fork").Process(target=engine).start()
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""

RUN = """
import sys, types
sys.modules["demo.ask"] = types.SimpleNamespace(main=lambda api, name: None)  # importing openai takes a second
from demo import run, server, supervise

supervise.PATIENCE_S = 1.0
server.command = lambda model, port, *rest: [sys.executable, {server!r}, str(port), {manner!r}]
run.model_dir = lambda cache, wide: cache
sys.exit(run.main())
"""


@pytest.fixture
def fake_bin(tmp_path: Path) -> Callable[[str], Path]:
    """A folder for the Makefile's BIN. Its `python -m demo.run` serves with the fake."""

    def make(manner: str = "willing") -> Path:
        (tmp_path / "server.py").write_text(SERVER)
        (tmp_path / "run.py").write_text(RUN.format(server=str(tmp_path / "server.py"), manner=manner))
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path}/run.py "$@"\n')
        python.chmod(0o755)
        return tmp_path

    return make


class Terminal:
    """A command that leads a session on a new terminal."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        pid, self.master = pty.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell's background jobs ignore
            os.chdir(ROOT)
            os.execvpe(command[0], command, {**os.environ, "PYTHONPATH": str(ROOT), **environ})
        self.leader = psutil.Process(pid)
        self.text = ""

    def read_until(self, pattern: str, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < ends, self.text
            try:
                self.text += os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # EIO: all processes of the terminal have ended
                errors = [line for line in self.text.splitlines() if "Error" in line]
                pytest.fail(f"ended before {pattern!r}:\n{self.text[-3000:]}\n{errors[:9]}")

    def processes(self) -> list[psutil.Process]:
        return [self.leader, *self.leader.children(recursive=True)]

    def close(self) -> None:
        if self.master >= 0:
            os.close(self.master)
            self.master = -1


@contextlib.contextmanager
def serving(command: list[str], environ: dict[str, str], seconds: float = 120) -> Iterator[Terminal]:
    terminal = Terminal(command, environ)
    found: list[psutil.Process] = []
    try:
        terminal.read_until("The server keeps running", seconds)
        found = terminal.processes()
        yield terminal
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = found or terminal.processes()
        terminal.close()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(terminal.leader.pid, 0)


def ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def demo_run(processes: list[psutil.Process]) -> psutil.Process:
    return next(each for each in processes if "--end-with-parent" in each.cmdline() and "make" not in each.name())


def make_of(processes: list[psutil.Process]) -> psutil.Process:
    return next(each for each in processes if each.name() == "make")


ENDS: dict[str, Callable[[Terminal, list[psutil.Process]], None]] = {
    "SIGTERM to make": lambda _, all_: make_of(all_).terminate(),
    "SIGTERM to the program": lambda _, all_: demo_run(all_).terminate(),
    "SIGHUP to the program": lambda _, all_: demo_run(all_).send_signal(signal.SIGHUP),
    "SIGHUP to the group": lambda _, all_: os.killpg(os.getpgid(demo_run(all_).pid), signal.SIGHUP),
    "Ctrl-C": lambda terminal, _: (os.write(terminal.master, b"\x03"), None)[1],
    "the terminal closes": lambda terminal, _: terminal.close(),
    "SIGKILL of make": lambda _, all_: make_of(all_).kill(),
    "SIGKILL of the program": lambda _, all_: demo_run(all_).kill(),
}


@pytest.mark.parametrize("leader", ["make", "a shell"])
@pytest.mark.parametrize("end", ENDS)
def test_no_process_outlives(fake_bin: Callable[[str], Path], end: str, leader: str) -> None:
    folder = fake_bin("willing")
    make = ["make", "-o", "environment", "serve", f"BIN={folder}", f"PORT={free_port()}"]
    command = make if leader == "make" else ["sh", "-c", 'trap "" HUP; "$@"; exit', "sh", *make]
    with serving(command, {"GPTOSS_CACHE": str(folder)}) as terminal:
        found = terminal.processes()
        assert len(found) >= 5  # make, the program, its supervisor, the server, the engine
        ENDS[end](terminal, found)
        below = [each for each in found if each != terminal.leader]
        assert soon(lambda: all(map(ended, below)), 30), [each for each in below if not ended(each)]


def test_a_server_that_ignores_sigterm_is_killed(fake_bin: Callable[[str], Path]) -> None:
    folder = fake_bin("stubborn")
    make = ["make", "-o", "environment", "serve", f"BIN={folder}", f"PORT={free_port()}"]
    with serving(make, {"GPTOSS_CACHE": str(folder)}) as terminal:
        found = terminal.processes()
        demo_run(found).terminate()
        assert soon(lambda: all(map(ended, found)), 30)


def test_the_port_is_8000_or_what_is_asked_for(fake_bin: Callable[[str], Path]) -> None:
    shown = [
        subprocess.run(
            ["make", "-n", "-o", "environment", "serve", *more], cwd=ROOT, capture_output=True, text=True
        ).stdout
        for more in ([], ["PORT=8123"])
    ]
    assert ['--port "8000"' in shown[0], '--port "8123"' in shown[1]] == [True, True]
    port = free_port()
    folder = fake_bin("willing")
    make = ["make", "-o", "environment", "serve", f"BIN={folder}", f"PORT={port}"]
    with serving(make, {"GPTOSS_CACHE": str(folder)}) as terminal:
        assert f"http://127.0.0.1:{port}/v1" in terminal.text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_an_error_before_anything_starts(fake_bin: Callable[[str], Path], host: str) -> None:
    folder = fake_bin("willing")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "GPTOSS_CACHE": str(folder)}
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        make = ["make", "-o", "environment", "serve", f"BIN={folder}", f"PORT={port}"]
        done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == 2
    assert f"Port {port} is in use." in done.stdout
    assert "make serve PORT=8123" in done.stdout
    assert not (folder / "demo.log").exists()


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_what_is_no_port_is_rejected(port: str) -> None:
    assert (port_number("1"), port_number("65535")) == (1, 65535)
    with pytest.raises(ValueError, match=r"invalid literal|^$"):
        port_number(port)


@pytest.mark.vllm
@pytest.mark.serve
def test_vllm_ends_with_make_that_is_killed() -> None:
    bin_dir = Path(sys.executable).parent
    make = ["make", "-o", "environment", "serve", f"BIN={bin_dir}", f"PORT={free_port()}"]
    with serving(make, {"GPTOSS_CACHE": str(CACHE)}, 500) as terminal:
        found = terminal.processes()
        make_of(found).kill()
        below = [each for each in found if each != terminal.leader]
        assert soon(lambda: all(map(ended, below)), 60), [each for each in below if not ended(each)]
