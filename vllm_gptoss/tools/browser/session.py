"""`search`, `open` and `find` over one conversation's stack of pages."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.tools.browser.backends import Backend, BackendError, Hit, Query
from vllm_gptoss.tools.browser.fetch import Fetcher, FetchError, domain_allowed
from vllm_gptoss.tools.browser.guard import DeniedError
from vllm_gptoss.tools.browser.markup import PageError
from vllm_gptoss.tools.browser.page import Link, Page, UsageError, Viewer, link_text, neutral, shorten, wrap
from vllm_gptoss.tools.browser.reader import Reader
from vllm_gptoss.tools.browser.state import State, recalled
from vllm_gptoss.tools.protocol import (
    BROWSER,
    BrowserAction,
    SessionOptions,
    Source,
    Text,
    ToolCall,
    ToolResult,
    ToolSession,
    failed,
)

logger = logging.getLogger(__name__)

_SNIPPET_CHARS = {"low": 150, "medium": 400, "high": 1000}
_RESULTS = {"low": 5, "medium": 10, "high": 20}
_PATTERN_CHARS = 1000
_LOOK_BACK = 4  # lines shown above the one that a `find` match links to


@dataclass(frozen=True, slots=True)
class SessionPlaces:
    """The sources of a session: the web, unless the request forbids it, and the operator's documents."""

    web: Backend | None
    index: Backend | None
    fetcher: Fetcher | None


class BrowserSession(ToolSession):
    namespaces = (BROWSER,)

    def __init__(
        self,
        places: SessionPlaces,
        viewer: Viewer,
        state: State,
        options: SessionOptions,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._viewer = viewer
        self._state = state
        self._options = options
        self._on_close = on_close
        self._reader = Reader()
        web = options.external_web_access
        self._places = places if web else SessionPlaces(None, places.index, None)
        self._calls: dict[str, Callable[[Mapping[str, Any]], Awaitable[ToolResult]]] = {
            "search": self._search,
            "open": self._open,
            "find": self._find,
        }

    async def call(self, call: ToolCall) -> ToolResult:
        """Runs `call`; what went wrong comes back as text with an error."""
        run = self._calls.get(call.tool or "")
        if run is None:
            return failed("unknown_tool", f"Unknown function: {call.tool}. There are search, open and find.")
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            return failed("invalid_arguments", f"The arguments are not JSON: {error}")
        if not isinstance(arguments, dict):
            return failed("invalid_arguments", "The arguments must be a JSON object")
        async with self._state.lock:
            try:
                return await run(arguments)
            except UsageError as error:
                return failed("invalid_arguments", str(error))
            except DeniedError as error:
                return failed("denied", str(error))
            except (BackendError, FetchError) as error:
                return failed("tool_failed", shorten(str(error)))

    def source(self, cursor: int, line: int | None = None) -> Source | None:
        """The page that `【cursor†L…】` cites; in a display of search results, the result at `line`."""
        if not 0 <= cursor < len(self._state.pages):
            return None
        page = self._state.pages[cursor]
        if page.source_url:
            quote = page.lines[line] if line is not None and line < len(page.lines) else ""
            return Source(cursor, page.source_url, self._title(page), quote)
        if line is None:
            number = 0 if len(page.links) == 1 else None
        else:
            number = max((n for first, n in page.line_links if first <= line), default=None)
        return None if number is None else Source(cursor, page.links[number].url, page.links[number].title)

    def _title(self, page: Page) -> str:
        if not page.listing:
            return page.title
        return next((p.title for p in self._state.pages if p.url == page.source_url), page.title)

    async def aclose(self) -> None:
        """Ends this view; the conversation's pages stay with the provider."""
        self._on_close()

    async def _show(self, page: Page, start: int, num_lines: int, action: BrowserAction) -> ToolResult:
        text = self._viewer.show(page, len(self._state.pages), start, num_lines)  # raises before the page counts
        cursor = self._state.add(page)
        return ToolResult([Text(text)], action=action, recall=recalled(cursor, page))

    async def _search(self, arguments: Mapping[str, Any]) -> ToolResult:
        query = str(arguments.get("query") or "").strip()
        if not query:
            raise UsageError("`query` must not be empty")
        backend = self._places.web or self._places.index
        if backend is None:
            why = ": this server has neither a key for a search service nor a folder of documents"
            if not self._options.external_web_access:
                why = " without external web access: this server has no folder of documents"
            raise BackendError(f"No search is available{why}")
        size = self._options.search_context_size
        cap = _RESULTS.get(size, 10)
        wanted = _number(arguments, "topn", cap)
        topn = min(wanted, cap) if wanted > 0 else cap
        domains = self._options.allowed_domains
        asked = Query(query, topn, domains, self._location(backend))
        found = [hit for hit in await backend.search(asked) if domain_allowed(hit.url, domains)][:topn]
        page = results_page(query, found, _SNIPPET_CHARS.get(size, 400))
        cursor = len(self._state.pages)
        sources = [Source(cursor, hit.url, hit.title) for hit in found]
        return await self._show(page, 0, -1, BrowserAction("search", query=query, sources=sources))

    def _location(self, backend: Backend) -> dict[str, str]:
        given = {str(name): str(value) for name, value in self._options.user_location.items() if value}
        given.pop("type", None)
        given |= {"country": given["country"].upper()} if "country" in given else {}
        if unheard := sorted(set(given) - set(backend.heard(given))):
            logger.info(
                "browser: response %s: %s does not support the user's %s",
                self._options.response_id,
                backend.name,
                ", ".join(unheard),
            )
        return given

    async def _open(self, arguments: Mapping[str, Any]) -> ToolResult:
        target = arguments.get("id", -1)
        if isinstance(target, str) and target.strip().lstrip("-").isdigit():
            target = int(target)  # a link id in quotes is no URL
        start, num_lines = _number(arguments, "loc", -1), _number(arguments, "num_lines", -1)
        if isinstance(target, str):
            page, link = await self._load(target.strip(), bool(arguments.get("view_source"))), None
        else:
            page, link = await self._follow(target, arguments)
        if start < 0:
            line = link.line if link and link.line is not None else 0
            start = line - _LOOK_BACK if line > _LOOK_BACK else line
        action = BrowserAction("open_page", url=page.source_url or page.url or None)
        return await self._show(page, start, num_lines, action)

    async def _follow(self, target: object, arguments: Mapping[str, Any]) -> tuple[Page, Link | None]:
        cursor = _number(arguments, "cursor", -1)
        current = self._state.page(cursor)
        number = _number({"id": target}, "id", -1)
        view_source = bool(arguments.get("view_source"))
        if number < 0:
            if not view_source:
                return await self._held(cursor, current), None
            return await self._load(current.source_url or current.url, True), None
        if number >= len(current.links):
            raise UsageError(f"Invalid link id `{number}`.")
        link = current.links[number]
        if not view_source:
            for seen in range(len(self._state.pages) - 1, self._state.dropped - 1, -1):
                page = self._state.pages[seen]
                if page.url == link.url and not page.listing and seen not in self._state.absent:
                    return page, link
        return await self._load(link.url, view_source), link

    async def _held(self, cursor: int, page: Page) -> Page:
        """`page` with its text; fetches the text again if another process displayed the page."""
        number = cursor if cursor >= 0 else len(self._state.pages) - 1
        if number not in self._state.absent:
            return page
        if page.listing or not page.url:
            raise UsageError(
                f"The text of cursor `{number}` is no longer available. Search again, or open one of its links."
            )
        return await self._load(page.url, False)

    async def _load(self, url: str, view_source: bool) -> Page:
        if url.startswith("view-source:"):
            url, view_source = url.removeprefix("view-source:"), True
        places = self._places
        if not domain_allowed(url, self._options.allowed_domains):
            raise DeniedError(f"{url} is not on the allowed domains: {', '.join(self._options.allowed_domains)}")
        for backend in (places.index, None if view_source else places.web):
            if backend is not None and (page := await backend.page(url)):
                return page
        if places.fetcher is None:
            raise DeniedError(f"{url} is not among the indexed documents, and this request may not use the web")
        if "://" not in url:
            url = f"https://{url}"
        try:
            return await places.fetcher.page(url, self._options.allowed_domains, source=view_source)
        except (DeniedError, FetchError) as error:
            raise type(error)(f"Error fetching URL `{shorten(url)}`: {error}") from error

    async def _find(self, arguments: Mapping[str, Any]) -> ToolResult:
        pattern = str(arguments.get("pattern") or "")
        if not pattern.strip():
            raise UsageError("`pattern` must not be empty")
        cursor = _number(arguments, "cursor", -1)
        page = self._state.page(cursor)
        if page.listing:
            raise UsageError("Cannot run `find` on search results page or find results page")
        page = await self._held(cursor, page)
        if len(pattern) > _PATTERN_CHARS:
            raise UsageError(f"`pattern` must not be longer than {_PATTERN_CHARS} characters")
        try:
            found = await self._reader.find(page, pattern)
        except PageError as error:
            raise FetchError(str(error)) from None
        action = BrowserAction("find_in_page", url=page.source_url or page.url, pattern=pattern)
        return await self._show(found, 0, -1, action)


def results_page(query: str, found: Sequence[Hit], snippet_chars: int) -> Page:
    """The display of a search: a list of links, each with its snippet."""
    lines, marks = ["", "URL: ", "# Search Results", ""], []
    for number, hit in enumerate(found):
        marks.append((sum(len(wrap(line)) for line in lines), number))
        snippet = shorten(" ".join(neutral(hit.snippet).split()), snippet_chars)
        lines.append(f"  * {link_text(number, hit.title, hit.url)} {snippet}".rstrip())
    if not found:
        lines.append("No results.")
    return Page(
        url="",
        title=neutral(query),
        text="\n".join(lines),
        links=[Link(hit.url, neutral(hit.title)) for hit in found],
        listing=True,
        line_links=marks,
    )


def _number(arguments: Mapping[str, Any], name: str, default: int) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise UsageError(f"`{name}` should be an integer, not `{value!r}`")
    return int(value)
