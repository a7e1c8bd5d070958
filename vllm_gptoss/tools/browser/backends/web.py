"""Search APIs. Each class is one provider's documented request and answer, read on 2026-11-20 where a date matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_gptoss.tools.browser.backends.base import ApiBackend, BackendError, Hit, hits, on_sites
from vllm_gptoss.tools.browser.markup import html_page, markdown_page
from vllm_gptoss.tools.browser.page import Page


class Searxng(ApiBackend):
    """A SearXNG instance of one's own: docs.searxng.org/dev/search_api. Its settings must list the json format."""

    name = "searxng"

    async def start(self) -> None:
        """
        Raises:
            BackendError: no instance is configured.
        """
        await super().start()
        if not str(self._client.base_url):
            raise BackendError("the searxng backend needs the instance's address: set `url` or SEARXNG_URL")

    def refusal_hint(self) -> str:
        return ": add `json` to `search.formats` in the instance's settings.yml"

    async def search(self, query: str, topn: int, domains: Sequence[str]) -> Sequence[Hit]:
        """One page of results; SearXNG has no parameter for their number."""
        answer = await self.mapping("GET", "/search", params={"q": on_sites(query, domains), "format": "json"})
        return hits(answer.get("results"), "title", "url", "content")[:topn]


class Brave(ApiBackend):
    """Brave Search API, web search: at most 20 results."""

    name = "brave"
    key_variable = "BRAVE_API_KEY"
    default_url = "https://api.search.brave.com"

    def headers(self) -> Mapping[str, str]:
        return {"X-Subscription-Token": self._key, "Accept": "application/json"}

    async def search(self, query: str, topn: int, domains: Sequence[str]) -> Sequence[Hit]:
        """`extra_snippets` are there for the plans that have them."""
        params: dict[str, str | int] = {
            "q": on_sites(query, domains),
            "count": min(topn, 20),
            "text_decorations": "false",
        }
        answer = await self.mapping("GET", "/res/v1/web/search", params=params)
        return hits((answer.get("web") or {}).get("results"), "title", "url", "description", "extra_snippets")


class Tavily(ApiBackend):
    """Tavily search and extract: at most 20 results."""

    name = "tavily"
    key_variable = "TAVILY_API_KEY"
    default_url = "https://api.tavily.com"

    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._key}"}

    async def search(self, query: str, topn: int, domains: Sequence[str]) -> Sequence[Hit]:
        body = {"query": query, "max_results": min(topn, 20), "include_domains": list(domains)}
        return hits((await self.mapping("POST", "/search", json=body)).get("results"), "title", "url", "content")

    async def contents(self, url: str) -> Page:
        answer = await self.mapping("POST", "/extract", json={"urls": [url], "format": "markdown"})
        rows = answer.get("results") or []
        if not rows or not rows[0].get("raw_content"):
            raise BackendError(f"tavily could not read {url}")
        return markdown_page(rows[0]["raw_content"], url, rows[0].get("title"))


class Exa(ApiBackend):
    """Exa search and contents."""

    name = "exa"
    key_variable = "EXA_API_KEY"
    default_url = "https://api.exa.ai"

    def headers(self) -> Mapping[str, str]:
        return {"x-api-key": self._key}

    async def search(self, query: str, topn: int, domains: Sequence[str]) -> Sequence[Hit]:
        body = {"query": query, "numResults": topn, "contents": {"highlights": True}}
        if domains:
            body["includeDomains"] = list(domains)
        answer = await self.mapping("POST", "/search", json=body)
        return hits(answer.get("results"), "title", "url", "summary", "highlights")

    async def contents(self, url: str) -> Page:
        answer = await self.mapping("POST", "/contents", json={"urls": [url], "text": {"includeHtmlTags": True}})
        rows = answer.get("results") or []
        if not rows or not rows[0].get("text"):
            raise BackendError(f"exa could not read {url}")
        return html_page(rows[0]["text"], url, rows[0].get("title"))


class YouCom(ApiBackend):
    """You.com search and contents, version 1."""

    name = "youcom"
    key_variable = "YDC_API_KEY"
    default_url = "https://ydc-index.io"

    def headers(self) -> Mapping[str, str]:
        return {"X-API-Key": self._key}

    async def search(self, query: str, topn: int, domains: Sequence[str]) -> Sequence[Hit]:
        """POST, because domain lists are JSON only there. News follow the web's results."""
        body: dict[str, object] = {"query": query, "count": topn}
        if domains:
            body["include_domains"] = list(domains)
        found = (await self.mapping("POST", "/v1/search", json=body)).get("results") or {}
        web = hits(found.get("web"), "title", "url", "snippets") or hits(
            found.get("web"), "title", "url", "description"
        )
        return [*web, *hits(found.get("news"), "title", "url", "description")][:topn]

    async def contents(self, url: str) -> Page:
        rows = await self.json("POST", "/v1/contents", json={"urls": [url], "formats": ["html"]})
        if not isinstance(rows, list) or not rows or not rows[0].get("html"):
            raise BackendError(f"youcom could not read {url}")
        return html_page(rows[0]["html"], url, rows[0].get("title"))
