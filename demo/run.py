"""`make demo`: serves the small gpt-oss with real vLLM and the plugin, and sends it a question.

`python -m demo.run --keep` leaves the server running until Ctrl-C, SIGTERM, or the terminal closes. vLLM ends with this
process, however it ends (`supervise.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from demo import ask, supervise
from demo.expand import model_dir
from demo.server import NAME, Server, ServerError, on_gpu, serve
from vllm_gptoss.tools.sandbox import linux

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("GPTOSS_CACHE", ROOT / ".cache"))

_ENDING: list[int] = []
"""The first signal."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.run", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the server running until Ctrl-C")
    parser.add_argument("--port", type=port_number, default=None, help="a fixed port; default: a free one")
    parser.add_argument("--end-with-parent", action="store_true", help="end when the parent process ends")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    if sys.stdin.isatty():
        threading.Thread(target=_end_with_terminal, daemon=True).start()
    if options.end_with_parent:
        linux.die_with_parent(signal.SIGTERM)
    console = Console()
    CACHE.mkdir(exist_ok=True)
    began = time.monotonic()
    with console.status("expanding the small gpt-oss"):
        model = model_dir(CACHE, wide=on_gpu())  # the kernels of a GPU do not take the small shape
    log = CACHE / "demo.log"
    console.print(f"* vllm serve {model}  [dim](log: {log})[/]")
    try:
        with contextlib.ExitStack() as stack:
            with console.status("vLLM is starting") as status:
                server = stack.enter_context(
                    serve(
                        model,
                        log,
                        ["--tool-server", "demo"],
                        {"GPTOSS_BROWSER_DOCUMENTS": str(ROOT / "demo" / "documents"), "GPTOSS_UI": "1"},
                        port=options.port,
                        popen=supervise.popen,
                        progress=lambda s: status.update(f"vLLM is starting, {s:.0f} s (usually 30 to 60)"),
                    )
                )
            console.print(f"* it serves after {time.monotonic() - began:.0f} s at {server.api}\n")
            ask.main(server.api, NAME)
            if options.keep:
                _keep(console, server)
    except ServerError as error:
        console.print(f"[red]{error}[/]")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


def port_number(text: str) -> int:
    """Raises `ValueError`, which argparse reports."""
    port = int(text)
    if not 1 <= port <= 65535:
        raise ValueError
    return port


def _exit(number: int, frame: Any) -> None:
    """Ends the program once: an exception for the next signal would interrupt the server's end."""
    if not _ENDING:
        _ENDING.append(number)
        raise SystemExit(128 + number)


def _end_with_terminal() -> None:
    """Linux sends SIGHUP to the leader of the session alone; where that is make, make waits for this process."""
    terminal = select.poll()
    terminal.register(sys.stdin, 0)  # hang-ups are always reported
    terminal.poll()
    os.kill(os.getpid(), signal.SIGHUP)


def _keep(console: Console, server: Server) -> None:
    console.print(f"\nThe server keeps running at {server.api}, its page at {server.url}/ui. Ctrl-C stops it.")
    while server.process.poll() is None:
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
