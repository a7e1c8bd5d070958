"""Everything that one response needs, gathered before its first token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.harmony.messages import Conversation
from vllm_gptoss.responses.engine import Engine, Sampling
from vllm_gptoss.responses.events import Item
from vllm_gptoss.responses.resource import Usage
from vllm_gptoss.responses.toolset import Toolset
from vllm_gptoss.responses.writers import Style

Commit = Callable[[dict[str, Any], dict[str, Any]], Awaitable[None]]
"""Keeps the finished response and what is hidden behind its items; raises when it cannot."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """A conversation made shorter: the item that says so, what it cost, and what is left to go on from."""

    item: Item
    usage: Usage
    conversation: Conversation


@dataclass(slots=True)
class Job:
    """One response to be made. `body` is its resource, which grows; `prompt` the rendered `conversation`.

    budget: tokens that may be generated, over all turns
    stops: strings that end the answer, once `min_tokens` tokens have been generated
    approvals: MCP calls that the client has just allowed or denied, as (request item, answer item)
    listed: MCP servers whose tools the conversation has already been told
    owns: is told the containers that tools of this response used
    compact: shortens the conversation before anything is generated; `only_compacts`: and that is all
    """

    body: dict[str, Any]
    conversation: Conversation
    prompt: list[int]
    engine: Engine
    sampling: Sampling
    toolset: Toolset
    style: Style
    commit: Commit
    budget: int | None = None
    max_tool_calls: int | None = None
    max_rounds: int = 128
    tool_timeout: float = 300.0
    stops: Sequence[str] = ()
    min_tokens: int = 0
    approvals: Sequence[tuple[Item, Item]] = ()
    listed: frozenset[str] = frozenset()
    queued: bool = False
    owns: Callable[[str], None] = lambda container_id: None
    compact: Callable[[], Awaitable[Compacted]] | None = None
    only_compacts: bool = False

    @property
    def id(self) -> str:
        return str(self.body["id"])
