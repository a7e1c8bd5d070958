"""A part of the endpoint plugin that fails, at any step, leaves nothing behind: vLLM answers as without the plugin."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support import warm
from vllm_gptoss.server.http import routes

STEPS = {
    "attach": {
        "Completions": "vllm_gptoss.server.chat.completions:replace_route",
        "ChatCompletions": "vllm_gptoss.server.chat.messages_route:replace_route",
        "ResponsesEndpoint": "vllm_gptoss.server.responses.transport.container_routes:add_routes",
    },
    "start": {
        "Completions": "vllm_gptoss.server.chat.completions:CompletionStream",
        "ChatCompletions": "vllm_gptoss._vllm.replaced:use_renderer",
        "ResponsesEndpoint": "vllm_gptoss.server.responses.endpoint:served_models",
    },
}
"""The last name that each part uses in a step."""

RUN = """
import asyncio, copy, importlib, json, os, sys
from tests.support import hiding
from vllm.engine.arg_utils import AsyncEngineArgs

model, broken, spec = sys.argv[1:]
args = hiding.arguments(model)
client = hiding.Engine(AsyncEngineArgs.from_cli_args(args).create_engine_config())

def fail(*_):
    raise RuntimeError("moved")

def state(plugins, tool_server):
    os.environ["VLLM_PLUGINS"] = plugins
    mine = copy.deepcopy(args)
    mine.tool_server = tool_server
    done = asyncio.run(hiding.serve(mine, client, hiding.QUESTIONS))
    done["parsers"] = sorted({
        f"{type(value).__name__}.{name}: {kind.__module__}"
        for value in done.pop("handlers") for name, kind in getattr(value, "__dict__", {}).items()
        if isinstance(kind, type) and kind.__name__ == "HarmonyParser"
    })
    done["answers"] = {path: [status, "Yes." in text] for path, (status, text) in done["answers"].items()}
    return done

stock = state("", spec)
for target in filter(None, broken.split(",")):
    module, _, name = target.partition(":")
    assert hasattr(importlib.import_module(module), name)
    setattr(importlib.import_module(module), name, fail)
print("\\n" + json.dumps([stock, state("gptoss", spec)]))
"""


@pytest.mark.vllm
@pytest.mark.parametrize("step", STEPS)
def test_nothing_of_ours_is_left_where_every_part_fails(model_dir: Path, tmp_path: Path, step: str) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = run(model_dir, ",".join(STEPS[step].values()), environ)
    stock, ours = done
    parsers = [str(line) for line in ours.pop("parsers")]
    assert [line for line in parsers if not line.endswith(": vllm.parser.harmony")] == []
    del stock["parsers"]
    assert ours == stock
    assert stock["tool_server"] == "DemoToolServer"
    assert stock["answers"] == {path: [200, True] for path in stock["answers"]}


def run(model_dir: Path, broken: str, environ: dict[str, str]) -> list[dict[str, Any]]:
    done = warm.run(["-c", RUN, str(model_dir), broken, "demo"], {**os.environ, **environ}, 500)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_route_of_another_plugin_returns_rather_than_the_one_it_replaced() -> None:
    """The app has both routes when the plugin attaches its own; vLLM removes the replaced one at the end."""
    app = FastAPI()
    for answer in ("vLLM's", "theirs", "ours"):
        app.add_api_route("/v1/x", lambda answer=answer: answer, methods=["POST"], name=answer)
    app.add_api_route("/v1/only", lambda: "ours", methods=["GET"], name="new")
    added = list(app.router.routes)
    mine = [route for route in added if route.name in ("ours", "new")]
    app.router.routes[:] = mine  # as vLLM leaves it
    routes.put_back(app, mine, [route for route in added if route not in mine])
    assert [route.name for route in app.router.routes] == ["theirs"]
