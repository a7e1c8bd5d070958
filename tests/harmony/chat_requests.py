"""Requests for chat completions as vLLM reads them, and turns that answer them."""

from __future__ import annotations

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


def request_of(**fields: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], **fields)
