"""Opening a URL for the model: guarded addresses, robots.txt, bounded redirects, bytes and time, then text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from vllm_gptoss.tools.browser.guard import DeniedError, Guard, GuardedTransport, check_scheme, host_matches
from vllm_gptoss.tools.browser.markup import PageError
from vllm_gptoss.tools.browser.page import Page
from vllm_gptoss.tools.browser.reader import Body, Reader
from vllm_gptoss.tools.browser.robots import Robots
from vllm_gptoss.tools.browser.robots_txt import MAX_BYTES as ROBOTS_BYTES
from vllm_gptoss.tools.browser.settings import AGENT
from vllm_gptoss.tools.confined.content import ACCEPT_ENCODING

_HEADER = 200  # significant characters of a header
_ACCEPT = "text/html,application/xhtml+xml,text/plain,text/markdown,application/pdf;q=0.9,application/json;q=0.8"


class FetchError(Exception):
    """The page could not be had; the message is what the model reads."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    max_bytes: int = 5_000_000
    timeout_s: float = 20.0
    max_redirects: int = 5


def domain_allowed(url: str, allowed: Sequence[str]) -> bool:
    """Whether `url`'s host is one of `allowed` or below one; every host is when `allowed` is empty."""
    if not allowed:
        return True
    host = (urlsplit(url).hostname or "").lower()
    names = [name.lower().removeprefix("https://").removeprefix("http://").strip("/") for name in allowed]
    return any(host_matches(host, name) or host_matches(host, f"*.{name.removeprefix('*.')}") for name in names)


class Fetcher:
    """Fetches pages. `transport` replaces what sends the judged requests, for tests."""

    def __init__(
        self,
        guard: Guard | None = None,
        limits: FetchLimits | None = None,
        *,
        agent: str = AGENT,
        respect_robots: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.limits = limits or FetchLimits()
        self._transport = GuardedTransport(guard or Guard(), transport)
        self._headers = {"User-Agent": agent, "Accept": _ACCEPT, "Accept-Encoding": ACCEPT_ENCODING}
        self._reader = Reader()
        self._robots = Robots(agent.split("/", 1)[0], self._robots_txt) if respect_robots else None

    async def aclose(self) -> None:
        await self._transport.aclose()

    def _client(self) -> httpx.AsyncClient:
        """A client for one page: its cookies last as long as its redirects, so that no conversation gets another's."""
        return httpx.AsyncClient(
            transport=self._transport,
            headers=self._headers,
            timeout=httpx.Timeout(self.limits.timeout_s),
            follow_redirects=False,
            trust_env=False,
        )

    async def page(self, url: str, allowed_domains: Sequence[str] = (), *, source: bool = False) -> Page:
        """The page at `url`, or its source text. Raises DeniedError: the URL, or one it redirects to, must not be
        opened; FetchError: it cannot be had, or is nothing that can be read."""
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                final, body = await self._follow(url, allowed_domains)
        except TimeoutError:
            raise FetchError(f"no complete answer within {self.limits.timeout_s:.0f} s") from None
        except httpx.HTTPError as error:
            raise FetchError(str(error) or type(error).__name__) from error
        except UnicodeError as error:  # httpx looks at a redirect's host before we do
            raise FetchError(f"the site redirects to something that is no URL: {error}") from error
        try:
            return await self._reader.body(body, final, self.limits.max_bytes, source=source)
        except PageError as error:
            raise FetchError(str(error)) from error

    async def _follow(self, url: str, allowed: Sequence[str]) -> tuple[str, Body]:
        client = self._client()  # not closed: it owns only cookies
        for _ in range(self.limits.max_redirects + 1):
            check_scheme(url)
            if not domain_allowed(url, allowed):
                raise DeniedError(f"{urlsplit(url).hostname} is not one of the allowed domains: {', '.join(allowed)}")
            await self._ask_robots(url)
            response, body = await self._get(client, url, self.limits.max_bytes)
            location = response.headers.get("location")
            if not (response.is_redirect and location):
                if response.status_code >= 400:
                    raise FetchError(f"the site answered {response.status_code} {response.reason_phrase}".rstrip())
                return url, body
            url = _joined(url, location)
        raise FetchError(f"more than {self.limits.max_redirects} redirects")

    async def _get(self, client: httpx.AsyncClient, url: str, limit: int) -> tuple[httpx.Response, Body]:
        """The answer, and at most `limit` bytes of its body as they came over the wire."""
        data = bytearray()
        async with client.stream("GET", url) as response:
            assert isinstance(response.stream, httpx.AsyncByteStream)
            async for chunk in response.stream:
                data += chunk
                if len(data) > limit:
                    break
        header = response.headers.get
        kind, encoding = header("content-type", ""), header("content-encoding", "")
        return response, Body(bytes(data[:limit]), kind[:_HEADER], encoding[:_HEADER], len(data) > limit)

    async def _ask_robots(self, url: str) -> None:
        if self._robots is None:
            return
        parts = urlsplit(url)
        if reason := await self._robots.refusal(f"{parts.scheme}://{parts.netloc}", url):
            raise DeniedError(f"{url} was not opened: {reason}")

    async def _robots_txt(self, url: str) -> tuple[int, Body]:
        client = self._client()
        for _ in range(self.limits.max_redirects):
            response, body = await self._get(client, url, ROBOTS_BYTES)
            location = response.headers.get("location")
            if not (response.is_redirect and location):
                return response.status_code, body
            url = _joined(url, location)
        return 404, Body(b"")


def _joined(url: str, location: str) -> str:
    try:
        return str(httpx.URL(url).join(location))
    except httpx.InvalidURL as error:
        raise FetchError(f"the site redirects to something that is no URL: {error}") from error
