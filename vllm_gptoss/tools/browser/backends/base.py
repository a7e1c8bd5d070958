"""The contract of a search backend, and the HTTP that those with an API share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

from vllm_gptoss.tools.browser.page import Page
from vllm_gptoss.tools.confined import BusyError, ConfinedError, Refused, pool
from vllm_gptoss.tools.confined.content import ACCEPT_ENCODING, SMALL, json_content

MAX_ANSWER_BYTES = 8_000_000


class BackendError(Exception):
    """The backend did not answer as documented; the message is what the model reads and holds no key."""


@dataclass(frozen=True, slots=True)
class Hit:
    title: str
    url: str
    snippet: str


@dataclass(frozen=True, slots=True)
class Query:
    """A search request. `location` has any of `country` (ISO 3166-1, two letters), `region`, `city`, `timezone`."""

    text: str
    topn: int
    domains: Sequence[str] = ()
    location: Mapping[str, str] = field(default_factory=dict)


class Backend(ABC):
    """A source of search results and, for some backends, of pages."""

    name = ""

    @abstractmethod
    async def start(self) -> None:
        """Gets ready. Raises BackendError: it cannot work as configured."""

    def heard(self, location: Mapping[str, str]) -> Mapping[str, str]:
        """The fields of `location` that a search honours, each with the backend's own name for it."""
        return {}

    @abstractmethod
    async def search(self, query: Query) -> Sequence[Hit]:
        """At most `topn` hits, best first, on `domains` only where the backend supports it. Raises BackendError: the
        backend failed."""

    @abstractmethod
    async def page(self, url: str) -> Page | None:
        """The page at `url` where this backend serves pages, else None. Raises BackendError: the backend failed."""

    @abstractmethod
    async def aclose(self) -> None: ...


class ApiBackend(Backend):
    """A backend behind an HTTP API. The operator named the host, so the guard does not apply; proxies are honoured."""

    key_variable = ""
    default_url = ""
    location: ClassVar[Mapping[str, str]] = {}  # a user's `country`, `region`, `city`, `timezone` by the API's names
    countries: frozenset[str] = frozenset()  # where the API takes only some

    def __init__(self, api_key: str = "", url: str = "", *, timeout_s: float = 15.0, pages: bool = False) -> None:
        self._key = api_key
        self._serves_pages = pages
        headers = {"Accept-Encoding": ACCEPT_ENCODING, **self.headers()}
        options: dict[str, Any] = {"base_url": url or self.default_url, "timeout": timeout_s, "headers": headers}
        self._problem = ""
        try:
            self._client = httpx.AsyncClient(**options)
        except ValueError as error:
            self._problem = f"the proxy that the environment names cannot be used: {error}"
            self._client = httpx.AsyncClient(**options, trust_env=False)  # never used: `start` raises

    def headers(self) -> Mapping[str, str]:
        return {}

    async def start(self) -> None:
        """
        Raises:
            BackendError: the key is missing, or the environment names a proxy that is none.
        """
        if self._problem:
            raise BackendError(self._problem)
        if self.key_variable and not self._key:
            raise BackendError(f"the {self.name} backend needs an API key: set {self.key_variable}")

    def heard(self, location: Mapping[str, str]) -> Mapping[str, str]:
        """The fields of `location` that the API has a name for, and that name."""
        known = {name: own for name, own in self.location.items() if location.get(name)}
        if self.countries and location.get("country") not in self.countries:
            known.pop("country", None)
        return known

    async def page(self, url: str) -> Page | None:
        """Pages come from this backend only where `open_with: backend` was configured."""
        return await self.contents(url) if self._serves_pages else None

    async def contents(self, url: str) -> Page:
        """
        Raises:
            BackendError: this backend serves no pages.
        """
        raise BackendError(f"{self.name} serves no pages; configure `open_with: fetch`")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def json(self, method: str, path: str, **kwargs: Any) -> Any:
        """The JSON that `method path` answers. Raises BackendError: no answer, an error status, or no JSON."""
        try:
            async with self._client.stream(method, path, **kwargs) as response:
                body = await _bounded(response)
        except httpx.HTTPError as error:
            raise BackendError(f"{self.name} cannot be reached: {type(error).__name__}") from error
        if response.status_code in (401, 403):
            raise BackendError(f"{self.name} refused the request ({response.status_code}){self.refusal_hint()}")
        if response.status_code >= 400:
            raise BackendError(f"{self.name} answered {response.status_code}")
        try:
            return json.loads(await _checked(body, response.headers.get("content-encoding", "")))
        except (ValueError, RecursionError) as error:
            raise BackendError(f"{self.name} answered something other than JSON") from error
        except (Refused, ConfinedError, BusyError) as error:
            raise BackendError(f"{self.name} gave an answer that cannot be read: {error}") from error

    async def mapping(self, method: str, path: str, **kwargs: Any) -> Mapping[str, Any]:
        """As `json`, for answers that are objects. Raises BackendError: as `json`, or the answer is something else."""
        answer = await self.json(method, path, **kwargs)
        if not isinstance(answer, dict):
            raise BackendError(f"{self.name} answered something other than a JSON object")
        return answer

    def refusal_hint(self) -> str:
        """The hint for an error when the backend refuses a request."""
        return f": check {self.key_variable}" if self.key_variable else ""


async def _bounded(response: httpx.Response) -> bytes:
    """The body as it came over the wire, and no more than a byte beyond the limit of it."""
    body = bytearray()
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            break
    return bytes(body[: MAX_ANSWER_BYTES + 1])


async def _checked(body: bytes, encoding: str) -> bytes:
    """JSON with a tree small enough to build here. Raises Refused, ConfinedError, BusyError."""
    if len(body) <= SMALL and encoding in ("", "identity"):
        return body
    return await pool().run(json_content, body, encoding=encoding[:100], max_bytes=MAX_ANSWER_BYTES)


def hits(rows: object, title: str, url: str, *snippets: str) -> list[Hit]:
    """Hits from a list of JSON objects; each of `snippets` names a text or a list of texts, joined in order."""
    found = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict) or not row.get(url):
            continue
        parts: list[str] = []
        for key in snippets:
            value = row.get(key)
            parts += [str(v) for v in value] if isinstance(value, list) else [str(value)] if value else []
        found.append(Hit(str(row.get(title) or row[url]), str(row[url]), " ".join(parts)))
    return found


def on_sites(query: str, domains: Sequence[str]) -> str:
    """`query` restricted by the `site:` operator, for engines that have no parameter for it."""
    if not domains:
        return query
    return f"{query} ({' OR '.join(f'site:{domain}' for domain in domains)})"
