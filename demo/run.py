"""`make demo`: serves the small gpt-oss with real vLLM and the plugin, and asks it a question.

`python -m demo.run --keep` leaves the server running until Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from demo import ask
from demo.expand import model_dir
from demo.server import NAME, Server, ServerError, serve

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("GPTOSS_CACHE", ROOT / ".cache"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.run", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the server running until Ctrl-C")
    parser.add_argument("--port", type=int, default=None, help="a fixed port; default: a free one")
    options = parser.parse_args()
    console = Console()
    CACHE.mkdir(exist_ok=True)
    began = time.monotonic()
    with console.status("expanding the small gpt-oss"):
        model = model_dir(CACHE)
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
                        {"GPTOSS_BROWSER_DOCUMENTS": str(ROOT / "demo" / "documents")},
                        port=options.port,
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


def _keep(console: Console, server: Server) -> None:
    console.print(f"\nThe server keeps running at {server.api}. Ctrl-C stops it.")
    server.process.wait()


if __name__ == "__main__":
    sys.exit(main())
