"""robots.txt, fetched once per site and honoured: RFC 9309, parsed in a confined worker (`robots_txt`)."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from vllm_gptoss.tools.browser.reader import Body
from vllm_gptoss.tools.browser.robots_txt import verdict
from vllm_gptoss.tools.confined import BusyError, ConfinedError, FaultError, Limit, Refused, pool

Fetch = Callable[[str], Awaitable[tuple[int, Body]]]
"""url -> (status, body); raises what the HTTP client raises."""

_TTL_S = 3600.0
_MAX_SITES = 512
_MAX_DELAY_S = 5.0
_MAX_KEPT = 16 << 20
"""Characters of rules of all sites together."""

_LIMIT = Limit(seconds=10.0, cpu_s=3, memory=256 << 20, answer=2 << 20)
_ERRORS = "the site's robots.txt cannot be read because the site has errors; try again later"
_UNREADABLE = "the site's robots.txt cannot be read within its limits"


@dataclass(slots=True)
class _Site:
    expires: float
    body: Body | None = None  # as it came, until a worker has reduced it; empty: all is allowed
    refused: str = ""  # why nothing of it may be fetched (RFC 9309, 2.3.1.4)
    next_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Robots:
    """The rules of recently visited sites, at most 512 of them, each for an hour."""

    def __init__(self, agent: str, fetch: Fetch) -> None:
        self._agent = agent
        self._fetch = fetch
        self._sites: OrderedDict[str, _Site] = OrderedDict()

    async def refusal(self, origin: str, url: str) -> str | None:
        """Why `url` of `origin` (`scheme://host:port`) may not be fetched, or None once its crawl delay has passed."""
        site = await self._site(origin)
        if site.refused:
            return site.refused
        if site.body is None:
            return None
        try:
            said = await pool().run(
                verdict, site.body.data, _LIMIT, encoding=site.body.encoding, agent=self._agent, url=url
            )
        except FaultError as error:
            return f"its robots.txt could not be read: {error}"
        except (ConfinedError, Refused):
            site.refused, site.body = _UNREADABLE, None
            return site.refused
        except BusyError as error:
            return f"its robots.txt waits to be read: {error}"
        site.body = Body(said.rules.encode()) if said.rules else None
        if not said.allowed:
            return "the site's robots.txt does not allow it"
        delay = min(said.delay_s, _MAX_DELAY_S)
        if delay > 0:
            async with site.lock:
                await asyncio.sleep(max(0.0, site.next_at - time.monotonic()))
                site.next_at = time.monotonic() + delay
        return None

    async def _site(self, origin: str) -> _Site:
        site = self._sites.get(origin)
        if site is None or site.expires < time.monotonic():
            status, body = await self._fetch(f"{origin}/robots.txt")
            # A site with errors is fetched again after a minute, not an hour.
            site = _Site(time.monotonic() + (_TTL_S if status < 500 else 60.0))
            site.refused = _ERRORS if status >= 500 else ""
            site.body = body if status < 300 and body.data else None
            self._sites[origin] = site
        self._sites.move_to_end(origin)
        kept = sum(len(site.body.data) for site in self._sites.values() if site.body)
        while len(self._sites) > 1 and (len(self._sites) > _MAX_SITES or kept > _MAX_KEPT):
            _, oldest = self._sites.popitem(last=False)
            kept -= len(oldest.body.data) if oldest.body else 0
        return site
