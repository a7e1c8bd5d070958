"""Python tools for a test: a started one, and a call in a new conversation."""

from __future__ import annotations

import secrets

from vllm_gptoss.tools.protocol import SessionOptions, ToolCall, ToolResult
from vllm_gptoss.tools.python import PythonOptions, PythonProvider


async def run_in(provider: PythonProvider, code: str, conversation: str = "") -> ToolResult:
    session = await provider.open(conversation or secrets.token_hex(4), SessionOptions())
    try:
        return await session.call(ToolCall("call", "python", None, code))
    finally:
        await session.aclose()


async def started(**options: object) -> PythonProvider:
    provider = PythonProvider(PythonOptions.model_validate(options))
    await provider.start()
    assert provider.unavailable is None, provider.unavailable
    return provider
