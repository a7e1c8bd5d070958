"""Turns that the model generates in many tests, control tokens spelled out, and tools that requests offer."""

from __future__ import annotations

HELLO = (
    "<|channel|>analysis<|message|>The user greets.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hello there!<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary"
    ' <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
LONG = "<|channel|>final<|message|>" + "word " * 400 + "<|return|>"
PYTHON = (
    "<|channel|>analysis<|message|>Compute.<|end|>"
    "<|start|>assistant to=python<|channel|>analysis code<|message|>print(1)<|call|>"
)
SEARCH = ' to=browser.search<|channel|>analysis code<|message|>{"query":"cats"}<|call|>'
CITED = "<|channel|>final<|message|>Cats purr【0†L1-L3】, maybe【7†L2】.<|return|>"
MCP = ' to=weather.lookup<|channel|>commentary <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
INTERPRETER = {"type": "code_interpreter", "container": {"type": "auto"}}
