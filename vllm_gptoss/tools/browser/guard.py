"""Which addresses the server may reach for a model or a request: public ones, and those that the operator listed.

A name is resolved once, every address it has is judged, and the connection is made to a judged address itself, so a
name cannot change its mind between the check and the connection (DNS rebinding). Each redirect is a new request and is
judged again. OWASP: Server-Side Request Forgery Prevention Cheat Sheet.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> textual addresses; raises OSError where there are none."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(net)
    for net in (
        "192.0.0.0/24",  # IETF assignments, Oracle's metadata at 192.0.0.192 among them
        "168.63.129.16/32",  # Azure's host, which looks public
        "192.88.99.0/24",  # 6to4 relays, withdrawn
        "64:ff9b:1::/48",  # NAT64 of a local network: the position of the IPv4 address is unknown (RFC 8215)
        "3fff::/20",  # documentation, newer than some Pythons
    )
)
_HOST = re.compile(r"[^\s/?#@*\[\]]+")
_CONNECT_S = 3.0
"""Seconds for one of several addresses to accept a connection."""

_INTERNAL_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".lan", ".intranet", ".corp")


class DeniedError(Exception):
    """The address must not be reached; the message has the reason."""


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """The addresses that the operating system gives for `host`. Raises OSError: it gives none, or `host` is not a valid
    name."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty label, or one over 63 characters
        raise OSError(f"no host's name: {error}") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def embedded(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv6 one carries (mapped, 6to4, Teredo, NAT64), else `address`."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped:
        return address.ipv4_mapped
    if address.sixtofour:
        return address.sixtofour
    if address.teredo:
        return address.teredo[1]
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def refusal(text: str) -> str | None:
    """Why the address `text` is off limits, or None for a public unicast one."""
    try:
        address = ipaddress.ip_address(text.split("%", 1)[0])
    except ValueError:
        return f"{text!r} is not an IP address"
    inner = embedded(address)  # for an address that only wraps another, the other is what is reached
    if inner.is_loopback:
        return f"{text} is a loopback address"
    if inner.is_link_local:
        return f"{text} is a link-local address (cloud metadata services live there)"
    if inner.is_multicast or inner.is_reserved or inner.is_unspecified:
        return f"{text} is a multicast, reserved or unspecified address"
    if any(inner in net for net in _NOT_PUBLIC if net.version == inner.version):
        return f"{text} is not a public address"
    site_local = isinstance(inner, ipaddress.IPv6Address) and inner.is_site_local
    # is_global knows the IANA registries: private, shared (100.64/10), benchmarking and documentation blocks are not
    return None if inner.is_global and not site_local else f"{text} is a private address"


def host_matches(host: str, pattern: str) -> bool:
    """Whether `host` is `pattern`, or below it for `*.pattern`."""
    host, pattern = host.lower().rstrip("."), pattern.lower().rstrip(".")
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def literal(host: str) -> IPAddress | None:
    """The address that `host` is, also as one number, in octal or in hexadecimal; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


def host_entry(text: str, *, wildcard: bool = False) -> str:
    """An entry of a list of hosts as it is compared: `host` or `host:port`, and `*.domain` with `wildcard`. Raises
    ValueError: it is something else, which would never match anything."""
    text = text.strip().lower()
    if number := literal(text.strip("[]")):
        return str(number)
    parts = urlsplit(f"//{text}")
    name = (parts.hostname or "").rstrip(".")
    plain = name.removeprefix("*.") if wildcard else name
    if not plain or parts.netloc != text or parts.username is not None or not _HOST.fullmatch(plain):
        raise ValueError(f"{text!r} is not `host`{', `*.domain`' if wildcard else ''} or `host:port`")
    return f"{name}:{parts.port}" if parts.port else name


class Guard:
    """The judge.

    `allowed` lists what the operator opened though it is not public: `host` or `host:port`, exact names or addresses.
    """

    def __init__(self, allowed: Sequence[str] = (), resolver: Resolver = system_resolver) -> None:
        self._allowed = frozenset(host_entry(entry) for entry in allowed)
        self._resolver = resolver

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """All addresses of `host`, each checked. Raises DeniedError: an address is not public, or the name is internal;
        OSError: the name has no address."""
        host = host.lower().rstrip(".").strip("[]")
        number = literal(host)
        name = str(number or host)
        opened = name in self._allowed or f"{name}:{port}" in self._allowed
        found: Sequence[str]
        if number is not None:
            found = [str(number)]
        else:
            if not opened and (host == "localhost" or host.endswith(_INTERNAL_SUFFIXES)):
                raise DeniedError(f"{host} is an internal name")
            found = await self._resolver(host, port)
        if not found:
            raise OSError(f"{host} has no address")
        if not opened:
            for address in found:
                if reason := refusal(address):
                    raise DeniedError(f"{host}: {reason}" if address != host else reason)
        return found


def check_scheme(url: str) -> None:
    """
    Raises:
        DeniedError: `url` is not http or https, has no host, or carries credentials.
    """
    try:
        parts = urlsplit(url)
        host, _, _ = parts.hostname, parts.port, httpx.URL(url).host  # which decodes `xn--` or raises UnicodeError
    except (ValueError, httpx.InvalidURL) as error:
        raise DeniedError(f"not a valid URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise DeniedError(f"only http and https URLs can be opened, not {parts.scheme or 'a bare name'}")
    if not host:
        raise DeniedError("the URL has no host")
    if parts.username is not None or parts.password is not None:
        raise DeniedError("URLs with credentials in them are not opened")


async def send_judged(guard: Guard, request: Any, inner: Any, unreachable: Sequence[type[Exception]]) -> Any:
    """Sends `request` (of httpx or httpx2) through `inner` to a judged address, keeping its Host header and TLS name.

    An address that cannot be connected to is followed by the next one, as with a host without working IPv6.

    Raises:
        DeniedError: the address must not be reached; nothing was sent.
    """
    url = request.url
    check_scheme(str(url))
    host, port = url.host, url.port or (443 if url.scheme == "https" else 80)
    try:
        addresses = await guard.addresses(host, port)
    except OSError as error:
        raise unreachable[0](f"cannot resolve {host}: {error}") from error
    timeout = request.extensions.get("timeout") or {}
    for address in addresses:
        if address != host:
            request.extensions = {**request.extensions, "sni_hostname": host}
            request.url = url.copy_with(host=address)
        last = address == addresses[-1]
        if not last:  # the others have to be tried in the same time
            connect = min(timeout.get("connect") or _CONNECT_S, _CONNECT_S)
            request.extensions = {**request.extensions, "timeout": {**timeout, "connect": connect}}
        elif timeout:
            request.extensions = {**request.extensions, "timeout": timeout}
        try:
            return await inner.handle_async_request(request)
        except tuple(unreachable):
            if last:
                raise
    raise AssertionError("a guard gives at least one address")


def proxy_of(scheme: str, host: str) -> str | None:
    """The URL of the proxy that the environment (`http_proxy`, `https_proxy`, `all_proxy`, `no_proxy`) names."""
    known = getproxies()
    proxy = known.get(scheme) or known.get("all")
    if not proxy or proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


class Guarded:
    """A transport of `library`, httpx or httpx2: sends through `inner` to judged addresses only, or through the
    environment's proxy when it has one.

    Connections are not reused: one pooled under an address would carry the TLS name of another host on it.
    """

    library: Any

    def __init__(self, guard: Guard, inner: Any = None) -> None:
        self._guard = guard
        self._limits = self.library.Limits(max_connections=100, max_keepalive_connections=0)
        self._inner = inner or self.library.AsyncHTTPTransport(limits=self._limits)
        self._proxies: dict[str, Any] = {}
        self._use_proxies = inner is None

    def _through(self, proxy: str) -> Any:
        if proxy not in self._proxies:
            try:
                self._proxies[proxy] = self.library.AsyncHTTPTransport(proxy=proxy, limits=self._limits)
            except ValueError as error:
                message = f"the proxy that the environment names cannot be used: {error}"
                raise self.library.ConnectError(message) from error
        return self._proxies[proxy]

    async def handle_async_request(self, request: Any) -> Any:
        """Judges and sends. Raises DeniedError: the address must not be reached; nothing was sent."""
        check_scheme(str(request.url))
        proxy = proxy_of(request.url.scheme, request.url.host) if self._use_proxies else None
        if proxy is None:
            unreachable = (self.library.ConnectError, self.library.ConnectTimeout)
            return await send_judged(self._guard, request, self._inner, unreachable)
        # A proxy resolves the name itself: what this machine knows about it must be public.
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        with contextlib.suppress(OSError):  # only the proxy knows the name; what it may reach is the proxy's to decide
            await self._guard.addresses(request.url.host, port)
        return await self._through(proxy).handle_async_request(request)

    async def aclose(self) -> None:
        for transport in (self._inner, *self._proxies.values()):
            await transport.aclose()


class GuardedTransport(Guarded, httpx.AsyncBaseTransport):
    library = httpx
