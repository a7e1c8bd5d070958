"""Everything that one response needs, gathered before its first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm_gptoss.server.harmony.messages import Conversation
from vllm_gptoss.server.responses.prompt.toolset import Toolset
from vllm_gptoss.server.responses.request.items import Item
from vllm_gptoss.server.responses.run.engine import Engine, Sampling
from vllm_gptoss.server.responses.run.item_writers import Style
from vllm_gptoss.server.responses.run.response_object import Usage
from vllm_gptoss.tools.protocol import ToolResult


@dataclass(frozen=True, slots=True)
class Compacted:
    """A shortened conversation, its `compaction` item, and its usage."""

    item: Item
    usage: Usage
    conversation: Conversation


class JobHooks:
    """Callbacks of a running response into its server. This class is for internal responses: it stores nothing."""

    async def commit(self, body: dict[str, Any], hidden: dict[str, Any]) -> None:
        """Stores the finished response and the hidden data of its items. Raises `StoreError`."""

    async def tool_ended(self, recipient: str, result: ToolResult) -> None:
        """A tool of this response returned."""

    async def compact(self) -> Compacted:
        """Shortens the conversation. Raises `ApiError`, or `EngineError` when it fails."""
        raise AssertionError("a summary is not compacted")


class Compaction(StrEnum):
    """Whether the conversation is shortened before anything is generated, or nothing else is done."""

    NONE = "none"
    FIRST = "first"
    ONLY = "only"


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits that end a response.

    output_tokens: generated tokens of all turns
    tool_calls: calls of this server's tools; rounds: rounds of calls and answers; tool_timeout: seconds of one call
    stops: strings that end the answer, once `min_tokens` tokens have been generated
    one_call: a turn may have at most one call that the client must answer
    """

    output_tokens: int | None = None
    tool_calls: int | None = None
    rounds: int = 128
    tool_timeout: float = 300.0
    stops: Sequence[str] = ()
    min_tokens: int = 0
    one_call: bool = False


@dataclass(slots=True)
class Job:
    """One response to generate. `body` is the response object, which grows; `prompt` the rendered `conversation`.

    approvals: MCP calls that the client has just approved or denied, as (request item, answer item)
    listed: MCP servers that have an `mcp_list_tools` item in the conversation
    tag_after_call: the grammar after the first call; a forced call is forced once
    answer_is_held: whether a grammar constrains the answer
    ignores_end: the engine continues after the model's end token
    """

    body: dict[str, Any]
    conversation: Conversation
    prompt: list[int]
    engine: Engine
    sampling: Sampling
    toolset: Toolset
    style: Style
    hooks: JobHooks
    limits: JobLimits = JobLimits()
    approvals: Sequence[tuple[Item, Item]] = ()
    listed: frozenset[str] = frozenset()
    queued: bool = False
    tag_after_call: str | None = None
    answer_is_held: bool = False
    ignores_end: bool = False
    compaction: Compaction = Compaction.NONE

    @property
    def id(self) -> str:
        """The response's id."""
        return str(self.body["id"])
