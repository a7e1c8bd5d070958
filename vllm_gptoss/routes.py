"""Routes of ours in the place of vLLM's: vLLM lets an endpoint plugin replace a route of the same path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute


def posts(app: FastAPI) -> dict[str, APIRoute]:
    """What answers POST, by path."""
    return {route.path: route for route in app.routes if isinstance(route, APIRoute) and "POST" in route.methods}


def add_beside(app: FastAPI, core: APIRoute, ours: Callable[..., Any]) -> None:
    """Adds `ours` beside `core`, which vLLM then takes out."""
    app.add_api_route(core.path, ours, methods=["POST"], dependencies=core.dependencies, responses=core.responses)
