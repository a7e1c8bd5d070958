"""From items to Harmony: the conversation so far as the messages of a prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_gptoss.server.harmony import messages as harmony
from vllm_gptoss.server.harmony.custom import arguments_of
from vllm_gptoss.server.harmony.events import Channel
from vllm_gptoss.server.harmony.messages import Message
from vllm_gptoss.server.responses.errors import ApiError, RetiredKeyError
from vllm_gptoss.server.responses.request.items import Item, text_of

logger = logging.getLogger(__name__)

Open = Callable[[str, str], str | None]
"""(sealed text, purpose) to the text, or None."""

LOST = "[The output of this tool call is not available any more.]"
SUMMARY = "Summary of the conversation so far:\n\n"
LOST_SUMMARY = (
    "[The summary of the conversation so far can not be read any more: only what the user said is known of it. Where"
    " you need more, say so and ask.]"
)
APPROVAL = "mcp_approval_response"


@dataclass(slots=True)
class History:
    """A conversation as messages. `instructions`: system and developer messages at its beginning.

    `approvals`: approved or denied MCP calls without a result, as (request item, response item).
    """

    messages: list[Message] = field(default_factory=list)
    instructions: list[str] = field(default_factory=list)
    approvals: list[tuple[Item, Item]] = field(default_factory=list)
    listed: set[str] = field(default_factory=set)
    wants_compaction: bool = False


class HistoryReader:
    """Reads items in order. `hidden`: by item id, text that the model saw and the API does not show."""

    def __init__(self, hidden: Mapping[str, Any], unseal: Open, raw: frozenset[str] = frozenset()) -> None:
        self._hidden = hidden
        self._unseal = unseal
        self._raw = raw
        self._history = History()
        self._calls: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        self._requests: dict[str, Item] = {}
        self._at = 0
        self._open_from = -1
        self._answered: set[Any] = set()

    def read(self, items: Sequence[Item], own_from: int = 0) -> History:
        """`own_from`: index of this request's first item, for the `param` of errors."""
        said = [i for i, item in enumerate(items) if item["type"] in _SAID or item.get("role") == "assistant"]
        self._open_from = max(said, default=-1)
        self._answered = {item.get("call_id") for item in items if item["type"] in _OUTPUTS}
        for index, item in enumerate(items):
            self._at = index
            where = f"input[{index - own_from}]" if index >= own_from else "input"
            kind = item["type"]
            reader = _READERS.get(kind)
            if reader is None:
                raise ApiError(f"Items of type '{kind}' cannot be read here.", param=f"{where}.type")
            # Reasoning that the client did not get, and that precedes this item.
            if before := (self._hidden.get(item.get("id", "")) or {}).get("before"):
                self._add(harmony.analysis(before))
            reader(self, item, where)
        if self._waiting:
            call = next(iter(self._waiting))
            raise ApiError(f"No tool output found for function call {call}.", param="input", code="missing_tool_output")
        return self._history

    def _add(self, *messages: Message) -> None:
        self._history.messages.extend(messages)

    def _message(self, item: Item, where: str) -> None:
        role, text = item["role"], text_of(item)
        if role == "user":
            self._add(harmony.user(text))
        elif role == "assistant":
            self._add(harmony.preamble(text) if item.get("phase") == "commentary" else harmony.final(text))
        elif self._history.messages:
            self._add(harmony.developer(text))
        else:
            self._history.instructions.append(text)

    def _reasoning(self, item: Item, where: str) -> None:
        text = text_of(item)
        sealed = item.get("encrypted_content")
        if not text and sealed:
            try:
                opened = self._unseal(sealed, "reasoning")
            except RetiredKeyError as error:
                logger.warning("Reasoning of an earlier turn is left out: %s", error)
                opened = ""
            if opened is None:
                message = "The encrypted content was not made by this server for this API key, or was altered."
                param = f"{where}.encrypted_content"
                raise ApiError(message, param=param, code="invalid_encrypted_content")
            text = opened
        hidden = self._hidden.get(item["id"]) or {}
        text = text or hidden.get("text") or text_of(item, "summary")
        if text:
            self._add(harmony.analysis(text))

    def _call(self, item: Item, where: str) -> None:
        if item.get("status") == "incomplete" and item["call_id"] not in self._answered:
            logger.info("Call %s was cut and never answered; it is left out of the prompt", item["call_id"])
            return
        recipient = f"{item.get('namespace') or harmony.FUNCTIONS}.{item['name']}"
        self._calls[item["call_id"]] = self._waiting[item["call_id"]] = recipient
        if item["type"] == "function_call":
            self._add(harmony.call(recipient, item["arguments"]))
        elif recipient in self._raw:
            self._add(harmony.call(recipient, item["input"], content_type=None))
        else:
            self._add(harmony.call(recipient, arguments_of(item["input"])))

    def _output(self, item: Item, where: str) -> None:
        call = item.get("call_id") or ""
        name = self._calls.get(call)
        if name is None:
            message = f"No tool call found for {item['type']} with call_id '{call}'."
            raise ApiError(message, param=f"{where}.call_id", code="tool_call_not_found")
        self._waiting.pop(call, None)
        self._add(harmony.tool_result(name, text_of(item, "output")))

    def _python(self, item: Item, where: str) -> None:
        logs = [o.get("logs") or "[image]" for o in item.get("outputs") or ()]
        self._builtin(item, "python", item.get("code") or "", "\n".join(logs))

    def _browser(self, item: Item, where: str) -> None:
        action = item["action"]
        tool = {"open_page": "open", "find_in_page": "find"}.get(action["type"], "search")
        fields = {"open": ("url",), "find": ("pattern", "url"), "search": ("query",)}[tool]
        given = {name: action[name] for name in fields if action.get(name)}
        if tool == "open":
            given = {"id": given.get("url", "")}
        self._builtin(item, f"browser.{tool}", json.dumps(given, ensure_ascii=False), "")

    def _builtin(self, item: Item, recipient: str, arguments: str, shown: str) -> None:
        """A call of a built-in tool: the hidden original where it is known, else made from the item."""
        if item.get("status") == "incomplete":
            return
        hidden = self._hidden.get(item.get("id", "")) or {}
        recipient, arguments = hidden.get("recipient", recipient), hidden.get("arguments", arguments)
        self._add(harmony.builtin_call(recipient, arguments))
        text = hidden.get("output", shown) or LOST
        self._add(harmony.tool_result(recipient, text, channel=Channel.ANALYSIS))

    def _mcp_call(self, item: Item, where: str) -> None:
        if item.get("status") == "incomplete":
            return
        recipient = f"{item['server_label']}.{item['name']}"
        hidden = self._hidden.get(item["id"]) or {}
        error = item.get("error")
        text = hidden.get("output") or item.get("output") or (json.dumps(error) if error else "")
        self._add(harmony.call(recipient, item["arguments"]), harmony.tool_result(recipient, text))

    def _mcp_list(self, item: Item, where: str) -> None:
        self._history.listed.add(item["server_label"])

    def _approval_request(self, item: Item, where: str) -> None:
        self._requests[item["id"]] = item

    def _approval_response(self, item: Item, where: str) -> None:
        request = self._requests.pop(item["approval_request_id"], None)
        if request is None:
            message = f"No approval request with id '{item['approval_request_id']}' is open."
            raise ApiError(message, param=f"{where}.approval_request_id", code="approval_request_not_found")
        if self._at > self._open_from:
            self._history.approvals.append((request, item))
        elif not item["approve"]:  # an earlier turn's; an approved one has its `mcp_call`
            recipient = f"{request['server_label']}.{request['name']}"
            why = f"The user denied this call: {item.get('reason') or 'no reason given'}"
            self._add(harmony.call(recipient, request["arguments"]), harmony.tool_result(recipient, why))

    def _compaction(self, item: Item, where: str) -> None:
        try:
            opened = self._unseal(item["encrypted_content"], "compaction")
        except RetiredKeyError as error:
            self._lost_compaction(error)
            return
        if opened is None:
            message = "The compaction was not made by this server for this API key, or was altered."
            raise ApiError(message, param=f"{where}.encrypted_content", code="invalid_encrypted_content")
        # The summary replaces all earlier messages except the users'.
        self._history.messages = [m for m in self._history.messages if m.role is harmony.Role.USER]
        self._waiting.clear()
        self._add(harmony.developer(SUMMARY + opened))

    def _lost_compaction(self, error: RetiredKeyError) -> None:
        """Leaves the summarised messages in the prompt if the client sent them, else informs the model of the loss.

        An error would end the conversation: the client has no other copy of the summary.
        """
        self._waiting.clear()
        if all(message.role is harmony.Role.USER for message in self._history.messages):
            logger.warning("A summary of earlier turns is lost, and the client did not send the turns: %s", error)
            self._add(harmony.developer(LOST_SUMMARY))
        else:
            logger.warning("A summary of earlier turns is lost; the turns themselves are in the prompt: %s", error)

    def _trigger(self, item: Item, where: str) -> None:
        self._history.wants_compaction = True


_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})

_SAID = frozenset({"reasoning", "mcp_call", "function_call", "custom_tool_call", "web_search_call", "compaction"})
"""Items that only the assistant makes: an approval before one of them has been dealt with."""

_READERS: Mapping[str, Callable[[HistoryReader, Item, str], None]] = {
    "message": HistoryReader._message,
    "reasoning": HistoryReader._reasoning,
    "function_call": HistoryReader._call,
    "custom_tool_call": HistoryReader._call,
    "function_call_output": HistoryReader._output,
    "custom_tool_call_output": HistoryReader._output,
    "code_interpreter_call": HistoryReader._python,
    "web_search_call": HistoryReader._browser,
    "mcp_call": HistoryReader._mcp_call,
    "mcp_list_tools": HistoryReader._mcp_list,
    "mcp_approval_request": HistoryReader._approval_request,
    APPROVAL: HistoryReader._approval_response,
    "compaction": HistoryReader._compaction,
    "compaction_trigger": HistoryReader._trigger,
}
