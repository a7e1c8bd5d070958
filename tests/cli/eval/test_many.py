"""Ten thousand samples at 256 at once: the client's memory stays small and does not grow with what was answered."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.scale import SOAK, count

SAMPLES = count(10_000, 4_000)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """In a separate process: its memory is not the client's."""
    command = [sys.executable, "-m", "tests.cli.eval.server"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("api", ["responses", "chat"] if SOAK else ["responses"])
def test_memory_stays_flat_and_every_sample_is_there(tmp_path: Path, api: str) -> None:
    data, out = tmp_path / "sums.jsonl", tmp_path / "run"
    rows = ({"id": f"q{n}", "question": f"What is {n} + 7?", "answer": n + 7} for n in range(SAMPLES))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with server() as url:
        command = [sys.executable, "-m", "vllm_gptoss.cli", "eval", "--base-url", url, "--api", api, "--eval", "gsm8k"]
        command += ["--data", f"gsm8k={data}", "--out", str(out), "--effort", "low", "--concurrency", "256"]
        began = time.monotonic()
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            seen = watched(process, out / "samples.jsonl")
    seconds = time.monotonic() - began
    assert process.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    (row,) = json.loads((out / "summary.json").read_text())["rows"]
    assert (row["samples"], row["lost"], row["accuracy"]) == (SAMPLES, 0, 1.0)
    peak = max(memory for _, memory in seen)
    middle = [memory for written, memory in seen if SAMPLES * 0.4 < written < SAMPLES * 0.5]
    end = [memory for written, memory in seen if SAMPLES * 0.85 < written < SAMPLES]  # after it comes the panel
    grown = max(end) - max(middle)
    print(f"\n{api}: {SAMPLES} samples in {seconds:.0f} s, peak {peak >> 20} MiB, grown by {grown / 2**20:.1f} MiB")
    assert peak < 1 << 30
    # Of 10,000 answers of 1.6 kB, half would be 8 MB of text, several times that as objects; a line of the progress
    # and the allocator's own growth are below 4.
    assert grown < 4 << 20


def watched(process: subprocess.Popen[bytes], file: Path) -> list[tuple[int, int]]:
    """(lines written, bytes of memory) while the process runs."""
    found, written, place = [], 0, 0
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = psutil.Process(process.pid).memory_info().rss
            if file.exists():
                with file.open("rb") as lines:
                    lines.seek(place)
                    new = lines.read()
                    place += len(new)
                    written += new.count(b"\n")
            found.append((written, memory))
        time.sleep(0.05)
    return found
