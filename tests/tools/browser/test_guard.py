"""No address off the public internet may be reached, through any name, redirect or encoding.

Every decision is made with a resolver and a transport of the test's own: nothing is sent anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import httpx2
import pytest

from vllm_gptoss.tools.browser.backends import API_BACKENDS, BackendError
from vllm_gptoss.tools.browser.fetch import Fetcher, FetchError, FetchLimits
from vllm_gptoss.tools.browser.guard import DeniedError, Guard, GuardedTransport, check_scheme, refusal
from vllm_gptoss.tools.mcp.transport import GuardedTransport2

PUBLIC = "93.184.215.14"


@dataclass
class Names:
    """A resolver under control: each name gives its answers in turn, the last one for ever."""

    answers: dict[str, list[list[str]]]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self.answers.get(host)
        if not answers:
            raise OSError("unknown name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


@dataclass
class Wire(httpx.AsyncBaseTransport):
    """A transport that answers by Host header and path and records each request and its address."""

    pages: dict[str, httpx.Response | str]
    sent: list[str] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(f"{request.url.host} {request.headers['host']} {request.url.path}")
        answer = self.pages.get(f"{request.headers['host']}{request.url.path}")
        if isinstance(answer, str):
            return httpx.Response(200, html=answer)
        return answer or httpx.Response(404)


def fetcher(
    names: dict[str, list[list[str]]], pages: dict[str, httpx.Response | str], **options: bool
) -> tuple[Fetcher, Wire]:
    wire = Wire(pages)
    return Fetcher(Guard(resolver=Names(names)), FetchLimits(max_bytes=10_000), transport=wire, **options), wire


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "::1", "0.0.0.0", "::", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1",
        "169.254.169.254", "169.254.170.2", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "224.0.0.1",
        "ff02::1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::",
        "::127.0.0.1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "fec0::1", "100::1", "example.org", "0x7f.1",
        "192.0.0.192", "192.0.0.8", "168.63.129.16", "3fff::1", "64:ff9b:1:7f00:0:100:808:808", "64:ff9b:1::808:808",
        "::ffff:0:7f00:1", "::ffff:168.63.129.16",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert refusal(address) is not None


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "64:ff9b::5db8:d70e"])
def test_public_addresses_pass(address: str) -> None:
    assert refusal(address) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://[::1]/", "http://169.254.169.254/latest/meta-data/", "http://localhost/", "http://a.localhost:80/",
        "http://printer.local/", "http://metadata.google.internal/", "http://[::ffff:10.0.0.1]/", "http://2130706433/",
        "http://0x7f000001/", "http://127.1/", "http://0177.0.0.1/", "http://rebind.example/", "http://mixed.example/",
        "http://LOCALHOST./", "ftp://site.example/", "file:///etc/passwd", "gopher://site.example/", "http:///x",
        "http://user:pw@site.example/", "javascript:alert(1)", "http://site.example:99999/",
    ],
)  # fmt: skip
async def test_nothing_is_sent_for_urls_that_lead_inside(url: str) -> None:
    reader, wire = fetcher(
        {"rebind.example": [["10.0.0.5"]], "mixed.example": [[PUBLIC, "10.0.0.5"]], "site.example": [[PUBLIC]]}, {}
    )
    with pytest.raises((DeniedError, FetchError)) as caught:
        await reader.page(url)
    assert wire.sent == []
    assert isinstance(caught.value, DeniedError)
    await reader.aclose()


async def test_the_connection_goes_to_the_judged_address_with_the_name_kept_for_tls() -> None:
    names = Names({"site.example": [[PUBLIC], ["127.0.0.1"]]})
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200)

    transport = GuardedTransport(Guard(resolver=names), httpx.MockTransport(answer))
    async with httpx.AsyncClient(transport=transport) as client:
        await client.get("https://site.example/a")
        with pytest.raises(DeniedError):  # the name changed its mind; each request is judged again
            await client.get("https://site.example/b")
    assert [request.url.host for request in seen] == [PUBLIC]
    assert seen[0].headers["host"] == "site.example"
    assert seen[0].extensions["sni_hostname"] == "site.example"
    assert names.asked == ["site.example", "site.example"]


@pytest.mark.parametrize("target", ["http://127.0.0.1/", "http://inner.example/", "file:///etc/passwd", "//10.0.0.1/"])
@pytest.mark.parametrize("path", ["/robots.txt", "/"])
async def test_a_redirect_inside_is_not_followed(target: str, path: str) -> None:
    reader, wire = fetcher(
        {"site.example": [[PUBLIC]], "inner.example": [["192.168.0.1"]]},
        {f"site.example{path}": httpx.Response(302, headers={"location": target})},
    )
    with pytest.raises(DeniedError):
        await reader.page("http://site.example/")
    assert wire.sent == [f"{PUBLIC} site.example {each}" for each in ("/robots.txt", "/") if len(each) >= len(path)]
    await reader.aclose()


async def test_redirects_are_followed_in_public_within_allowed_domains_and_bounded() -> None:
    names = {"a.example": [[PUBLIC]], "b.example": [[PUBLIC]]}
    pages: dict[str, httpx.Response | str] = {
        "a.example/": httpx.Response(301, headers={"location": "http://b.example/end"}),
        "b.example/end": "<title>End</title><p>here</p>",
        "a.example/loop": httpx.Response(302, headers={"location": "/loop"}),
    }
    reader, _ = fetcher(names, pages)
    page = await reader.page("http://a.example/")
    assert (page.url, page.title) == ("http://b.example/end", "End")
    with pytest.raises(DeniedError, match=r"b\.example is not one of the allowed domains"):
        await reader.page("http://a.example/", ["a.example"])
    with pytest.raises(FetchError, match="more than 5 redirects"):
        await reader.page("http://a.example/loop")
    await reader.aclose()


async def test_listed_hosts_are_opened_and_only_those() -> None:
    guard = Guard(["10.0.0.1:8080", "wiki.internal"], resolver=Names({"wiki.internal": [["10.0.0.2"]]}))
    assert await guard.addresses("10.0.0.1", 8080) == ["10.0.0.1"]
    assert await guard.addresses("wiki.internal", 443) == ["10.0.0.2"]
    with pytest.raises(DeniedError):
        await guard.addresses("10.0.0.1", 80)
    with pytest.raises(DeniedError):
        await guard.addresses("10.0.0.2", 8080)


async def test_the_mcp_client_is_guarded_the_same_way() -> None:
    sent: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(f"{request.url.host} {request.headers['host']}")
        return httpx2.Response(200)

    names = Names({"mcp.example": [[PUBLIC], ["169.254.169.254"]]})
    transport = GuardedTransport2(Guard(resolver=names), httpx2.MockTransport(answer))
    async with httpx2.AsyncClient(transport=transport) as client:
        await client.get("https://mcp.example/mcp")
        with pytest.raises(DeniedError, match="link-local"):
            await client.get("https://mcp.example/mcp")
    assert sent == [f"{PUBLIC} mcp.example"]


async def test_a_proxy_is_used_and_names_known_to_be_inside_are_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "direct.example")
    transport = GuardedTransport(Guard(resolver=Names({"inner.example": [["10.0.0.1"]], "site.example": [[PUBLIC]]})))
    wire = Wire({"site.example/": "x", "only-the-proxy-knows.example/": "y"})
    transport._proxies["http://proxy.invalid:3128"] = wire
    async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
        assert (await client.get("http://site.example/")).text == "x"
        assert (await client.get("http://only-the-proxy-knows.example/")).text == "y"
        # Numbers are judged here: a proxy would read them as the addresses that they are.
        for inside in ("inner.example", "2130706433", "0x7f.1", "127.1", "[::ffff:7f00:1]", "10.0.0.1"):
            with pytest.raises(DeniedError):
                await client.get(f"http://{inside}/")
        with pytest.raises(httpx.ConnectError):  # not through the proxy, and this resolver does not know it
            await client.get("http://direct.example/")
    assert wire.sent == ["site.example site.example /", "only-the-proxy-knows.example only-the-proxy-knows.example /"]


@dataclass
class Dead(Wire):
    """Like `Wire`, but no server listens at `address`."""

    address: str = ""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == self.address:
            self.sent.append(f"{request.url.host} refused")
            raise httpx.ConnectError("refused")
        return await super().handle_async_request(request)


async def test_an_address_that_leads_nowhere_is_followed_by_the_next_and_none_is_inside() -> None:
    sites = {"site.example": [["2606:4700::1111", PUBLIC]], "mixed.example": [["2606:4700::1111", "10.0.0.1"]]}
    wire = Dead({"site.example/": "x"}, address="2606:4700::1111")
    transport = GuardedTransport(Guard(resolver=Names(sites)), wire)
    async with httpx.AsyncClient(transport=transport, timeout=9.0) as client:
        assert (await client.get("http://site.example/")).text == "x"
        with pytest.raises(DeniedError):
            await client.get("http://mixed.example/")
    assert wire.sent == ["2606:4700::1111 refused", f"{PUBLIC} site.example /"]


@pytest.mark.parametrize("proxy", ["ftp://proxy.invalid", "socks5://127.0.0.1:1"])
async def test_a_proxy_that_cannot_be_used_is_said_and_goes_round_nothing(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    names = Names({"site.example": [[PUBLIC]], "inner.example": [["10.0.0.1"]]})
    reader = Fetcher(Guard(resolver=names))
    with pytest.raises(FetchError, match="cannot be used|connection attempts failed"):
        await reader.page("http://site.example/")
    with pytest.raises(DeniedError):
        await reader.page("http://inner.example/")
    await reader.aclose()
    backend = API_BACKENDS["brave"]("key")
    problem = ""
    try:
        await backend.start()
    except BackendError as error:
        problem = str(error)
    assert ("cannot be used" in problem) == (proxy == "ftp://proxy.invalid")
    await backend.aclose()


@pytest.mark.parametrize("url", ["http://site.example/", "https://site.example:8443/x?y#z"])
def test_ordinary_urls_pass_the_scheme_check(url: str) -> None:
    check_scheme(url)
