"""vLLM 0.34 with changed functions starts and answers; the affected parts are vLLM's own, and the log lists them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import httpx
import pytest

from demo.server import NAME, on_gpu, serve
from tests.contract.mutation import mutated
from tests.support import warm_vllm

CHANGED = (
    ("vllm/parser/harmony.py", "HarmonyParser.parse_delta"),
    ("vllm/v1/engine/output_processor.py", "OutputProcessor.process_outputs"),
)
"""The engine part stays: without the plugin, vLLM has no MXFP4 experts for a CPU without AMX."""
COMPARED = "import importlib.util; importlib.util.find_spec('vllm').origin = {origin!r}"
"""The server has imported the installed vLLM; the plugin compares the changed copy."""


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.skipif(on_gpu(), reason="changes the vLLM that is installed for CPU")
def test_a_newer_vllm_serves_with_the_affected_parts_off(model_dir: Path, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec.origin is not None
    installed = Path(spec.origin).parents[1]
    shutil.copytree(installed / "vllm", tmp_path / "vllm", copy_function=os.symlink)
    for file, name in CHANGED:
        content = mutated((tmp_path / file).read_bytes(), [name])
        (tmp_path / file).unlink()
        (tmp_path / file).write_bytes(content)
    metadata = tmp_path / "vllm-0.34.0+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.0+cpu\n")
    (tmp_path / "sitecustomize.py").write_text(COMPARED.format(origin=str(tmp_path / "vllm" / "__init__.py")))
    environ = {"PYTHONPATH": str(tmp_path), "GPTOSS_RESPONSES_STORE": "off"}
    with serve(model_dir, tmp_path / "log", environment=environ, popen=warm_vllm.popen) as server:
        question = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
        chat = httpx.post(f"{server.api}/chat/completions", json=question, timeout=120)
        response = httpx.post(f"{server.api}/responses", json={"model": NAME, "input": "hello"}, timeout=120)
    log = server.log.read_text()
    assert chat.status_code == response.status_code == 200, log[-3000:]
    (line,) = [line for line in log.splitlines() if "outside the tested range >=0.32,<0.34" in line]
    active, _, off = line.partition("own implementation: ")
    assert "Active parts: model, attention and experts, Responses API and tools." in active
    for file, name in CHANGED:
        assert f"{file.removesuffix('.py').replace('/', '.')}:{name}" in off
    assert " is active. " in log
