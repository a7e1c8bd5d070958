"""Which middlewares a part of the body may go past: those whose `send` only looks at the head of a response."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from typing import Any

import pytest
from fastapi import FastAPI, Request
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from vllm_gptoss.asgi import HEAD_ONLY, for_body


class Finds(Response):
    """Says what its `send` hands the body to."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["found"].append(for_body(send))
        await super().__call__(scope, receive, send)


class Looks:
    """A middleware of a user's, which sees everything."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def looks(message: Any) -> None:
            await send(message)

        scope["user"] = looks
        await self._app(scope, receive, looks)


async def found(*, users: bool = False, collects: bool = False) -> tuple[Any, dict[str, Any], Any]:
    """What is found for the body, the request's scope, and the web server's own `send`."""
    app = FastAPI()

    @app.post("/x")
    async def create(request: Request) -> Finds:
        return Finds(b"x")

    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    if users:
        app.add_middleware(Looks)
    Instrumentator(body_handlers=[".*"] if collects else []).instrument(app)
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/x", "raw_path": b"/x", "query_string": b"", "scheme": "http",
        "headers": [(b"origin", b"http://a")], "server": ("127.0.0.1", 1), "http_version": "1.1", "root_path": "",
        "found": [],
    }  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        del message

    await app(scope, receive, send)
    return scope["found"][0], scope, send


async def test_the_body_goes_past_what_vllm_has_by_default() -> None:
    inner, _, server = await found()
    assert inner is server


async def test_a_users_middleware_sees_all_of_it() -> None:
    inner, scope, server = await found(users=True)
    assert inner is scope["user"]
    assert inner is not server


async def test_what_collects_the_body_gets_it() -> None:
    inner, _, server = await found(collects=True)
    assert inner is not server
    assert inner.__qualname__.endswith("send_wrapper")


@pytest.mark.parametrize(("module", "name"), sorted(HEAD_ONLY))
def test_they_pass_the_body_on_and_nothing_else(module: str, name: str) -> None:
    """Read in the installed release: what is done for all messages is to hand them on."""
    outer, *inner = name.split(".<locals>.")
    found: Any = importlib.import_module(module)
    for part in outer.split("."):
        found = getattr(found, part)
    tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    wanted = inner[-1] if inner else outer.split(".")[-1]
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef) and n.name == wanted]
    functions = [f for f in functions if "body +=" not in ast.unparse(f)]
    assert len(functions) == 1
    *first, last = [ast.unparse(node) for node in functions[0].body if not isinstance(node, ast.Nonlocal)]
    assert last == "await send(message)"
    goes_at_once = "if message['type'] != 'http.response.start':\n    await send(message)\n    return"
    is_for_the_head = [text.startswith("if message['type'] == 'http.response.start':\n") for text in first]
    assert first[0] == goes_at_once or (all(is_for_the_head) and "\nel" not in "".join(first))
