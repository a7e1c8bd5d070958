"""No request that our OpenAPI description allows, or almost allows, is answered with a 5xx."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.responses import fakes
from tests.support.responses.server import MODEL, Start
from tests.support.responses.turns import HELLO

EXAMPLES = 20
"""Generated requests per operation; what is generated is the same in every run."""

KNOWN = """
[dictionaries.responses]
values = {responses}
[dictionaries.conversations]
values = {conversations}
[parameters]
"path.response_id" = {{ dictionary = "responses", probability = 0.7 }}
"path.conversation_id" = {{ dictionary = "conversations", probability = 0.7 }}
"body.model" = {{ dictionary = "models", probability = 0.9 }}
[dictionaries.models]
values = ["{model}"]
"""
"""Some of the generated requests are about things that exist; deleting one leaves others."""


def things(http: httpx.Client) -> dict[str, str]:
    responses, conversations = [], []
    for number in range(10):
        body = {"model": MODEL, "input": "hi", "request_id": f"resp_{number}", "background": number % 2 == 0}
        responses.append(http.post("/v1/responses", json=body).raise_for_status().json()["id"])
        body = {"items": [{"role": "user", "content": "hi"}]}
        conversations.append(http.post("/v1/conversations", json=body).raise_for_status().json()["id"])
    return {"responses": json.dumps(responses), "conversations": json.dumps(conversations), "model": MODEL}


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(start: Start, tmp_path: Path) -> None:
    server = start(HELLO, providers=[fakes.python(), fakes.browser(), fakes.mcp()], chunk=100)
    with httpx.Client(base_url=server.url) as http:
        (tmp_path / "schemathesis.toml").write_text(KNOWN.format(**things(http)))
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--generation-deterministic"]
    command += ["--max-examples", str(EXAMPLES), "--exclude-path-regex", "^/v1/openresponses/", "--no-color"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    counted = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    assert counted, ran.stdout[-3000:]
    assert int(counted[1]) > 1000, "so few requests prove nothing"
    assert len(server.engine.prompts) - 10 > 50, "too few requests reached the model"
