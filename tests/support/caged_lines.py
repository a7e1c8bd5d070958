"""Which lines run in the sandbox's own processes, for coverage.

They start without this environment, leave the host's root, and are killed or exit through `os._exit`: coverage can
neither start in them nor write its file. Each line that runs sets one byte in shared memory. `install` changes what the
launchers of this process start; `save` reads the bytes.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

Trace = Callable[[FrameType, str, Any], Any]

PRELUDE = """
import runpy as r
try: r.run_path({here!r})['record']({memory!r}, {files!r})
except OSError: pass  # bubblewrap has changed the root before Python starts
"""


def record(memory: str, files: dict[str, int]) -> None:
    """From now on in this process and its children. files: the place of each file's line 0 in the memory."""
    with open(memory, "r+b") as file:
        seen = mmap.mmap(file.fileno(), 0)

    def tracer(first: int) -> Trace:
        def trace(frame: FrameType, event: str, argument: Any) -> Trace:
            del event, argument
            seen[first + frame.f_lineno] = 1
            return trace

        return trace

    tracers = {name: tracer(first) for name, first in files.items()}

    def called(frame: FrameType, event: str, argument: Any) -> Trace | None:
        trace = tracers.get(frame.f_code.co_filename)
        return trace(frame, event, argument) if trace else None

    threading.settrace(called)
    sys.settrace(called)


class Recorder:
    """The memory, and what the launchers start with it."""

    def __init__(self, package: Path) -> None:
        self.files: dict[str, int] = {}
        size = 0
        for path in sorted((package / "tools").rglob("*.py")):
            self.files[str(path)] = size
            size += len(path.read_bytes().splitlines()) + 1
        self.memory = Path(tempfile.mkdtemp(prefix="gptoss-lines-")) / "memory"
        self.memory.write_bytes(bytes(size))

    def install(self) -> None:
        from vllm_gptoss.tools.sandbox import launcher

        plain = launcher.loader
        prelude = PRELUDE.format(here=__file__, memory=str(self.memory), files=self.files)
        launcher.loader = lambda module: prelude + plain(module)
        launcher.LOADER = launcher.loader("zygote")

    def lines(self) -> dict[str, list[int]]:
        seen = self.memory.read_bytes()
        ends = [*list(self.files.values())[1:], len(seen)]
        spans = zip(self.files.items(), ends, strict=True)
        return {name: [n - first for n in range(first + 1, end) if seen[n]] for (name, first), end in spans}

    def save(self, data_file: Path) -> None:
        """Next to coverage's own files, where it combines them."""
        from coverage import CoverageData

        data = CoverageData(basename=str(data_file), suffix=f"caged.{os.getpid()}")
        data.add_lines({name: lines for name, lines in self.lines().items() if lines})
        data.write()
