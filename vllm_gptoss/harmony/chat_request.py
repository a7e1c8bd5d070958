"""vLLM's chat request as a Harmony conversation: on the renderer's step, and before it in our routes."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException, Request

from vllm_gptoss import _vllm
from vllm_gptoss.bodies import unless_gone
from vllm_gptoss.harmony.chat_prompt import conversation
from vllm_gptoss.harmony.early import is_iterator, is_long, render_early
from vllm_gptoss.harmony.messages import Conversation, ResponseFormat, ToolSpec
from vllm_gptoss.harmony.tokens import TooManyTokensError
from vllm_gptoss.harmony.vllm_constraint import response_format
from vllm_gptoss.tools.confined import BusyError


def is_decode_side(request: Any) -> bool:
    """Disaggregated decode: the prompt was rendered where the prefill ran."""
    kv = getattr(request, "kv_transfer_params", None)
    return isinstance(kv, Mapping) and bool(kv.get("prompt_token_ids"))


def conversation_of(renderer: Any, request: Any, includes_tools: bool, answer: ResponseFormat | None) -> Conversation:
    """The conversation that a chat request makes the model see. `answer` is the form that its answer must have.

    Raises:
        ChatInputError: a part of it has no place in a prompt.
    """
    efforts = getattr(renderer, "reasoning_effort_map", None) or {}
    effort = request.reasoning_effort
    tools = request.tools if includes_tools else None
    return conversation(
        [_plain(message) for message in request.messages],
        tools=[ToolSpec(t.function.name, t.function.description or "", t.function.parameters) for t in tools or ()],
        effort=efforts.get(effort, effort),
        date=_vllm.harmony_environment()[0] or datetime.date.today().isoformat(),
        response_format=answer,
    )


async def render_chat_early(request: Any, raw_request: Request, *, counts: bool = False) -> None:
    """Has the prompt of a long chat request rendered before its handler asks for it; see `early.py`.

    Raises:
        HTTPException: 400 where it is longer than the context window, 429 where too many of the caller's wait.
        ClientDisconnect: the client went away.
    """
    renderer = getattr(raw_request.app.state, "online_renderer", None)
    if renderer is None or not is_long(raw_request) or is_decode_side(request):
        return
    answer = response_format(request)
    hides = request.tool_choice == "none" and getattr(renderer, "exclude_tools_when_tool_choice_none", False)
    shows_tools = request.tools is not None and not hides
    window = getattr(getattr(renderer, "model_config", None), "max_model_len", None)
    is_cut = getattr(request, "truncate_prompt_tokens", None) is not None
    work = render_early(
        lambda: conversation_of(renderer, request, shows_tools, answer), None if is_cut or counts else window
    )
    try:
        await unless_gone(raw_request, work)
    except TooManyTokensError:
        raise HTTPException(400, f"The prompt is longer than the model's context window of {window} tokens.") from None
    except BusyError as error:
        raise HTTPException(429, f"{error}.") from None


def _plain(message: Any) -> dict[str, Any]:
    """A message as plain data: pydantic leaves lists of parts and calls as one-shot iterators."""
    dumped = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    lists = {key: list(dumped[key]) for key in ("tool_calls", "content") if is_iterator(dumped.get(key))}
    return {**dumped, **lists}
