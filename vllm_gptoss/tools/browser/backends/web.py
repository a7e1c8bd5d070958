"""Search APIs. Each class is one provider's documented request and answer, read on 2026-11-20 where a date matters."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from vllm_gptoss.tools.browser.backends.base import ApiBackend, BackendError, Hit, Query, hits, on_sites
from vllm_gptoss.tools.browser.markup import PageError
from vllm_gptoss.tools.browser.page import Page, neutral, under_url
from vllm_gptoss.tools.browser.reader import Reader
from vllm_gptoss.tools.browser.reading import MAX_TITLE

logger = logging.getLogger(__name__)


class Searxng(ApiBackend):
    """A self-hosted SearXNG instance: docs.searxng.org/dev/search_api. Its settings must list the json format."""

    name = "searxng"

    async def start(self) -> None:
        """Raises BackendError: no instance is configured."""
        await super().start()
        if not str(self._client.base_url):
            raise BackendError("the searxng backend needs the instance's address: set `url` or SEARXNG_URL")

    def refusal_hint(self) -> str:
        return ": add `json` to `search.formats` in the instance's settings.yml"

    async def search(self, query: Query) -> Sequence[Hit]:
        """One page of results; SearXNG has no parameter for their number."""
        words = {"q": on_sites(query.text, query.domains), "format": "json"}
        answer = await self.mapping("GET", "/search", params=words)
        return hits(answer.get("results"), "title", "url", "content")[: query.topn]


class Brave(ApiBackend):
    """Brave Search API, web search: at most 20 results, queries of at most 400 characters."""

    name = "brave"
    key_variable = "BRAVE_API_KEY"
    default_url = "https://api.search.brave.com"
    location: ClassVar[Mapping[str, str]] = {
        "country": "X-Loc-Country",
        "region": "X-Loc-State-Name",
        "city": "X-Loc-City",
        "timezone": "X-Loc-Timezone",
    }

    def headers(self) -> Mapping[str, str]:
        return {"X-Subscription-Token": self._key, "Accept": "application/json"}

    async def search(self, query: Query) -> Sequence[Hit]:
        """`extra_snippets` are there for the plans that have them."""
        domains = list(query.domains)
        while len(domains) > 1 and len(on_sites(query.text, domains)) > _BRAVE_CHARS:
            domains.pop()
        if len(domains) < len(query.domains):
            logger.warning("brave: only %d of %d allowed domains fit a query", len(domains), len(query.domains))
        params = {"q": on_sites(query.text, domains), "count": min(query.topn, 20), "text_decorations": "false"}
        where = {header: query.location[name].encode() for name, header in self.heard(query.location).items()}
        answer = await self.mapping("GET", "/res/v1/web/search", params=params, headers=where)
        return hits((answer.get("web") or {}).get("results"), "title", "url", "description", "extra_snippets")


_BRAVE_CHARS = 400


@dataclass(frozen=True, slots=True)
class PostForm:
    """How a provider that takes JSON by POST names things, for searching and for pages."""

    auth: tuple[str, str]  # header, and its value with a place for the key
    number: str
    domains: str
    page_path: str
    page_options: Mapping[str, Any]
    page_text: str
    page_kind: Literal["html", "markdown"] = "html"
    snippets: Sequence[str] = ()
    search_path: str = "/search"
    also: Mapping[str, Any] = field(default_factory=dict)


class PostApi(ApiBackend):
    """A provider with such a form: a subclass is little more than the row."""

    form: PostForm
    _reader = Reader()  # has no state

    def headers(self) -> Mapping[str, str]:
        header, value = self.form.auth
        return {header: value.format(self._key)}

    async def search(self, query: Query) -> Sequence[Hit]:
        body: dict[str, Any] = {"query": query.text, self.form.number: query.topn, **self.form.also}
        if query.domains:
            body[self.form.domains] = list(query.domains)
        body |= {own: query.location[name] for name, own in self.heard(query.location).items()}
        return self.found(await self.mapping("POST", self.form.search_path, json=body))[: query.topn]

    def found(self, answer: Mapping[str, Any]) -> list[Hit]:
        return hits(answer.get("results"), "title", "url", *self.form.snippets)

    async def contents(self, url: str) -> Page:
        answer = await self.json("POST", self.form.page_path, json={"urls": [url], **self.form.page_options})
        rows = answer.get("results") if isinstance(answer, dict) else answer
        row = rows[0] if isinstance(rows, list) and rows else None
        if not isinstance(row, dict) or not row.get(self.form.page_text):
            raise BackendError(f"{self.name} could not read {url}")
        return await self._read(str(row[self.form.page_text]), url, str(row.get("title") or ""))

    async def _read(self, text: str, url: str, title: str) -> Page:
        read = self._reader.markdown if self.form.page_kind == "markdown" else self._reader.html
        try:
            page = await read(text, url)
        except PageError as error:
            raise BackendError(f"{self.name} gave a page that cannot be read: {error}") from error
        return under_url(replace(page, title=neutral(title)[:MAX_TITLE] or page.title))


class Tavily(PostApi):
    """Tavily search and extract: at most 20 results. Its `country` is a name, not a code, and so not sent."""

    name, key_variable, default_url = "tavily", "TAVILY_API_KEY", "https://api.tavily.com"
    form = PostForm(
        auth=("Authorization", "Bearer {}"),
        number="max_results",
        domains="include_domains",
        snippets=["content"],
        page_path="/extract",
        page_options={"format": "markdown"},
        page_text="raw_content",
        page_kind="markdown",
    )


class Exa(PostApi):
    name, key_variable, default_url = "exa", "EXA_API_KEY", "https://api.exa.ai"
    location: ClassVar[Mapping[str, str]] = {"country": "userLocation"}
    form = PostForm(
        auth=("x-api-key", "{}"),
        number="numResults",
        domains="includeDomains",
        also={"contents": {"highlights": True}},
        snippets=["summary", "highlights"],
        page_path="/contents",
        page_options={"text": {"includeHtmlTags": True}},
        page_text="text",
    )


class YouCom(PostApi):
    """You.com search and contents, version 1; POST, because GET gets no new features. News follow the web's results."""

    name, key_variable, default_url = "youcom", "YDC_API_KEY", "https://ydc-index.io"
    location: ClassVar[Mapping[str, str]] = {"country": "country"}
    countries = frozenset(
        re.findall(
            r"\w+",
            "AR AT AU BE BR CA CH CL CN DE DK ES FI FR GB HK ID IN "
            "IT JP KR MX MY NL NO NZ PH PL PT RU SA SE TR TW US ZA",
        )
    )
    form = PostForm(
        auth=("X-API-Key", "{}"),
        number="count",
        domains="include_domains",
        search_path="/v1/search",
        page_path="/v1/contents",
        page_options={"formats": ["html"]},
        page_text="html",
    )

    def found(self, answer: Mapping[str, Any]) -> list[Hit]:
        rows = answer.get("results") or {}
        web = hits(rows.get("web"), "title", "url", "snippets") or hits(rows.get("web"), "title", "url", "description")
        return [*web, *hits(rows.get("news"), "title", "url", "description")]
