"""robots.txt, asked once per site and honoured: RFC 9309, parsed by Protego."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from protego import Protego

Fetch = Callable[[str], Awaitable[tuple[int, str]]]
"""url -> (status, body); raises what the HTTP client raises."""

_TTL_S = 3600.0
_MAX_SITES = 512
_MAX_DELAY_S = 5.0


@dataclass(slots=True)
class _Site:
    rules: Protego | None  # None: the site is unreachable, everything is disallowed (RFC 9309, 2.3.1.4)
    expires: float
    next_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Robots:
    """The rules of the sites asked lately, at most 512 of them, each for an hour."""

    def __init__(self, agent: str, fetch: Fetch) -> None:
        self._agent = agent
        self._fetch = fetch
        self._sites: OrderedDict[str, _Site] = OrderedDict()

    async def refusal(self, origin: str, url: str) -> str | None:
        """Why `url` of `origin` (`scheme://host:port`) may not be fetched, or None once its crawl delay has passed."""
        site = await self._site(origin)
        if site.rules is None:
            return "the site's robots.txt cannot be read because the site has errors; try again later"
        if not site.rules.can_fetch(url, self._agent):
            return "the site's robots.txt does not allow it"
        delay = min(float(site.rules.crawl_delay(self._agent) or 0.0), _MAX_DELAY_S)
        if delay > 0:
            async with site.lock:
                await asyncio.sleep(max(0.0, site.next_at - time.monotonic()))
                site.next_at = time.monotonic() + delay
        return None

    async def _site(self, origin: str) -> _Site:
        site = self._sites.get(origin)
        if site is None or site.expires < time.monotonic():
            status, body = await self._fetch(f"{origin}/robots.txt")
            rules = None if status >= 500 else Protego.parse(body if status < 300 else "")
            # A site with errors is asked again after a minute, not an hour.
            site = _Site(rules, time.monotonic() + (_TTL_S if rules else 60.0))
            self._sites[origin] = site
        self._sites.move_to_end(origin)
        while len(self._sites) > _MAX_SITES:
            self._sites.popitem(last=False)
        return site
