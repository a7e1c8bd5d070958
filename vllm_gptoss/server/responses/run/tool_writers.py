"""Items that a tool of this server completes: python, browser, MCP. Each goes through call, run and result.

`completed` and `output_item.done` follow the tool's run, and have its result. A call that was cut is
`incomplete` and never runs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.run.events import Event, Output
from vllm_gptoss.server.responses.run.item_writers import ItemWriter, Logprobs, Style, Writer
from vllm_gptoss.tools.protocol import BrowserAction, Image, Namespace, Text, ToolResult


class ToolWriter(ItemWriter):
    """A writer of an item that a tool completes. `field`: of the call's text; `busy`: status while the tool runs."""

    field: str
    busy: str

    def delta(self, text: str, logprobs: Logprobs = None) -> list[Event]:
        return [*self._started(), self._event(f"_{self.field}.delta", delta=text)]

    def end(self, text: str, *, cut: bool) -> list[Event]:
        events = [*self._started(), self._event(f"_{self.field}.done", **{self.field: text})]
        self._out.items[self._index][self.field] = text
        return events + self._cut(cut)

    def _cut(self, cut: bool) -> list[Event]:
        return [self._out.done(self._index, status="incomplete")] if cut else []

    def running(self) -> list[Event]:
        """The call is complete and the tool starts."""
        self._out.items[self._index]["status"] = self.busy
        return [self._event(f".{self.busy}")]

    def result(self, result: ToolResult) -> list[Event]:
        """The tool has run."""
        raise NotImplementedError


class PythonCallWriter(ToolWriter):
    """`code_interpreter_call`."""

    kind, prefix, field, busy = "code_interpreter_call", "ci", "code", "interpreting"

    def __init__(self, out: Output, style: Style, container_id: str) -> None:
        super().__init__(out)
        self._style = style
        self._container = container_id

    def _start(self) -> list[Event]:
        item = {"type": self.kind, "status": "in_progress", "code": "", "container_id": self._container}
        return [*self._place({**item, "outputs": None}), self._event(".in_progress")]

    def result(self, result: ToolResult) -> list[Event]:
        outputs: list[dict[str, Any]] = []
        for content in result.content:
            if isinstance(content, Image):
                data = base64.b64encode(content.data).decode()
                outputs.append({"type": "image", "url": f"data:{content.media_type};base64,{data}"})
            elif isinstance(content, Text):
                outputs.append({"type": "logs", "logs": content.text})
        changes: dict[str, Any] = {"status": "failed" if result.error else "completed"}
        if result.container_id:
            changes["container_id"] = result.container_id
        if self._style.outputs:
            changes["outputs"] = outputs
        # The API has no `failed` event for code: the item has the status.
        return [self._event(".completed"), self._out.done(self._index, **changes)]


class BrowserCallWriter(ToolWriter):
    """`web_search_call`: placed when its arguments are complete, because an item must have its action."""

    kind, prefix, busy = "web_search_call", "ws", "searching"

    def __init__(self, out: Output, style: Style, tool: str) -> None:
        super().__init__(out)
        self._style = style
        self._tool = tool

    def delta(self, text: str, logprobs: Logprobs = None) -> list[Event]:
        return []

    def end(self, text: str, *, cut: bool) -> list[Event]:
        item = {"type": self.kind, "status": "in_progress", "action": guess_action(self._tool, text)}
        return [*self._place(item), self._event(".in_progress"), *self._cut(cut)]

    def result(self, result: ToolResult) -> list[Event]:
        changes: dict[str, Any] = {"status": "failed" if result.error else "completed"}
        if result.action:
            changes["action"] = action_fields(result.action, with_sources=self._style.sources)
        return [self._event(".completed"), self._out.done(self._index, **changes)]


def guess_action(tool: str, arguments: str) -> dict[str, Any]:
    """The action from the call's arguments alone, before the browser resolves cursors to URLs."""
    try:
        given = json.loads(arguments)
    except ValueError:
        given = {}
    given = given if isinstance(given, Mapping) else {}
    if tool == "open":
        return {"type": "open_page", "url": given["id"] if isinstance(given.get("id"), str) else ""}
    if tool == "find":
        return {"type": "find_in_page", "pattern": str(given.get("pattern") or ""), "url": ""}
    return {"type": "search", "query": str(given.get("query") or "")}


def action_fields(action: BrowserAction, *, with_sources: bool) -> dict[str, Any]:
    """`action` of a `web_search_call`."""
    if action.type == "open_page":
        return {"type": "open_page", "url": action.url or ""}
    if action.type == "find_in_page":
        return {"type": "find_in_page", "pattern": action.pattern or "", "url": action.url or ""}
    fields: dict[str, Any] = {"type": "search", "query": action.query or ""}
    if with_sources:
        fields["sources"] = [{"type": "url", "url": source.url} for source in action.sources]
    return fields


class McpCallWriter(ToolWriter):
    """`mcp_call`."""

    kind, prefix, field = "mcp_call", "mcp", "arguments"

    def __init__(self, out: Output, label: str, name: str, approval: str | None = None) -> None:
        super().__init__(out)
        self._item = {"server_label": label, "name": name, "arguments": "", "output": None, "error": None}
        self._item["approval_request_id"] = approval

    def _start(self) -> list[Event]:
        return [*self._place({"type": self.kind, "status": "in_progress", **self._item}), self._event(".in_progress")]

    def end(self, text: str, *, cut: bool) -> list[Event]:
        events = self.delta(text) if self._index < 0 else []
        return events + super().end(text, cut=cut)

    def running(self) -> list[Event]:
        self._out.items[self._index]["status"] = "calling"
        return []  # the API has no event for it

    def result(self, result: ToolResult) -> list[Event]:
        if result.error is None:
            completed = self._event(".completed")
            return [completed, self._out.done(self._index, status="completed", output=result.text)]
        content = [{"type": "text", "text": result.text or result.error.message}]
        error = {"type": "mcp_tool_execution_error", "content": content}
        failed = self._event(".failed")
        return [failed, self._out.done(self._index, status="failed", error=error)]


class ApprovalRequestWriter(Writer):
    """`mcp_approval_request`: the call is written down and waits for the client's word."""

    def __init__(self, out: Output, label: str, name: str) -> None:
        self._out = out
        self._label = label
        self._name = name

    def end(self, text: str, *, cut: bool) -> list[Event]:
        if cut:
            return []  # half a call cannot be approved
        item = {
            "id": ids.new("mcpr"),
            "type": "mcp_approval_request",
            "server_label": self._label,
            "name": self._name,
            "arguments": text,
        }
        index, added = self._out.add(item)
        return [added, self._out.done(index)]  # final from the start


def list_tools(out: Output, namespace: Namespace, allowed: frozenset[str] | None) -> list[Event]:
    """`mcp_list_tools`: the tools of a server in this response."""
    tools = [
        {
            "name": tool.name,
            "description": tool.description,
            "input_schema": dict(tool.parameters or {"type": "object", "properties": {}}),
            "annotations": dict(tool.annotations) or None,
        }
        for tool in namespace.tools
        if allowed is None or tool.name in allowed
    ]
    item = {"id": ids.new("mcpl"), "type": "mcp_list_tools", "server_label": namespace.name, "tools": []}
    index, added = out.add(item)
    where = {"item_id": item["id"], "output_index": index}
    kind = "response.mcp_list_tools"
    events = [added, out.event(f"{kind}.in_progress", **where), out.event(f"{kind}.completed", **where)]
    return [*events, out.done(index, tools=tools, error=None)]
