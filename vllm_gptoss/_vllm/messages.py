"""The request bodies of vLLM's /v1/messages and their conversion to chat requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def bodies() -> SimpleNamespace:
    """The classes of the bodies of POST /v1/messages and .../count_tokens, and of the parts that we set."""
    from vllm.entrypoints.anthropic import protocol

    return SimpleNamespace(
        Request=protocol.AnthropicMessagesRequest,
        CountRequest=protocol.AnthropicCountTokensRequest,
        OutputConfig=protocol.AnthropicOutputConfig,
        Adaptive=protocol.AnthropicThinkingConfigAdaptive,
    )


def as_chat(handler: Any, request: Any) -> Any:
    """The chat request that vLLM's handler of /v1/messages makes of a body. Raises ValueError for what it refuses."""
    return handler.to_chat_completion_request(request, merge_inline_system=handler._merge_inline_system)
