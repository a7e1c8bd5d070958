"""What our routes of /v1/messages take from vLLM's: the bodies, and the chat request that they become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def bodies() -> SimpleNamespace:
    """What bodies of POST /v1/messages and .../count_tokens are, and the parts of them that we fill in."""
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
