"""The browser as one configured tool: its backends, its fetcher, and the conversations' page stacks."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_gptoss.tools.browser.backends import API_BACKENDS, ApiBackend, Backend, BackendError, Offline
from vllm_gptoss.tools.browser.fetch import Fetcher, FetchLimits
from vllm_gptoss.tools.browser.guard import Guard
from vllm_gptoss.tools.browser.page import Viewer, estimate_tokens
from vllm_gptoss.tools.browser.session import BrowserSession, SessionPlaces
from vllm_gptoss.tools.browser.settings import BrowserConfig
from vllm_gptoss.tools.browser.state import State
from vllm_gptoss.tools.confined import ConfinedError, pool
from vllm_gptoss.tools.protocol import BROWSER, Namespace, SessionOptions, ToolProvider

logger = logging.getLogger(__name__)

_VIEW_TOKENS = {"low": 512, "medium": 1024, "high": 2048}
_ADDRESS_VARIABLES = {"searxng": "SEARXNG_URL"}


def choose_backend(config: BrowserConfig, environ: Mapping[str, str]) -> str:
    """The backend's name: the configured one, else the first with a key or address in the environment, else offline."""
    if config.backend != "auto":
        return config.backend
    for name, cls in API_BACKENDS.items():
        if environ.get(_ADDRESS_VARIABLES.get(name) or cls.key_variable):
            return name
    return "offline"


class BrowserProvider(ToolProvider):
    """Pages from the web and from a folder. `count_tokens` is the model's tokenizer, if the server has one."""

    name = BROWSER.name
    unavailable: str | None = "not started"

    def __init__(
        self,
        config: BrowserConfig | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        count_tokens: Callable[[str], int] = estimate_tokens,
    ) -> None:
        self._config = config or BrowserConfig()
        self._count = count_tokens
        self.backend = choose_backend(self._config, environ)
        documents = self._config.documents or environ.get("GPTOSS_BROWSER_DOCUMENTS")
        self._index = Offline(Path(documents), self._config.documents_url) if documents else None
        self._web = self._make_web(environ)
        if self._web is None and self._index is None:
            keys = ", ".join(_ADDRESS_VARIABLES.get(name) or cls.key_variable for name, cls in API_BACKENDS.items())
            self.note = f"no search: set GPTOSS_BROWSER_DOCUMENTS to a folder, or one of {keys}; opening URLs works"
        self._fetcher = self._make_fetcher()
        self._states: OrderedDict[str, State] = OrderedDict()
        self._open: dict[str, int] = {}

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
        limits = FetchLimits(max_bytes=config.max_bytes, timeout_s=config.timeout_s)
        guard = Guard(config.allow_hosts)
        return Fetcher(guard, limits, agent=config.user_agent, respect_robots=config.respect_robots)

    async def start(self) -> None:
        """Indexes the documents and checks the backend; `unavailable` names what is missing."""
        self.unavailable = None
        try:
            await pool().start()
        except ConfinedError as error:
            self.unavailable = f"no process can be had that reads pages: {error}"
            return
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
        return (BROWSER,)

    async def open(self, conversation_id: str, options: SessionOptions) -> BrowserSession:
        """The browser of `conversation_id`; an empty id gets a separate one that ends with the session."""
        viewer = Viewer(_VIEW_TOKENS.get(options.search_context_size, 1024), self._count)
        places = SessionPlaces(self._web, self._index, self._fetcher)
        mine = [call for call in options.past if str(call.get("recipient", "")).startswith(f"{BROWSER.name}.")]
        past = [call["recall"] for call in mine if "links" in (call.get("recall") or ())]  # displays
        state = self._state(conversation_id, past, options.owner)
        close = partial(self._closed, conversation_id) if conversation_id else (lambda: None)
        return BrowserSession(places, viewer, state, options, close)

    async def aclose(self) -> None:
        """Closes backends and connections, and forgets every conversation."""
        for part in (self._index, self._web, self._fetcher):
            if part is not None:
                await part.aclose()
        self._states.clear()

    def _state(self, conversation_id: str, past: Sequence[Mapping[str, Any]], owner: str) -> State:
        if not conversation_id:
            return State()
        self._evict()
        self._keep_memory()
        kept = self._states.get(conversation_id, State(owner=owner))
        self._states[conversation_id] = state = kept.agreeing(past)
        if state is not kept:
            logger.info(
                "browser: a conversation's pages were shown by another process; they are fetched again on demand"
            )
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
        self._keep_memory()

    def _keep_memory(self) -> None:
        """Of the caller with most pages, the longest unused conversation loses its oldest displays first."""
        held: Counter[str] = Counter()
        for state in self._states.values():
            held[state.owner] += state.size
        while held.total() > self._config.cache_mib << 20:
            able = [  # of a conversation that is in use, the last display is spared
                (name, state)
                for name, state in self._states.items()
                if len(state.pages) - state.dropped > (name in self._open)
            ]
            if not able:
                return
            most = max(held[state.owner] for _, state in able)
            _, state = next((name, state) for name, state in able if held[state.owner] == most)
            held[state.owner] -= state.size
            state.drop()
            held[state.owner] += state.size

    def _evict(self) -> None:
        limit = time.monotonic() - self._config.idle_s
        spare = len(self._states) - self._config.max_conversations + 1
        for name in [n for n in self._states if n not in self._open]:
            if spare <= 0 and self._states[name].used_at >= limit:
                break
            del self._states[name]
            spare -= 1
