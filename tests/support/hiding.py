"""`python -m tests.support.hiding MODEL CASE…`: vLLM's app of a gpt-oss server, each time without some modules.

The app is built and its state filled by vLLM's own functions; the engine is a fake with one answer. A case is
a JSON list: the modules, the server's `--tool-server`, environment variables. Prints a JSON line for each case: the
log, the module that serves each route, the class of vLLM's tool server, and the answers to three requests, or the error
that ended the start. With null in place of the variables only the tools are made, and the line has why each is off.
vLLM is imported before a module is hidden, so that modules that vLLM needs too can be hidden.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import io
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx

ANSWER = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
QUESTIONS = {
    "/v1/responses": {"input": "Is it?"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Is it?"}]},
    "/v1/completions": {"prompt": "Is it?"},
}


class Hidden(importlib.abc.MetaPathFinder):
    """Raises for a module and what is below it, as where it is not installed."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if f"{fullname}.".startswith(f"{self.module}."):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def hide(module: str) -> None:
    """From later imports; this package is imported again."""
    for name in [*sys.modules]:
        if f"{name}.".startswith((f"{module}.", "vllm_gptoss.")):
            del sys.modules[name]
    sys.meta_path.insert(0, Hidden(module))


class Engine:
    """The parts of vLLM's engine client that handlers are built from, and one answer to everything."""

    errored, dead_error = False, RuntimeError()

    def __init__(self, config: Any) -> None:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding
        from vllm.renderers import renderer_from_config

        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = SimpleNamespace()
        encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        self.answer = encoding.encode(ANSWER, allowed_special="all")

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Anything is admitted."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        from vllm.outputs import CompletionOutput, RequestOutput

        choice = CompletionOutput(0, "Yes.", self.answer, None, None, finish_reason="stop", stop_reason=200002)
        yield RequestOutput(request_id, None, [1, 2], None, [choice], finished=True)


def arguments(model: str) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, "--served-model-name", "m"])


async def serve(args: Any, client: Engine, questions: Mapping[str, Any]) -> dict[str, Any]:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    app = build_app(args, ("generate",), client.model_config)
    await init_app_state(client, app.state, args, ("generate",))
    routes = {route.path: route.endpoint.__module__ for route in app.routes if getattr(route, "methods", None)}
    answers, tools, handlers = (
        {},
        type(app.state.openai_serving_responses.tool_server).__name__,
        [*vars(app.state)["_state"].values()],
    )
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as http,
    ):
        for path, body in questions.items():
            answer = await http.post(path, json={"model": "m", **body})
            answers[path] = [answer.status_code, answer.text]
    return {"routes": routes, "answers": answers, "tool_server": tools, "handlers": handlers}


def without(module: str, args: Any, client: Engine) -> dict[str, Any]:
    for each in module.split():
        hide(each)
    said = io.StringIO()
    logging.getLogger("vllm").addHandler(logging.StreamHandler(said))  # our loggers get vLLM's handlers
    try:
        done = asyncio.run(serve(args, client, QUESTIONS))
        del done["handlers"]
    except Exception as error:
        done = {"ended": f"{type(error).__name__}: {error}"}
    return {"module": module, "log": said.getvalue(), **done}


def tools_without(module: str, spec: str) -> dict[str, Any]:
    hide(module)
    from vllm_gptoss.tools.server import ToolServer

    return {"module": module, "off": {each.name: each.unavailable for each in ToolServer.from_spec(spec).providers}}


def main(model: str, *cases: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = arguments(model)
    client = Engine(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    os.environ["VLLM_PLUGINS"] = ""
    asyncio.run(serve(arguments(model), client, {}))  # so that each child has all of vLLM imported
    os.environ["VLLM_PLUGINS"] = "gptoss"
    for case in cases:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            module, args.tool_server, environ = json.loads(case)
            os.environ.update(environ or {})
            made = tools_without(module, args.tool_server) if environ is None else without(module, args, client)
            print(json.dumps(made), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
