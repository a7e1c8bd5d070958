"""Converts vLLM's chat request to a Harmony conversation, in the renderer and before it in our routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException, Request

from vllm_gptoss.server.chat.chat_options import TEMPLATE_OPTIONS
from vllm_gptoss.server.chat.chat_prompt import ChatInputError, conversation
from vllm_gptoss.server.chat.early import is_iterator, is_long, render_early
from vllm_gptoss.server.chat.vllm_constraint import offered_tools, response_format
from vllm_gptoss.server.harmony.messages import IDENTITY, Conversation, ResponseFormat, ToolSpec
from vllm_gptoss.server.harmony.prompt import today
from vllm_gptoss.server.harmony.tokens import TooManyTokensError
from vllm_gptoss.server.http.bodies import unless_gone
from vllm_gptoss.server.http.error_format import count_limit, overflow
from vllm_gptoss.tools.confined import BusyError


def is_decode_side(request: Any) -> bool:
    """Whether the prompt was rendered by the prefill server (disaggregated serving)."""
    kv = getattr(request, "kv_transfer_params", None)
    return isinstance(kv, Mapping) and bool(kv.get("prompt_token_ids"))


def conversation_of(renderer: Any, request: Any, includes_tools: bool, answer: ResponseFormat | None) -> Conversation:
    """The conversation of a chat request. `answer`: the JSON schema of its answer.

    Raises:
        ChatInputError: a part of the request cannot be rendered.
    """
    efforts = getattr(renderer, "reasoning_effort_map", None) or {}
    options = _template_options(renderer, request)
    thinks = options.get("enable_thinking", options.get("thinking"))
    effort = getattr(request, "reasoning_effort", None) or options.get("reasoning_effort")
    effort = effort or ("none" if thinks is False else None)
    tools = request.tools if includes_tools else None
    return conversation(
        [_plain(message) for message in request.messages],
        tools=[ToolSpec(t.function.name, t.function.description or "", t.function.parameters) for t in tools or ()],
        effort=efforts.get(effort, effort),
        date=today(),
        response_format=answer,
        identity=options.get("model_identity") or IDENTITY,
        continues=request.continue_final_message,
        raw=offered_tools(request.tools).free_text,
    )


def _template_options(renderer: Any, request: Any) -> dict[str, Any]:
    """`chat_template_kwargs` of the request, then the server's `--default-chat-template-kwargs`."""
    given = request.chat_template_kwargs or {}
    for name, value in given.items():
        is_text = name in ("reasoning_effort", "model_identity")
        if value and (name not in TEMPLATE_OPTIONS or (is_text and not isinstance(value, str))):
            known = ", ".join(sorted(TEMPLATE_OPTIONS))
            raise ChatInputError(f"{name!r} is not supported; there are {known}", f"chat_template_kwargs.{name}")
    return {**(getattr(renderer, "default_chat_template_kwargs", None) or {}), **given}


async def render_chat_early(request: Any, raw_request: Request, *, counts: bool = False) -> None:
    """Renders the prompt of a long chat request before vLLM's handler needs it; see `early.py`.

    Raises:
        HTTPException: 400 for a prompt longer than the context window, 429 for too many waiting prompts of the caller.
        ClientDisconnect: the client disconnected.
    """
    renderer = getattr(raw_request.app.state, "online_renderer", None)
    if renderer is None or not is_long(raw_request) or is_decode_side(request):
        return
    answer = response_format(request)
    hides = request.tool_choice == "none" and getattr(renderer, "exclude_tools_when_tool_choice_none", False)
    shows_tools = request.tools is not None and not hides
    window: Any = getattr(getattr(renderer, "model_config", None), "max_model_len", None)
    is_cut = getattr(request, "truncate_prompt_tokens", None) is not None
    work = render_early(
        lambda: conversation_of(renderer, request, shows_tools, answer),
        None if is_cut or counts or window is None else count_limit(window),
    )
    try:
        await unless_gone(raw_request, work)
    except TooManyTokensError:
        raise HTTPException(400, overflow(window, None, "messages")) from None
    except BusyError as error:
        raise HTTPException(429, f"{error}.") from None


def _plain(message: Any) -> dict[str, Any]:
    """A message as plain data: pydantic leaves lists of parts and calls as one-shot iterators."""
    dumped = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    lists = {key: list(dumped[key]) for key in ("tool_calls", "content") if is_iterator(dumped.get(key))}
    return {**dumped, **lists}
