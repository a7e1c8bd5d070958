"""Request bodies for /openapi.json: the routes read them without FastAPI, which so has no schema."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from vllm_gptoss.server.responses.request.create import CreateRequest
from vllm_gptoss.server.responses.request.items import ITEMS
from vllm_gptoss.server.responses.request.tool_params import MODELS

JSON = "application/json"


def create_body() -> dict[str, Any]:
    """`openapi_extra` of POST /v1/responses."""
    return _body(_create_schema())


def object_body(*names: str) -> dict[str, Any]:
    """`openapi_extra` of a route with an object of these fields as body; fields of create have its descriptions."""
    known = _create_schema()["properties"]
    items = {"type": "array", "items": known["input"]["anyOf"][1]["items"]}
    return _body({"type": "object", "properties": {name: known.get(name, items) for name in names}})


@cache
def _create_schema() -> dict[str, Any]:
    """pydantic takes about 50 ms for it, and nine routes refer to it."""
    schema = CreateRequest.model_json_schema()
    inlined: dict[str, Any] = _inline(schema, schema.get("$defs", {}), ())
    inlined["properties"] |= {
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": _tagged([*ITEMS, "message"])}]},
        "tools": {"type": "array", "items": _tagged(MODELS)},
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}]},
    }
    return inlined


def _body(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def _tagged(kinds: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"enum": sorted(kinds)}}, "required": ["type"]}


def _inline(node: Any, definitions: Mapping[str, Any], seen: tuple[str, ...]) -> Any:
    """Puts definitions where they are used; a recursive one becomes any object."""
    if isinstance(node, list):
        return [_inline(entry, definitions, seen) for entry in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = str(node["$ref"]).rsplit("/", 1)[1]
        return {"type": "object"} if name in seen else _inline(definitions[name], definitions, (*seen, name))
    return {key: _inline(value, definitions, seen) for key, value in node.items() if key != "$defs"}
