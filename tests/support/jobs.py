"""Run jobs of `tests.support.generate` from a test, and read their answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support import warm


class Results(dict[str, Any]):
    """Answers by job name; asking for one that failed shows the end of its log."""

    def __init__(self, directory: Path, timings: str) -> None:
        super().__init__({path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")})
        self.directory, self.timings = directory, timings

    def rounds(self, name: str) -> list[list[dict[str, Any]]]:
        answer = self.get(name, {"error": "no answer"})
        if "error" in answer:
            raise AssertionError(f"{name}: {answer['error']}\n{self.log(name)[-3000:]}")
        return answer["rounds"]  # type: ignore[no-any-return]

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()


def run(jobs: dict[str, dict[str, Any]], directory: Path, timeout: float = 400, **environ: str) -> Results:
    """All jobs, one after the other. environ: for the program, before vLLM is imported."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "jobs").write_text(json.dumps(jobs))
    module = ["-m", "tests.support.generate", str(directory / "jobs"), str(directory)]
    done = warm.run(module, os.environ | environ, timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return Results(directory, done.stderr)
