"""Coverage would silently show 0 % for the sandbox again if the recorder no longer reached its processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SESSION = """
import asyncio, json, sys
from pathlib import Path
from tests.support import caged_lines
recorder = caged_lines.Recorder(Path(sys.argv[1]))
recorder.install()
from tests.support.notebooks import run_in, started
async def main():
    provider = await started(warm=0, preload=[])
    assert (await run_in(provider, "40 + 2", "a")).text.strip() == "42"
    await provider.aclose()
asyncio.run(main())
print(json.dumps({Path(name).name: len(lines) for name, lines in recorder.lines().items()}))
"""


@pytest.mark.namespaces
def test_the_sandboxs_processes_are_counted() -> None:
    command = [sys.executable, "-c", SESSION, str(ROOT / "vllm_gptoss")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = json.loads(done.stdout.splitlines()[-1])
    for name in ("zygote.py", "supervisor.py", "cage.py", "payload.py"):
        assert lines[name] > 30, lines
    assert lines["wasm.py"] == 0, "nothing ran it"
