"""The servers' side of a tools service: chooses the node for each conversation.

A conversation stays on the node of its last call, which the stored response names. For a new conversation, or if that
node is gone, the node with the highest score is used (rendezvous hashing: every server finds the same node, and losing
a node moves only its own conversations). Nodes do not communicate with each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_gptoss.tools.mcp.connection import origin
from vllm_gptoss.tools.mcp.provider import McpProvider, McpSession, opaque
from vllm_gptoss.tools.mcp.transport import Dialer
from vllm_gptoss.tools.protocol import (
    Content,
    File,
    Namespace,
    SessionOptions,
    StoredFile,
    ToolCall,
    ToolKind,
    ToolProvider,
    ToolResult,
    ToolSession,
    failed,
    last_call,
)
from vllm_gptoss.tools.service.download import Downloads
from vllm_gptoss.tools.service.settings import ServiceConfig
from vllm_gptoss.tools.service.wire import ASKED, Answered, Asked, answered, container_id

logger = logging.getLogger(__name__)


def ranked(nodes: Sequence[str], conversation_id: str) -> list[str]:
    """The nodes in this conversation's own order (Thaler and Ravishankar, "A Name-Based Mapping Scheme", 1996)."""
    return sorted(nodes, key=lambda node: hashlib.sha256(f"{node}\0{conversation_id}".encode()).digest(), reverse=True)


class NodeSession(McpSession):
    """A conversation's calls to one node. `before` is sent with the next call; `last` is what came with its result."""

    before = Asked()
    last: Answered | None = None

    def _meta(self) -> dict[str, Any]:
        return {**super()._meta(), ASKED: self.before.model_dump()}

    def _result(self, answer: Any) -> ToolResult:
        result = super()._result(answer)
        self.last = said = answered(getattr(answer, "meta", None)) or Answered()
        files: list[Content] = [File(said.container, f.file_id, f.filename, f.bytes) for f in said.files]
        error = replace(result.error, type=said.error) if result.error and said.error else result.error
        content = [*result.content, *files]
        return replace(result, content=content, error=error, container_id=said.container or None)


class Node(McpProvider):
    async def open(self, conversation_id: str, options: SessionOptions) -> NodeSession:
        """The node as the conversation sees it. Nothing is sent before the first call."""
        session = NodeSession(self, conversation_id, options)
        self._sessions.add(session)
        return session


class ServiceProvider(ToolProvider):
    """The `python` tool on the nodes of a tools service."""

    name = "python"

    def __init__(self, config: ServiceConfig, environ: Mapping[str, str]) -> None:
        # A call, and finding out of every other node that it is not there.
        self.longest_call_s = config.timeout_s + config.connect_timeout_s * len(config.nodes)
        self._nodes: dict[str, Node] = {}
        for url in config.nodes:
            entry = config.entry(url, environ)
            self._nodes[url] = Node("python", entry, Dialer(entry, environ=environ))
        self._downloads = Downloads(config, environ)

    @property
    def unavailable(self) -> str | None:
        """Why no node has ever answered; None from the first answer on: each call finds the reachable nodes."""
        if self.namespaces():
            return None
        problems = {url: node.unavailable for url, node in self._nodes.items()}
        return "; ".join(f"{origin(url)}: {problem}" for url, problem in problems.items())

    async def start(self) -> None:
        await asyncio.gather(*(node.start() for node in self._nodes.values()))

    async def aclose(self) -> None:
        await asyncio.gather(*(node.aclose() for node in self._nodes.values()))
        await self._downloads.aclose()

    def namespaces(self) -> Sequence[Namespace]:
        return next((found for node in self._nodes.values() if (found := node.namespaces())), ())

    async def open(self, conversation_id: str, options: SessionOptions) -> ServiceSession:
        return ServiceSession(self, conversation_id or options.response_id, options)

    def in_order(self, conversation_id: str, last: str) -> list[tuple[str, Node]]:
        """Nodes to try for a conversation: that of its last call, even if it seems down, as leaving it loses the
        notebook; then by rank, those known to be gone after the others."""
        order = ranked(list(self._nodes), conversation_id)
        order.sort(key=lambda url: (url != last, bool(self._nodes[url].unavailable)))
        return [(url, self._nodes[url]) for url in order if self._nodes[url].namespaces()]

    async def list_files(self, container_id: str) -> Sequence[StoredFile]:
        return await self._downloads.list_files(container_id)

    async def read_file(self, container_id: str, file_id: str) -> StoredFile | None:
        return await self._downloads.read_file(container_id, file_id)


class ServiceSession(ToolSession):
    """A conversation's notebook on its node. A call that no node took was not run, and another may."""

    def __init__(self, provider: ServiceProvider, conversation_id: str, options: SessionOptions) -> None:
        self._provider = provider
        self._conversation = conversation_id
        self._options = options
        before = [call for call in options.past if call.get("recipient") == ToolKind.PYTHON]
        # A call that no node took knows of none.
        recall: Mapping[str, Any] = next((call["recall"] for call in reversed(before) if call.get("recall")), {})
        self._node = str(recall.get("node") or "")
        self._said = Asked(
            owner=opaque(options.owner) if options.owner else "",
            ran=bool(before),
            container=str(recall.get("container") or ""),
            call=last_call(before) if options.knows_all else None,
            seed=secrets.token_hex(16),
        )
        self._open: dict[str, NodeSession] = {}

    @property
    def namespaces(self) -> Sequence[Namespace]:
        return self._provider.namespaces()

    @property
    def container_id(self) -> str:
        """The container of the last call, or before it the one requested from the node; an older node ignores that."""
        return self._said.container or container_id(self._said.seed)

    async def call(self, call: ToolCall) -> ToolResult:
        """Runs the call's source code as one cell, on the node that has the notebook if it is there."""
        result = failed("unavailable", "No node of the tools service can be reached. Nothing was run.")
        for url, node in self._provider.in_order(self._conversation, self._node):
            if url not in self._open:
                self._open[url] = await node.open(self._conversation, self._options)
            session = self._open[url]
            session.before, session.last = self._said, None
            self._said = self._said.model_copy(update={"seed": secrets.token_hex(16)})  # one may be lost with its node
            result = await session.call(call)
            if session.last is not None:
                return self._ran(url, session.last, result)
            kind = result.error.type if result.error else ""
            if kind in ("denied", "invalid_arguments"):
                return result
            if kind != "unavailable":
                return self._lost(url, result)
            node.connection.refresh()  # so that others need not find out
            logger.warning("tools service: %s did not take a call: %s", origin(url), result.text)
        return result

    def _ran(self, url: str, said: Answered, result: ToolResult) -> ToolResult:
        if not said.container:  # refused before it came to a notebook
            return result
        self._node = url
        self._said = self._said.model_copy(update={"ran": True, "container": said.container, "call": said.call or None})
        recall = {"container": said.container, "node": url}
        return replace(result, recall=recall | ({"call": said.call} if said.call else {}))

    def _lost(self, url: str, result: ToolResult) -> ToolResult:
        """The node broke off: the call may have run there. The next call reports that to its node."""
        self._said = self._said.model_copy(update={"ran": True, "call": None})
        recall = {"container": self._said.container, "node": url}
        return replace(result, recall=recall)

    async def aclose(self) -> None:
        """Ends the request's connections; the notebook stays."""
        await asyncio.gather(*(session.aclose() for session in self._open.values()))
