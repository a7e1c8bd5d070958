"""Replaces vLLM's routes: vLLM lets an endpoint plugin replace a route of the same path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, create_model, model_validator
from starlette.routing import BaseRoute


def posts(app: FastAPI) -> dict[str, APIRoute]:
    """The POST routes by path."""
    return {route.path: route for route in app.routes if isinstance(route, APIRoute) and "POST" in route.methods}


def add_beside(app: FastAPI, core: APIRoute, ours: Callable[..., Any], body: Any = None) -> None:
    """Adds the endpoint `ours(request, raw_request)` with the path of `core`; vLLM removes `core` afterwards.

    `body`: the type of `request`, by default that of `core`.
    """
    # FastAPI reads types from the annotations; vLLM's classes exist only at run time.
    ours.__annotations__ |= {"request": body or get_type_hints(core.endpoint)["request"], "raw_request": Request}
    app.add_api_route(core.path, ours, methods=["POST"], dependencies=core.dependencies, responses=core.responses)


def put_back(app: FastAPI, ours: Sequence[BaseRoute], before: Sequence[BaseRoute]) -> None:
    """Removes the plugin's routes from the app. Restores the routes of `before` that vLLM removed for them."""
    routes: list[BaseRoute] = []
    for route in app.router.routes:
        if not any(route is each for each in ours):
            routes.append(route)
        elif isinstance(route, APIRoute):
            same = (each for each in before if isinstance(each, APIRoute) and each.path == route.path)
            theirs = [each for each in same if each.methods & route.methods]
            routes += theirs[-1:]  # a route of another plugin follows vLLM's, which it replaces
    app.router.routes[:] = routes
    app.openapi_schema = None


def body_class(base: type[BaseModel], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> type[BaseModel]:
    """A subclass of vLLM's body type `base` that applies `change` before validation."""

    def before(cls: type[BaseModel], data: Any) -> Any:
        return change(data) if isinstance(data, Mapping) else data

    validators: Any = {"gptoss": model_validator(mode="before")(classmethod(before))}  # type: ignore[arg-type]
    return create_model(base.__name__, __base__=base, __module__=__name__, __validators__=validators)
