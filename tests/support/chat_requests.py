"""Requests for chat completions as vLLM reads them, and turns that answer them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
THINK = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
ASK = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ülm"}<|call|>'


HANDLER = {
    "enable_force_include_usage": False,
    "enable_log_outputs": False,
    "enable_log_deltas": False,
    "request_logger": None,
    "system_fingerprint": "fp",
    "enable_prompt_tokens_details": True,
    "enable_per_request_metrics": False,
    "log_error_stack": False,
}
"""Attributes of vLLM's handlers of chats and of completions."""


def request_of(**fields: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], **fields)


def chat_handlers() -> tuple[Any, Any]:
    """vLLM's chat handler with the plugin's parser, and the plugin's subclass of it, without a server."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.parser.parser_manager import ParserManager

    from vllm_gptoss._vllm.replaced import use_handler
    from vllm_gptoss.server.chat.chat_stream import ChatStream
    from vllm_gptoss.server.chat.vllm_parser import install

    assert install()
    theirs = object.__new__(OpenAIServingChat)
    vars(theirs).update(
        parser_cls=ParserManager.get_parser(
            reasoning_parser_name="openai_gptoss", is_harmony=True, model_name="m", enable_auto_tools=True
        ),
        model_config=None,
        response_role="assistant",
        enable_auto_tools=True,
        _include_reasoning_tokens_details=True,
        **HANDLER,
    )
    state = SimpleNamespace(openai_serving_chat=theirs)
    use_handler(state, "openai_serving_chat", ChatStream)
    return theirs, state.openai_serving_chat
