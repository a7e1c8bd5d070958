"""A stdio server as they were in 2024, without any SDK: `initialize` only, listing in pages, custom annotations."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOLS = [
    {"name": "first", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
    {"name": "second", "inputSchema": {"type": "object"}, "annotations": {"include_in_prompt": False}},
]


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        info = {"name": "old server!", "version": "1"}
        found = {"protocolVersion": "2024-11-05", "capabilities": {"tools": {}}, "serverInfo": info}
        return {"result": {**found, "instructions": "Old."}}
    if method == "tools/list":
        page = int(params.get("cursor") or 0)
        more = {"nextCursor": str(page + 1)} if page + 1 < len(TOOLS) else {}
        return {"result": {"tools": [TOOLS[page]], **more}}
    if method == "tools/call":
        return {"result": {"content": [{"type": "text", "text": f"called {params['name']}"}]}}
    return {"error": {"code": -32601, "message": "Method not found"}}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        reply = answer(message["method"], message.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}), flush=True)
