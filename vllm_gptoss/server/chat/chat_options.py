"""Checks fields of chat requests before vLLM validates them, and rejects by name those that gpt-oss cannot honour.

docs/options.md lists every field of every API as honoured, refused or ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_gptoss import _vllm

_CONSTRAINT = "use `response_format` or `structured_outputs`"
_NO_TEMPLATE = "gpt-oss prompts are not made by a chat template"
_NO_CUT = "a cut prompt would not be Harmony's format; leave out old messages, or use `truncation` of /v1/responses"

REFUSED: Mapping[str, str] = {
    "audio": "gpt-oss writes text only",
    "chat_template": _NO_TEMPLATE,
    "documents": "put their text into a message",
    "echo": "put the beginning of the answer into an assistant message, with `continue_final_message`",
    "function_call": "use `tool_choice`",
    "functions": "use `tools`",
    "guided_choice": _CONSTRAINT,
    "guided_decoding_backend": _CONSTRAINT,
    "guided_grammar": _CONSTRAINT,
    "guided_json": _CONSTRAINT,
    "guided_regex": _CONSTRAINT,
    "guided_whitespace_pattern": _CONSTRAINT,
    "moderation": "no moderation model is served; moderate in front of this server",
    "return_prompt_text": "the prompt is made of tokens; ask for `return_token_ids`",
    "truncate_prompt_tokens": _NO_CUT,
    "truncation_side": _NO_CUT,
    "web_search_options": "use /v1/responses with the tool `web_search`",
}
"""Fields that return 400 unless false or empty, with the alternative."""

TEMPLATE_OPTIONS = frozenset({"reasoning_effort", "model_identity", "enable_thinking", "thinking"})
"""Honoured `chat_template_kwargs`. The last two belong to other models; false means effort `none`."""


def checked(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a chat request, with reasoning of assistant messages in the field `reasoning`.

    Raises:
        vLLM's validation error (400): a field that cannot be honoured.
    """
    for name, why in REFUSED.items():
        if data.get(name):
            raise _refused(name, why)
    modalities = data.get("modalities")
    if isinstance(modalities, list) and modalities != ["text"]:
        raise _refused("modalities", "gpt-oss writes text only")
    goes_on = bool(data.get("continue_final_message"))
    if data.get("add_generation_prompt") is False and not goes_on:
        raise _refused("add_generation_prompt", "false needs `continue_final_message`")
    if goes_on:
        _check_continued(data)
    messages = data.get("messages")
    return {**data, "messages": [_with_thoughts(one) for one in messages]} if isinstance(messages, list) else data


def _refused(name: str, why: str) -> Exception:
    error: Exception = _vllm.harmony().ValidationError(f"'{name}' is not supported: {why}.", parameter=name)
    return error


def _check_continued(data: Mapping[str, Any]) -> None:
    form = data.get("response_format")
    is_formed = form is not None and form != {"type": "text"}
    if is_formed or data.get("structured_outputs") or data.get("tool_choice") not in (None, "none", "auto"):
        why = "it needs free text; leave out the answer's format and a `tool_choice` that demands a call"
        raise _refused("continue_final_message", why)


def _with_thoughts(message: Any) -> Any:
    """`message` with `thinking` (the checkpoint's template) or `reasoning_details` (OpenRouter) as `reasoning`.

    A list of messages, as in a batch, likewise.
    """
    if isinstance(message, list):
        return [_with_thoughts(one) for one in message]
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    if message.get("reasoning") or message.get("reasoning_content"):
        return message
    details = message.get("reasoning_details")
    parts = [part for part in details if isinstance(part, dict)] if isinstance(details, list) else []
    texts = [text for part in parts if isinstance(text := part.get("text") or part.get("summary"), str)]
    thoughts = message.get("thinking") or "\n".join(texts)
    return {**message, "reasoning": thoughts} if isinstance(thoughts, str) and thoughts else message
