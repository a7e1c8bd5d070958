"""The `input` of a request: items, each checked against openai-python's type of its kind, as plain dicts with ids.

Every output item of this server is also a valid input item.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openai.types.responses import response_input_item as sdk
from openai.types.responses.response_code_interpreter_tool_call import ResponseCodeInterpreterToolCall
from openai.types.responses.response_compaction_item_param import ResponseCompactionItemParam
from openai.types.responses.response_custom_tool_call import ResponseCustomToolCall
from openai.types.responses.response_custom_tool_call_output import ResponseCustomToolCallOutput
from openai.types.responses.response_function_tool_call import ResponseFunctionToolCall
from openai.types.responses.response_function_web_search import ResponseFunctionWebSearch
from openai.types.responses.response_input_file import ResponseInputFile
from openai.types.responses.response_input_text import ResponseInputText
from openai.types.responses.response_output_message import ResponseOutputMessage
from openai.types.responses.response_output_refusal import ResponseOutputRefusal
from openai.types.responses.response_output_text import ResponseOutputText
from openai.types.responses.response_reasoning_item import ResponseReasoningItem
from pydantic import BaseModel

from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError, unknown_parameter, unsupported
from vllm_gptoss.server.responses.request.validation import validate
from vllm_gptoss.tools.documents import MAX_TEXT
from vllm_gptoss.tools.unreadable import describe

Item = dict[str, Any]

ITEMS: Mapping[str, tuple[str, type[BaseModel]]] = {
    "reasoning": ("rs", ResponseReasoningItem),
    "function_call": ("fc", ResponseFunctionToolCall),
    "function_call_output": ("fco", sdk.FunctionCallOutput),
    "custom_tool_call": ("ctc", ResponseCustomToolCall),
    "custom_tool_call_output": ("ctco", ResponseCustomToolCallOutput),
    "web_search_call": ("ws", ResponseFunctionWebSearch),
    "code_interpreter_call": ("ci", ResponseCodeInterpreterToolCall),
    "mcp_call": ("mcp", sdk.McpCall),
    "mcp_list_tools": ("mcpl", sdk.McpListTools),
    "mcp_approval_request": ("mcpr", sdk.McpApprovalRequest),
    "mcp_approval_response": ("mcpa", sdk.McpApprovalResponse),
    "compaction": ("cmp", ResponseCompactionItemParam),
    "compaction_trigger": ("cmpt", sdk.CompactionTrigger),
    "item_reference": ("", sdk.ItemReference),
}


def parse_input(raw: Any) -> list[Item]:
    """`input` as items. A plain string is one user message; None is no items."""
    if raw is None:
        return []
    if isinstance(raw, str):
        return [message_item("user", raw)]
    if not isinstance(raw, list):
        raise ApiError("'input' must be a string or a list of items.", param="input", code="invalid_type")
    return [parse_item(item, f"input[{index}]") for index, item in enumerate(raw)]


def nameless(raw: Any, items: Sequence[Item]) -> frozenset[str]:
    """The ids of those items of `parse_input(raw)` that came without one."""
    if not isinstance(raw, list):
        return frozenset(item["id"] for item in items)
    return frozenset(item["id"] for given, item in zip(raw, items, strict=True) if not given.get("id"))


def message_item(role: str, text: str) -> Item:
    """A `message` with one text part and a new id."""
    part = "output_text" if role == "assistant" else "input_text"
    content: dict[str, Any] = {"type": part, "text": text}
    if part == "output_text":
        content |= {"annotations": [], "logprobs": []}
    return {"id": ids.new("msg"), "type": "message", "role": role, "status": "completed", "content": [content]}


def parse_item(raw: Any, where: str) -> Item:
    """One checked item with an id. Raises `ApiError` naming the place under `where`."""
    if not isinstance(raw, dict):
        raise ApiError(f"'{where}' must be an object.", param=where, code="invalid_type")
    item = _given(raw)
    _check_id(item, where)
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "message":
        return _parse_message(item, where)
    if not isinstance(kind, str):
        raise ApiError(f"'{where}.type' must be a string.", param=f"{where}.type", code="invalid_type")
    if kind not in ITEMS:
        raise unsupported(f"{where}.type", f"items of type '{kind}' mean nothing to gpt-oss here")
    prefix, model = ITEMS[kind]
    item["type"] = kind
    if prefix:
        item.setdefault("id", ids.new(prefix))
    item = copy.deepcopy(_DEFAULTS.get(kind, {})) | item
    ours = {name: item.pop(name) for name in _UNTYPED.get(kind, ()) if name in item}
    if isinstance(item.get("output"), list):
        item["output"] = [_tool_part(part, f"{where}.output[{at}]") for at, part in enumerate(item["output"])]
    validate(model, item, where)
    item |= ours
    return item


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` without nulls, and without the copies that openai-python's `parse` adds to an item."""
    return {key: value for key, value in fields.items() if value is not None and key not in _PARSED}


def _check_id(item: Item, where: str) -> None:
    """Removes an empty id; refuses an id that the store could not hold, before anything is generated."""
    given = item.get("id")
    if given == "":
        del item["id"]
    elif given is not None and not (isinstance(given, str) and ids.is_one(given)):
        message = f"'{where}.id' is a string of 1 to 128 printable characters."
        raise ApiError(message, param=f"{where}.id", code="invalid_value")


_DEFAULTS: Mapping[str, Item] = {
    "reasoning": {"summary": []},
    "code_interpreter_call": {"container_id": "", "status": "completed"},
    "web_search_call": {"status": "completed"},
}


_PARSED = ("parsed", "parsed_arguments")

_UNTYPED: Mapping[str, tuple[str, ...]] = {"custom_tool_call": ("status", "created_by")}
"""Fields of output items that openai-python's input types lack."""

Part = dict[str, Any]


def _parse_message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise ApiError(f"Invalid '{where}.role': {role!r}.", param=f"{where}.role", code="invalid_value")
    for name in item:
        if name not in ("id", "type", "role", "status", "content", "phase", "created_by"):
            raise unknown_parameter(f"{where}.{name}")
    content = item.get("content")
    if isinstance(content, str):
        parsed = message_item(role, content)
    elif isinstance(content, list):
        parsed = message_item(role, "")
        kinds = _ASSISTANT_PARTS if role == "assistant" else _USER_PARTS
        parsed["content"] = [_parse_part(part, f"{where}.content[{at}]", kinds) for at, part in enumerate(content)]
    else:
        message = f"'{where}.content' must be a string or a list of parts."
        raise ApiError(message, param=f"{where}.content", code="invalid_type")
    parsed["id"] = item.get("id", parsed["id"])
    if role == "assistant":
        if "phase" in item:
            parsed["phase"] = item["phase"]
        validate(ResponseOutputMessage, {**parsed, "content": [_as_sent(part) for part in parsed["content"]]}, where)
    return parsed


def _as_sent(part: Part) -> Part:
    """A part as in openai-python's type. A citation's `lines` and `quote` are this server's, and clients echo them."""
    annotations = [
        {key: value for key, value in annotation.items() if key not in ("lines", "quote")}
        if isinstance(annotation, dict)
        else annotation
        for annotation in part.get("annotations") or ()
    ]
    return {**part, "annotations": annotations} if "annotations" in part else part


def _parse_part(part: Any, where: str, kinds: Mapping[str, Callable[[Part, str], Part]]) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_image", "computer_screenshot"):
        raise unsupported(where, "gpt-oss reads text only, no images")
    if kind == "input_audio":
        raise unsupported(where, "gpt-oss reads text only, no audio")
    if not isinstance(kind, str) or kind not in kinds:
        raise ApiError(f"Invalid '{where}.type': {kind!r}.", param=f"{where}.type", code="invalid_value")
    return kinds[kind](dict(part), where)


def _tool_part(part: Any, where: str) -> Part:
    """A part of a tool's answer. The text of a part of any type is read; a part without text is described."""
    try:
        return _parse_part(part, where, _USER_PARTS)
    except ApiError:
        if not isinstance(part, dict) or part.get("type") in (None, "input_text"):
            raise
        text = part.get("text")
        return {"type": "input_text", "text": text if isinstance(text, str) else describe(part)}


def part_text(part: Any, where: str) -> str:
    """The text of one `input_text` or `input_file`. Raises `ApiError` naming the place under `where`."""
    return str(_parse_part(part, where, _USER_PARTS)["text"])


def _input_text(part: Part, where: str) -> Part:
    validate(ResponseInputText, part, where)
    return {"type": "input_text", "text": part["text"]}


def _input_file(part: Part, where: str) -> Part:
    file = validate(ResponseInputFile, part, where)
    if not file.file_data:
        name = "file_id" if file.file_id else "file_url"
        raise unsupported(f"{where}.{name}", "send the file itself in 'file_data'")
    head, _, data = file.file_data.partition(",") if file.file_data.startswith("data:") else ("", "", file.file_data)
    if head and not head.startswith(("data:text/", "data:application/json")):
        raise unsupported(f"{where}.file_data", "only text and PDF files can be read")
    try:
        text = base64.b64decode(data, validate=True).decode("utf-8")
    except ValueError:
        raise unsupported(f"{where}.file_data", "only base64 of UTF-8 text, or of a PDF, can be read") from None
    if len(text) > MAX_TEXT:
        raise unsupported(f"{where}.file_data", f"files are at most {MAX_TEXT} characters")
    return {"type": "input_text", "text": f"[file: {file.filename or 'unnamed'}]\n{text}"}


def _output_text(part: Part, where: str) -> Part:
    part = {"annotations": [], "logprobs": []} | _given(part)
    if not isinstance(part["annotations"], list):
        raise ApiError(f"'{where}.annotations' must be a list.", param=f"{where}.annotations", code="invalid_type")
    validate(ResponseOutputText, _as_sent(part), where)
    return part


def _refusal(part: Part, where: str) -> Part:
    validate(ResponseOutputRefusal, part, where)
    return part


_USER_PARTS = {"input_text": _input_text, "input_file": _input_file}
_ASSISTANT_PARTS = {
    "output_text": _output_text,
    "refusal": _refusal,
    "input_text": lambda part, where: _output_text({"type": "output_text", "text": part.get("text")}, where),
}


def text_of(item: Mapping[str, Any], field: str = "content") -> str:
    """The text of an item's `content` (or other list of parts, or string), parts joined by newlines."""
    value = item.get(field) or ""
    if isinstance(value, str):
        return value
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in value)
