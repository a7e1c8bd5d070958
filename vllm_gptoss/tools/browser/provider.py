"""The browser as one configured tool: its backends, its fetcher, and the conversations' page stacks."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from vllm_gptoss.harmony.builtin import BROWSER
from vllm_gptoss.tools.base import Namespace, SessionOptions, ToolDefinition, ToolKind
from vllm_gptoss.tools.browser.backends import API_BACKENDS, ApiBackend, Backend, BackendError, Offline
from vllm_gptoss.tools.browser.fetch import AGENT, Fetcher, Limits
from vllm_gptoss.tools.browser.guard import Guard, host_entry
from vllm_gptoss.tools.browser.page import Viewer, estimate_tokens
from vllm_gptoss.tools.browser.session import BrowserSession, Places
from vllm_gptoss.tools.browser.state import State

logger = logging.getLogger(__name__)

_VIEW_TOKENS = {"low": 512, "medium": 1024, "high": 2048}
_ADDRESS_VARIABLES = {"searxng": "SEARXNG_URL"}


class BrowserConfig(BaseModel):
    """The `browser` section of tools.yaml. Everything has a default; nothing needs a key."""

    model_config = ConfigDict(extra="forbid")

    backend: Literal["auto", "offline", "fetch", "searxng", "brave", "tavily", "exa", "youcom"] = "auto"
    documents: Path | None = Field(
        default=None, description="folder of html, md, txt and pdf files that the model may search"
    )
    documents_url: str = Field(
        default="file:///", description="what documents that declare no URL get before their path"
    )
    url: str = Field(default="", description="address of the search backend, for SearXNG or a gateway")
    api_key: SecretStr = SecretStr("")
    open_with: Literal["fetch", "backend", "documents"] = "fetch"
    respect_robots: bool = True
    user_agent: str = AGENT
    allow_hosts: list[str] = Field(default=[], description="non-public `host` or `host:port` that may be opened")
    max_bytes: int = Field(default=5_000_000, gt=0)
    timeout_s: float = Field(default=20.0, gt=0)
    idle_s: float = Field(default=3600.0, gt=0, description="when a conversation's pages are forgotten")
    max_conversations: int = Field(default=1000, gt=0)

    @field_validator("allow_hosts")
    @classmethod
    def _hosts(cls, entries: list[str]) -> list[str]:
        return [host_entry(entry) for entry in entries]


def choose_backend(config: BrowserConfig, environ: Mapping[str, str]) -> str:
    """The backend's name: what was asked for, else the first with a key or address in the environment, else offline."""
    if config.backend != "auto":
        return config.backend
    for name, cls in API_BACKENDS.items():
        if environ.get(_ADDRESS_VARIABLES.get(name) or cls.key_variable):
            return name
    return "offline"


class BrowserProvider:
    """Implements `tools.base.ToolProvider`. `count_tokens` is the model's tokenizer, if the server has it at hand."""

    name = "browser"

    def __init__(
        self,
        config: BrowserConfig | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        fetcher: Fetcher | None = None,
        count_tokens: Callable[[str], int] = estimate_tokens,
    ) -> None:
        self._config = config or BrowserConfig()
        self._count = count_tokens
        self.backend = choose_backend(self._config, environ)
        documents = self._config.documents or environ.get("GPTOSS_BROWSER_DOCUMENTS")
        self._index = Offline(Path(documents), self._config.documents_url) if documents else None
        self._web = self._make_web(environ)
        self._fetcher = fetcher or self._make_fetcher()
        self._states: OrderedDict[str, State] = OrderedDict()
        self._open: dict[str, int] = {}
        self._namespace = _namespace()
        self.unavailable: str | None = "not started"

    def _make_web(self, environ: Mapping[str, str]) -> ApiBackend | None:
        cls = API_BACKENDS.get(self.backend)
        if cls is None:
            return None
        key = self._config.api_key.get_secret_value() or environ.get(cls.key_variable or "", "")
        url = self._config.url or environ.get(_ADDRESS_VARIABLES.get(self.backend, ""), "")
        return cls(key, url, pages=self._config.open_with == "backend")

    def _make_fetcher(self) -> Fetcher | None:
        config = self._config
        if config.open_with != "fetch":
            return None
        limits = Limits(max_bytes=config.max_bytes, timeout_s=config.timeout_s)
        guard = Guard(config.allow_hosts)
        return Fetcher(guard, limits, agent=config.user_agent, respect_robots=config.respect_robots)

    @property
    def no_search(self) -> str | None:
        """Why `search` finds nothing here though `open` works, or None."""
        if self._web or self._index:
            return None
        keys = ", ".join(_ADDRESS_VARIABLES.get(name) or cls.key_variable for name, cls in API_BACKENDS.items())
        return f"no search: set GPTOSS_BROWSER_DOCUMENTS to a folder, or one of {keys}; opening URLs works"

    async def start(self) -> None:
        """Indexes the documents and checks the backend; `unavailable` says what is missing."""
        self.unavailable = None
        backends: Sequence[Backend | None] = (self._index, self._web)
        for backend in backends:
            if backend is None:
                continue
            try:
                await backend.start()
            except BackendError as error:
                self.unavailable = str(error)
        if self.backend == "offline" and self._index is None:
            note = "no search key is set and no documents folder is named (GPTOSS_BROWSER_DOCUMENTS)"
            if self._fetcher is None:
                self.unavailable = f"{note}, and opening web pages is off"
            else:
                logger.warning("browser: %s, so `search` answers that there is no search; `open` works", note)
        if self.unavailable is None:
            logger.info("browser: backend %s, open with %s", self.backend, self._config.open_with)

    def namespaces(self) -> Sequence[Namespace]:
        """`browser`, as gpt-oss was trained on it."""
        return (self._namespace,)

    async def open(self, conversation_id: str, options: SessionOptions) -> BrowserSession:
        """The browser of `conversation_id`; an empty id gets one of its own that ends with the session."""
        viewer = Viewer(_VIEW_TOKENS.get(options.search_context_size, 1024), self._count)
        places = Places(self._web, self._index, self._fetcher)
        state = self._state(conversation_id, [call["recall"] for call in options.past if _is_display(call)])
        close = partial(self._closed, conversation_id) if conversation_id else (lambda: None)
        return BrowserSession(self._namespace, places, viewer, state, options, close)

    def forget(self, conversation_id: str) -> None:
        """Drops a conversation's pages."""
        self._states.pop(conversation_id, None)

    async def aclose(self) -> None:
        """Closes backends and connections, and forgets every conversation."""
        for part in (self._index, self._web, self._fetcher):
            if part is not None:
                await part.aclose()
        self._states.clear()

    def _state(self, conversation_id: str, past: Sequence[Mapping[str, Any]]) -> State:
        if not conversation_id:
            return State()
        self._evict()
        kept = self._states.get(conversation_id, State())
        self._states[conversation_id] = state = kept.agreeing(past)
        if state is not kept:
            logger.info("browser: a conversation's pages were shown by another process; they are opened anew on demand")
        state.used_at = time.monotonic()
        self._states.move_to_end(conversation_id)
        self._open[conversation_id] = self._open.get(conversation_id, 0) + 1
        return state

    def _closed(self, conversation_id: str) -> None:
        left = self._open.get(conversation_id, 1) - 1
        if left > 0:
            self._open[conversation_id] = left
        else:
            self._open.pop(conversation_id, None)
        if state := self._states.get(conversation_id):
            state.used_at = time.monotonic()

    def _evict(self) -> None:
        limit = time.monotonic() - self._config.idle_s
        spare = len(self._states) - self._config.max_conversations + 1
        for name in [n for n in self._states if n not in self._open]:
            if spare <= 0 and self._states[name].used_at >= limit:
                break
            del self._states[name]
            spare -= 1


def _is_display(call: Mapping[str, Any]) -> bool:
    return str(call.get("recipient", "")).startswith(f"{BROWSER.name}.") and "links" in (call.get("recall") or ())


def _namespace() -> Namespace:
    tools = [ToolDefinition(tool.name, tool.description, tool.parameters) for tool in BROWSER.tools]
    return Namespace(BROWSER.name, ToolKind.BROWSER, BROWSER.description, tools)
