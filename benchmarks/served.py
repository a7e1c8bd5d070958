"""A `vllm serve` process for a benchmark, and gpt-oss's tokenizer for it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vllm_gptoss.cli.bench.worker import free_port

CHECKOUT = Path(__file__).resolve().parents[1]
NAME = "gpt-oss"
CAUSE = re.compile(r"^(?!.*WARNING).*\b[A-Z]\w*(Error|Exception): ")


class ServedError(RuntimeError):
    """The server or the client ended; the message holds the end of its output."""


def write_tokenizer(directory: Path, tokenizer: Path | None) -> None:
    """Puts gpt-oss's tokenizer into `directory`: that of the folder `tokenizer`, or of this checkout's demo.

    Raises:
        ServedError: there is none.
    """
    if tokenizer is not None:
        for path in tokenizer.glob("*token*.json"):
            shutil.copy(path, directory)
    elif (CHECKOUT / "demo" / "tokenizer.py").exists():
        code = "import sys, pathlib; from demo import tokenizer; tokenizer.write(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, str(directory)], cwd=CHECKOUT, check=True)
    if not (directory / "tokenizer.json").exists():
        raise ServedError("served runs need gpt-oss's tokenizer: --tokenizer FOLDER with its tokenizer.json")


@contextlib.contextmanager
def server(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`vllm serve` that answers, with its port; its output goes to `log`. All of its processes end with the block.

    Raises:
        ServedError: it ended before it answered.
    """
    port = free_port()
    command = [*vllm_command(), "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
    try:
        while not healthy(f"http://127.0.0.1:{port}"):
            if process.poll() is not None:
                raise ServedError(f"vllm serve ended with {process.returncode}:\n{tail(log)}")
            time.sleep(0.5)
        yield process, port
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def vllm_command() -> list[str]:
    """The `vllm` command of this environment, or its module where only the package was unpacked."""
    command = Path(sys.executable).with_name("vllm")
    return [str(command)] if command.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def healthy(url: str) -> bool:
    """Whether the server at `url` answers `/health`."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def tail(log: Path, lines: int = 30) -> str:
    """The end of a process's output, after its first error: vLLM logs causes far above the end."""
    said = log.read_text(errors="replace").splitlines()
    cause = next((line for line in said[:-lines] if CAUSE.search(line)), None)
    return "\n".join(said[-lines:] if cause is None else [cause, "...", *said[-lines:]])
