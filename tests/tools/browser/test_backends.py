"""Each search provider's documented API, spoken by a real local server that refuses anything else."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.support.servers import running
from vllm_gptoss.tools.browser.backends import API_BACKENDS, BackendError
from vllm_gptoss.tools.browser.provider import BrowserProvider, choose_backend
from vllm_gptoss.tools.browser.settings import BrowserConfig
from vllm_gptoss.tools.protocol import SessionOptions, ToolCall, ToolResult

KEY = "sk-very-secret"
QUERY = "pump curves"
Handler = Callable[[Request], Awaitable[Response]]


async def searxng(request: Request) -> Response:
    """docs.searxng.org/dev/search_api: the json format is off unless the instance turns it on."""
    if request.method != "GET" or request.query_params.get("format") != "json":
        return PlainTextResponse("forbidden", 403)
    row = {
        "url": "https://a.example/1",
        "title": "A",
        "content": "about a",
        "engine": "x",
        "parsed_url": [],
        "score": 1,
    }
    return JSONResponse({"query": request.query_params["q"], "results": [row] * 3, "answers": []})


async def brave(request: Request) -> Response:
    """api-dashboard.search.brave.com: GET, X-Subscription-Token, count of 1 to 20."""
    if request.headers.get("x-subscription-token") != KEY or request.method != "GET":
        return JSONResponse({"type": "ErrorResponse", "error": {"status": 422}}, 422)
    if not 1 <= int(request.query_params["count"]) <= 20 or len(request.query_params["q"]) > 400:
        return JSONResponse({}, 422)
    row = {"url": "https://a.example/1", "title": "A", "description": "about a", "extra_snippets": ["more", "yet more"]}
    return JSONResponse({"type": "search", "web": {"type": "search", "results": [row]}})


async def tavily(request: Request) -> Response:
    """docs.tavily.com: POST, bearer key, max_results of 0 to 20."""
    body = await request.json()
    if request.headers.get("authorization") != f"Bearer {KEY}":
        return JSONResponse({"detail": {"error": "Unauthorized"}}, 401)
    if request.url.path == "/extract":
        page = {"url": body["urls"][0], "raw_content": "# Page\n\nSee [b](https://b.example/)."}
        return JSONResponse({"results": [page], "failed_results": [], "response_time": 0.1})
    if not 0 <= body["max_results"] <= 20 or not isinstance(body.get("include_domains", []), list):
        return JSONResponse({}, 400)
    row = {"url": "https://a.example/1", "title": "A", "content": "about a", "score": 0.9, "raw_content": None}
    return JSONResponse({"query": body["query"], "answer": None, "images": [], "results": [row], "response_time": 0.1})


async def exa(request: Request) -> Response:
    """exa.ai/docs: POST, x-api-key, camelCase."""
    body = await request.json()
    if request.headers.get("x-api-key") != KEY:
        return JSONResponse({"error": "Invalid API key"}, 401)
    if request.url.path == "/contents":
        html = "<div><p>See <a href='https://b.example/'>b</a>.</p></div>"
        return JSONResponse({"results": [{"url": body["urls"][0], "title": "Page", "text": html}], "statuses": []})
    if set(body) - {"query", "numResults", "contents", "includeDomains", "userLocation"}:
        return JSONResponse({"error": "unknown field"}, 400)
    row = {"id": "1", "url": "https://a.example/1", "title": "A", "highlights": ["about a"], "highlightScores": [0.5]}
    return JSONResponse({"requestId": "r", "results": [row]})


async def youcom(request: Request) -> Response:
    """you.com/docs: POST, X-API-Key; web results have snippets, news have descriptions."""
    body = await request.json()
    if request.headers.get("x-api-key") != KEY:
        return JSONResponse({"detail": "Forbidden"}, 403)
    if request.url.path == "/v1/contents":
        return JSONResponse(
            [{"url": body["urls"][0], "title": "Page", "html": "<p>See <a href='https://b.example/'>b</a>.</p>"}]
        )
    if body.get("country", "US") not in ("US", "SE", "DE"):
        return JSONResponse({"detail": "unsupported country"}, 422)
    web = {"url": "https://a.example/1", "title": "A", "description": "d", "snippets": ["about a"]}
    news = {"url": "https://n.example/1", "title": "N", "description": "news"}
    return JSONResponse({"results": {"web": [web], "news": [news]}, "metadata": {"query": body["query"]}})


APIS: dict[str, tuple[Handler, str]] = {
    "searxng": (searxng, "/search"),
    "brave": (brave, "/res/v1/web/search"),
    "tavily": (tavily, "/search"),
    "exa": (exa, "/search"),
    "youcom": (youcom, "/v1/search"),
}
PAGES = {"tavily": "/extract", "exa": "/contents", "youcom": "/v1/contents"}


Api = tuple[str, dict[str, Any], list[Any]]
"""A provider's name, its configuration, and the request that reached the server."""


@pytest.fixture
async def api(request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    name: str = request.param
    handler, path = APIS[name]
    seen: list[Any] = []

    async def note(received: Request) -> Response:
        where = {name: value for name, value in received.headers.items() if name.startswith("x-loc-")}
        asked = dict(received.query_params) if received.method == "GET" else json.loads(await received.body())
        seen.append(asked | where)
        return await handler(received)

    paths = [path, *([PAGES[name]] if name in PAGES else [])]
    async with running(Starlette(routes=[Route(p, note, methods=["GET", "POST"]) for p in paths])) as url:
        yield name, {"backend": name, "url": url, "api_key": KEY}, seen


async def run(config: Any, tool: str, options: SessionOptions, **arguments: Any) -> ToolResult:
    provider = BrowserProvider(BrowserConfig.model_validate(config), environ={})
    await provider.start()
    assert provider.unavailable is None
    session = await provider.open("c", options)
    try:
        return await session.call(ToolCall("1", "browser", tool, json.dumps(arguments)))
    finally:
        await provider.aclose()


@pytest.mark.parametrize("api", list(APIS), indirect=True)
async def test_search_speaks_the_documented_api(api: Api) -> None:
    _, given, seen = api
    result = await run(given, "search", SessionOptions(search_context_size="high"), query=QUERY, topn=50)
    assert result.error is None
    assert "【0†A†a.example】 about a" in result.text
    assert result.action.sources[0].url == "https://a.example/1"
    assert QUERY in json.dumps(seen[0])


@pytest.mark.parametrize("api", list(APIS), indirect=True)
async def test_allowed_domains_are_asked_for_and_enforced(api: Api) -> None:
    _, given, seen = api
    result = await run(given, "search", SessionOptions(allowed_domains=["b.example"]), query=QUERY)
    assert result.error is None
    assert "No results." in result.text  # the server ignored the filter, we do not
    assert "b.example" in json.dumps(seen[0])


TOLD = {
    "brave": {
        "x-loc-country": "SE",
        "x-loc-city": "Örebro".encode().decode("latin-1"),
        "x-loc-timezone": "Europe/Stockholm",
    },
    "exa": {"userLocation": "SE"},
    "youcom": {"country": "SE"},
}


@pytest.mark.parametrize("api", list(APIS), indirect=True)
async def test_the_users_location_is_told_where_the_api_takes_it_and_logged_where_not(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    name, given, seen = api
    for country, told in (("se", TOLD.get(name, {})), ("IS", {})):  # not every API knows every country
        place = {"type": "approximate", "country": country, "city": "Örebro", "timezone": "Europe/Stockholm"}
        options = SessionOptions(response_id="resp_1", user_location=place)
        result = await run(given, "search", options, query=QUERY)
        assert result.error is None, result.text
        assert {key: seen[-1].get(key) for key in told} == told
    unheard = {"brave": "", "exa": "city, timezone", "youcom": "city, country, timezone"}.get(
        name, "city, country, timezone"
    )
    lines = [r.getMessage() for r in caplog.records if "does not support" in r.getMessage()]
    assert (lines[-1:] or [""])[0] == (
        f"browser: response resp_1: {name} does not support the user's {unheard}" if unheard else ""
    )


@pytest.mark.parametrize("api", ["brave"], indirect=True)
async def test_more_domains_than_a_query_holds_are_cut_with_a_word(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    _, given, _ = api
    domains = ["a.example", *(f"site-number-{n}.example" for n in range(50))]
    result = await run(given, "search", SessionOptions(allowed_domains=domains), query=QUERY)
    assert "【0†A†a.example】" in result.text
    assert "of 51 allowed domains fit" in caplog.text


@pytest.mark.parametrize("api", sorted(set(APIS) - {"searxng"}), indirect=True)
async def test_a_refused_key_is_named_by_its_variable_and_never_shown(api: Api) -> None:
    name, given, _ = api
    config = BrowserConfig.model_validate(given | {"api_key": "sk-wrong-key"})
    result = await run(config, "search", SessionOptions(), query=QUERY)
    assert result.error.type == "tool_failed"
    assert name in result.text
    assert "sk-wrong-key" not in result.text + repr(config)


@pytest.mark.parametrize("api", list(PAGES), indirect=True)
async def test_pages_can_come_from_the_backend(api: Api) -> None:
    _, given, _ = api
    result = await run(given | {"open_with": "backend"}, "open", SessionOptions(), id="https://a.example/1")
    assert result.error is None
    assert "See 【0†b†b.example】." in result.text


@pytest.mark.alone
@pytest.mark.parametrize("api", ["exa"], indirect=True)
async def test_a_large_page_of_a_backend_does_not_hold_up_the_server_and_a_broken_one_is_said(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, given, _ = api
    config = BrowserConfig.model_validate(given | {"open_with": "backend"})
    provider = BrowserProvider(config, environ={})
    await provider.start()
    backend: Any = provider._web
    for text, said in (("<p>" + "<a href=x>word</a> " * 30_000, "word"), ("<div>" * 20_000 + "x", "cannot be read")):
        rows = [{"title": "Big", backend.form.page_text: text}]

        async def answer(*_: Any, rows: list[Any] = rows, **__: Any) -> Any:
            return {"results": rows}

        monkeypatch.setattr(backend, "json", answer)
        session = await provider.open("c", SessionOptions())
        opening = asyncio.create_task(session.call(ToolCall("1", "browser", "open", '{"id": "https://a.example/1"}')))
        longest = 0.0
        while not opening.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        result = opening.result()
        assert said in result.text
        assert longest < 1.0  # seconds; reading it here would take several
    await provider.aclose()


@pytest.mark.parametrize(
    ("answer", "status", "failed"),
    [
        ("[]", 200, ""),
        ("{}", 200, None),
        ('{"results": null}', 200, None),
        ('{"results": [1, {"title": "no url"}]}', 200, None),
        ("<html>", 200, ""),
        ("forbidden", 403, "search.formats"),
    ],
)
async def test_an_answer_out_of_shape_is_no_crash(answer: str, status: int, failed: str | None) -> None:
    """As a searxng whose JSON is off: it says what to set."""

    async def odd(request: Request) -> Response:
        return Response(answer, status, media_type="application/json")

    async with running(Starlette(routes=[Route("/search", odd)])) as url:
        result = await run({"backend": "searxng", "url": url}, "search", SessionOptions(), query=QUERY)
    assert (result.error is None) is (failed is None)
    assert ("No results." in result.text) is (failed is None)
    assert (failed or "") in result.text


async def test_a_backend_that_is_down_is_an_error_the_model_reads() -> None:
    result = await run({"backend": "searxng", "url": "http://127.0.0.1:1"}, "search", SessionOptions(), query=QUERY)
    assert result.error is not None
    assert "searxng cannot be reached" in result.text


@pytest.mark.parametrize("name", sorted(set(API_BACKENDS) - {"searxng"}))
async def test_a_missing_key_turns_the_tool_off_and_names_the_variable(name: str) -> None:
    provider = BrowserProvider(BrowserConfig.model_validate({"backend": name}), environ={})
    await provider.start()
    assert provider.unavailable is not None
    assert API_BACKENDS[name].key_variable in provider.unavailable
    with pytest.raises(BackendError):
        await API_BACKENDS[name]().start()


@pytest.mark.parametrize(("opens", "is_on"), [("fetch", True), ("documents", False)])
async def test_without_a_search_the_tool_is_on_if_it_opens_pages(opens: str, is_on: bool) -> None:
    async with aclosing(BrowserProvider(BrowserConfig.model_validate({"open_with": opens}), environ={})) as provider:
        await provider.start()
        assert (provider.unavailable is None) is is_on


def test_the_environment_chooses_the_backend_and_offline_needs_nothing() -> None:
    auto = BrowserConfig()
    assert choose_backend(auto, {}) == "offline"
    assert choose_backend(auto, {"EXA_API_KEY": "x"}) == "exa"
    assert choose_backend(auto, {"SEARXNG_URL": "http://s", "EXA_API_KEY": "x"}) == "searxng"
    assert choose_backend(BrowserConfig(backend="offline"), {"EXA_API_KEY": "x"}) == "offline"
