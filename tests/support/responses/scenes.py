"""Requests that together make every event this server can send, with the model's answer to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.responses import fakes
from tests.support.responses.server import MODEL, harmony, text_of_prompt
from tests.support.responses.turns import CALL, CITED, HELLO, INTERPRETER, MCP, PYTHON, SEARCH, WEATHER
from vllm_gptoss.server.responses.errors import EngineError
from vllm_gptoss.tools.protocol import Text, ToolCall, ToolError, ToolResult

CUSTOM = " to=functions.note<|channel|>commentary<|message|>hello<|call|>"
LOST = MCP.replace("Rome", "Atlantis")
SUMMARY = "<|channel|>final<|message|>They greeted.<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant" + CALL.split("assistant", 1)[1]
REMOTE = {"type": "mcp", "server_label": "weather", "require_approval": "never"}
NOTE = {"type": "custom", "name": "note", "description": "Keeps a note."}

SCENES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "plain": ([HELLO], {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    "summary": ([CALL], {"tools": [WEATHER], "reasoning": {"summary": "detailed"}}),
    "concise": ([HELLO], {"reasoning": {"summary": "concise"}, "include": ["reasoning.encrypted_content"]}),
    "preamble": ([PREAMBLE], {"tools": [WEATHER]}),
    "custom": ([CUSTOM], {"tools": [NOTE]}),
    "python": ([PYTHON, HELLO], {"tools": [INTERPRETER], "include": ["code_interpreter_call.outputs"]}),
    "search": ([SEARCH, CITED], {"tools": [{"type": "web_search"}], "include": ["web_search_call.action.sources"]}),
    "remote": ([MCP, HELLO], {"tools": [REMOTE, WEATHER]}),
    "lost": ([LOST, HELLO], {"tools": [REMOTE]}),
    "approval": ([MCP], {"tools": [{**REMOTE, "require_approval": "always"}]}),
    "cut": ([HELLO], {"max_output_tokens": 3}),
    "queued": ([HELLO], {"background": True}),
    "compact": ([SUMMARY, HELLO], {"context_management": [{"type": "compaction", "compact_threshold": 20}]}),
    "dead": ([], {}),
}
"""By the user's text: the model's turns, and the request's fields."""

TERMINALS = {"cut": "response.incomplete", "dead": "response.failed"}
"""The last event of scenes without `response.completed`."""

NEVER = (
    "error",  # what fails before the stream is an HTTP error; what fails later is `response.failed`
    "response.audio.",  # a text model
    "response.file_search_call.",
    "response.image_generation_call.",
    "response.mcp_list_tools.failed",  # a server that cannot be listed is an HTTP error before the stream
    "response.refusal.",  # gpt-oss refuses in plain words
    "response.shell_call_",
)
"""Beginnings of the types that this server never sends, and why."""


def request(name: str) -> dict[str, Any]:
    said = {"role": "user", "content": f"scene {name}"}
    history = [{"role": "assistant", "content": "secret words " * 20}, said] if name == "compact" else []
    return {"model": MODEL, "input": [said, *history], **SCENES[name][1]}


class Stage:
    """The model of all scenes: it knows by the prompt which one is played and how far it is."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        name = text_of_prompt(prompt).rsplit("scene ", 1)[1].split("<")[0]
        if name == "dead":
            raise EngineError("The engine was stopped by the test.")
        turns = SCENES[name][0]
        at = self._turns.get(name, 0)
        self._turns[name] = at + 1
        return harmony(turns[at % len(turns)])


def providers() -> list[fakes.FakeProvider]:
    async def look_up(call: ToolCall) -> ToolResult:
        if "Atlantis" in call.arguments:
            return ToolResult([Text("no such city")], ToolError("tool_failed", "no such city"))
        return ToolResult([Text("sunny")])

    return [fakes.python(), fakes.browser(), fakes.FakeProvider(fakes.MCP, look_up)]
