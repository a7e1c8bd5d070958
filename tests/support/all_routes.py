"""`python -m tests.support.all_routes MODEL STORE`: every route of `vllm serve` with the plugin, without an engine.

The app is vLLM's own for the gpt-oss `config.json` in the folder MODEL, with the API keys alice and bob. The Responses
API replays `SAID`; chat and messages end before vLLM's handlers. Prints its port. `/pause` answers with the
event loop's longest pause since the previous call, in seconds of processor time.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvicorn

from tests.support.loop_watch import watched
from tests.support.responses.replay import ReplayEngine
from tests.support.sockets import listening
from vllm_gptoss.server.harmony.tokens import encoding
from vllm_gptoss.server.responses.endpoint import ResponsesEndpoint
from vllm_gptoss.server.responses.prompt.toolset import Providers

MODEL, KEYS = "gpt-oss", ("alice", "bob")
SAID = "<|channel|>final<|message|>Hi.<|return|>"


def app_of(model: str, store: str) -> Any:
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_gptoss.plugin import register

    register()
    settings = f'{{"gptoss": {{"store": "{store}"}}}}'
    arguments = ["--model", model, "--additional-config", settings, "--api-key", *KEYS]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    app = build_app(args, ("generate",))
    app.state.log_stats = False
    for name in ("openai_serving_chat", "anthropic_serving_messages", "openai_serving_completion", "engine_client"):
        setattr(app.state, name, None)
    return app


async def main(model: str, store: str) -> None:
    app = app_of(model, store)
    parts = [each.part for plugin in app.state.endpoint_plugins for each in plugin._parts.installed]
    endpoint = next(part for part in parts if isinstance(part, ResponsesEndpoint))
    said = encoding().encode(SAID, allowed_special="all")
    engine = ReplayEngine(lambda prompt: said)
    async with watched() as watch:

        @app.get("/pause")
        async def pause() -> float:
            longest, watch.longest = watch.longest, 0.0
            engine.prompts.clear()
            engine.samplings.clear()
            return longest

        with listening(0) as listener:
            await endpoint.open(engine, lambda name: (name or MODEL, None), Providers())
            print(listener.getsockname()[1], flush=True)
            await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve([listener])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
