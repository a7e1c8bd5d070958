"""Greedy decoding by real vLLM gives the steps of the conversations, token for token."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import warm_vllm
from tests.support.scale import SOAK, count
from vllm_gptoss.engine.choose.device import detect

EVERY = count(1, 16)
"""All steps in `make soak`, each sixteenth in `make test`."""
PLUGINS = {"with the plugin": "gptoss"} | ({"stock vLLM": ""} if SOAK else {})


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plugins", PLUGINS.values(), ids=PLUGINS)
def test_every_step_is_recalled_token_for_token(model_dir: Path, plugins: str) -> None:
    """In a separate process: an engine leaves threads and global state behind."""
    if not plugins and "amx" not in detect().features:
        pytest.skip("this CPU has no AMX: stock vLLM has no MXFP4 kernel for it; docs/testing.md has its last pass")
    environment = {**os.environ, "VLLM_PLUGINS": plugins, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "demo.verify", str(model_dir), "--fresh", "0", "--every", str(EVERY)]
    done = warm_vllm.run(command, environment, 580)
    counts = dict(re.findall(r"^(\w+) +(\d+) of", done.stdout, re.MULTILINE))
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(counts["ours"]) == int(counts["vllm"]) > 150 // EVERY
    assert int(counts["raw"]) == 2
    assert int(counts["unknown"]) >= 20
