"""`make test-gpu`, or `python -m tests.gpu.suite [OPTIONS OF PYTEST]`: all that a GPU can run, and a record of it.

Kernels, engines with every feature, planted faults, and the end-to-end tests against a `vllm serve` on CUDA with
endpoint and tools. Needs vLLM for CUDA, this package and its dependency group `test` in the Python that runs it. The
record is `benchmarks/results/suite-GPU-DATE.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_gptoss.engine.choose import device

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("vllm", "torch", "triton", "vllm-gptoss")
SLOWEST = 15


def main(options: list[str]) -> int:
    """Pytest's exit status; 2 where there is no GPU."""
    gpu = device.detect()
    if gpu.vendor == "cpu":
        print("no GPU is here that torch can use: `make test` runs what needs none", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu or serve", f"--junitxml={report}", *parallel(), *options]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode
        record = read(report) if report.exists() else {"error": f"pytest ended with {status} and left no report"}
    head = {
        "command": " ".join(["python -m tests.gpu.suite", *options]),
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": str(gpu),
        "versions": {name: version(name) for name in PACKAGES},
        "seconds": round(time.monotonic() - began),
        "status": status,
    }
    name = gpu.name.removeprefix("NVIDIA ").split()[0].lower()
    out = RESULTS / f"suite-{name}-{head['date']}.json"
    out.write_text(json.dumps(head | record, indent=1) + "\n")
    print(f"{out.relative_to(ROOT)}: {record.get('outcomes')} in {head['seconds']} s")
    return status


def parallel() -> list[str]:
    """Seven workers: shared servers, recall, planted faults and four files with separate servers."""
    return ["--numprocesses=7", "--dist=loadfile", "--no-loadscope-reorder"]


def read(report: Path) -> dict[str, Any]:
    """A JUnit report -> outcomes by file, what failed, why what was skipped, and what took longest."""
    files: dict[str, Counter[str]] = {}
    failed, skipped, times = [], Counter[str](), []
    for case in ET.parse(report).iter("testcase"):
        file, name = case.get("classname", ""), f"{case.get('classname')}::{case.get('name')}"
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        files.setdefault(file, Counter())[outcome] += 1
        times.append((float(case.get("time") or 0), name))
        if outcome in ("failure", "error"):
            failed.append(name)
        elif outcome == "skipped":
            skipped[next(child.get("message", "") for child in case if child.tag == "skipped")] += 1
    return {
        "outcomes": dict(sum(files.values(), Counter[str]())),
        "failed": failed,
        "skipped": dict(skipped),
        "slowest": [[name, round(seconds, 1)] for seconds, name in sorted(times, reverse=True)[:SLOWEST]],
        "files": {file: dict(count) for file, count in sorted(files.items())},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
