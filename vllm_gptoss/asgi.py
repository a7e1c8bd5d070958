"""What stands between a response and the web server: middlewares that look at the head of a response only.

Each of the five that vLLM's app has by default passes a part of the body on through a coroutine of its own, 1.9 µs a
token together. Once the head has gone, such a part may go past them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Send = Callable[[Any], Any]

HEAD_ONLY = frozenset(
    {
        ("starlette._exception_handler", "wrap_app_handling_exceptions.<locals>.wrapped_app.<locals>.sender"),
        ("starlette.middleware.cors", "CORSMiddleware.send"),
        ("starlette.middleware.errors", "ServerErrorMiddleware.__call__.<locals>._send"),
        (
            "prometheus_fastapi_instrumentator.middleware",
            "PrometheusInstrumentatorMiddleware.__call__.<locals>.send_wrapper",
        ),
        ("vllm_gptoss.error_format", "ErrorFormat.__call__.<locals>.send_head"),
    }
)
"""The `send` that they put before their own: module and qualified name. `tests/test_asgi.py` reads what they do."""


def for_body(send: Send) -> Send:
    """What `send` hands parts of the body to in the end. What stands before is known, or it is `send` itself."""
    while (inner := _handed_to(send)) is not None:
        send = inner
    return send


def _handed_to(send: Any) -> Send | None:
    if isinstance(send, functools.partial):
        function, known = send.func, send.keywords
    else:
        function = send
        names = getattr(getattr(send, "__code__", None), "co_freevars", ())
        known = {
            name: cell.cell_contents for name, cell in zip(names, getattr(send, "__closure__", None) or (), strict=True)
        }
    if (getattr(function, "__module__", ""), getattr(function, "__qualname__", "")) not in HEAD_ONLY:
        return None
    return None if "body" in known else known.get("send")  # one that collects the body has a variable for it
