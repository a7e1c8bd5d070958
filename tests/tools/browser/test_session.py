"""One conversation with the offline index: cursors, links, citations and their lines, and what the model gets wrong."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from vllm_gptoss.tools.browser.page import Link, Page
from vllm_gptoss.tools.browser.provider import BrowserProvider
from vllm_gptoss.tools.browser.session import BrowserSession
from vllm_gptoss.tools.browser.settings import BrowserConfig
from vllm_gptoss.tools.browser.state import State
from vllm_gptoss.tools.protocol import BrowserAction, SessionOptions, Source, ToolCall, ToolResult

DOCUMENTS = Path(__file__).parent / "documents"
DAM = "https://dams.example/velmora"


async def start(**config: Any) -> BrowserProvider:
    provider = BrowserProvider(BrowserConfig(documents=DOCUMENTS, **config), environ={})
    await provider.start()
    assert provider.unavailable is None
    return provider


@pytest.fixture
async def provider() -> AsyncIterator[BrowserProvider]:
    async with aclosing(await start()) as provider:
        yield provider


@pytest.fixture
async def session(provider: BrowserProvider) -> BrowserSession:
    return await provider.open("c", SessionOptions())


async def do(session: BrowserSession, tool: str, **arguments: Any) -> ToolResult:
    return await session.call(ToolCall("call_1", "browser", tool, json.dumps(arguments)))


async def test_search_open_find_cite_gives_the_right_lines(session: BrowserSession) -> None:
    searched = await do(session, "search", query="How long is the Velmora reservoir?")
    assert searched.text.startswith("[0] How long is the Velmora reservoir?\n**viewing lines [0 - ")
    assert "\nL4:   * 【0†The Velmora dam†dams.example】 " in searched.text
    assert searched.action == BrowserAction(
        "search", query="How long is the Velmora reservoir?", sources=[Source(0, DAM, "The Velmora dam")]
    )
    opened = await do(session, "open", id=0)
    assert opened.action == BrowserAction("open_page", url=DAM)
    assert opened.text.splitlines() == [
        f"[1] The Velmora dam ({DAM})",
        "**viewing lines [0 - 6] of 6**",
        "",
        "L0: # The Velmora dam",
        "L1: ",
        "L2: The Velmora dam was built between 1951 and 1958. Its architect was Ada ",
        "L3: Lindqvist; see 【0†her life†people.example】 and the 【1†lighthouse】.",
        "L4: ",
        "L5: It is 87 metres high and 412 metres long. The reservoir behind it holds enough ",
        "L6: water for the three towns of the valley through two dry summers.",
    ]
    found = await do(session, "find", pattern="87 METRES")
    assert found.text.splitlines()[3:5] == ["L0: # 【0†match at L5】", opened.text.splitlines()[-2].replace("L5", "L1")]
    assert found.action == BrowserAction("find_in_page", url=DAM, pattern="87 METRES")
    assert session.source(1) == Source(1, DAM, "The Velmora dam")
    assert session.source(2) == Source(2, DAM, "The Velmora dam")
    line = "It is 87 metres high and 412 metres long. The reservoir behind it holds enough "
    assert [session.source(1, number) for number in (5, 99)] == [
        Source(1, DAM, "The Velmora dam", quote) for quote in (line, "")
    ]


async def test_opening_a_find_match_lands_a_little_above_it(session: BrowserSession) -> None:
    await do(session, "open", id=DAM)
    await do(session, "find", pattern="two dry summers")
    landed = await do(session, "open", id=0)
    assert landed.text.splitlines()[3].startswith("L2: ")  # match at L6, shown from four lines above


async def test_a_citation_of_search_results_means_the_result_on_that_line(session: BrowserSession) -> None:
    shown = await do(session, "search", query="metres lighthouse dam")
    lines = shown.text.splitlines()[3:]
    assert session.source(0) is None
    for number, line in enumerate(lines):
        if "†dams.example】" in line:
            assert session.source(0, number) == Source(0, DAM, "The Velmora dam")
        if "†Skarholm lighthouse" in line or "Skarholm lighthouse】" in line:
            source = session.source(0, number)
            assert source.url == "file:///guides/lighthouse.html"
    assert session.source(0, 0) is None


async def test_documents_of_every_kind_are_read_and_brackets_in_them_are_neutral(session: BrowserSession) -> None:
    page = await do(session, "open", id="file:///guides/lighthouse.html")
    assert "Brekke" in page.text
    assert "alert" not in page.text
    assert "secret" not in page.text
    assert "〖7†L1〗" in page.text
    library = await do(session, "open", id="file:///library.txt")
    assert library.text.splitlines()[3] == "L0: The glass library of Orr keeps 9000 lantern slides."


@pytest.mark.parametrize(
    ("tool", "arguments", "kind", "said"),
    [
        ("open", {"id": 3}, "invalid_arguments", "No pages to access!"),
        ("find", {"pattern": "x"}, "invalid_arguments", "No pages to access!"),
        ("open", {"id": "file:///etc/passwd"}, "denied", "only http and https"),
        ("open", {"id": "http://user:pw@site.example/"}, "denied", "credentials"),
        ("search", {"query": "  "}, "invalid_arguments", "must not be empty"),
        ("open", {"id": -1, "cursor": "x"}, "invalid_arguments", "should be an integer"),
        ("scroll", {}, "unknown_tool", "search, open and find"),
    ],
)
async def test_mistakes_come_back_as_text_the_model_can_act_on(
    session: BrowserSession, tool: str, arguments: dict[str, Any], kind: str, said: str
) -> None:
    result = await do(session, tool, **arguments)
    assert result.error.type == kind
    assert said in result.text


async def test_a_failed_call_takes_no_cursor(session: BrowserSession) -> None:
    await do(session, "open", id=DAM)
    assert (await do(session, "open", id=99)).error
    assert (await do(session, "open", loc=500)).error
    assert (await do(session, "find", cursor=7, pattern="x")).error
    assert (await do(session, "open")).text.startswith("[1] ")


async def test_find_is_refused_on_listings_and_quoted_link_ids_are_links(session: BrowserSession) -> None:
    await do(session, "search", query="lighthouse keeper")
    assert "Cannot run `find`" in (await do(session, "find", pattern="x")).text
    assert (await do(session, "open", id="0")).text.startswith("[1] Skarholm lighthouse")


async def test_pages_belong_to_one_conversation_and_outlive_a_response(provider: BrowserProvider) -> None:
    first = await provider.open("alice", SessionOptions())
    await do(first, "open", id=DAM)
    await first.aclose()
    other = await provider.open("bob", SessionOptions())
    assert "No pages to access!" in (await do(other, "find", pattern="dam")).text
    assert other.source(0) is None
    again = await provider.open("alice", SessionOptions())
    assert (await do(again, "find", pattern="87")).text.startswith("[1] Find results")


async def test_a_conversation_without_an_id_shares_nothing(provider: BrowserProvider) -> None:
    first = await provider.open("", SessionOptions())
    await do(first, "open", id=DAM)
    assert (await provider.open("", SessionOptions())).source(0) is None


async def test_idle_conversations_are_forgotten_before_open_ones() -> None:
    provider = await start(max_conversations=2)
    kept = await provider.open("kept", SessionOptions())
    await do(kept, "open", id=DAM)
    for number in range(5):
        session = await provider.open(f"c{number}", SessionOptions())
        await do(session, "open", id=DAM)
        await session.aclose()
    assert (await provider.open("kept", SessionOptions())).source(0) is not None
    assert (await provider.open("c0", SessionOptions())).source(0) is None
    await provider.aclose()


async def test_allowed_domains_bound_search_and_open(provider: BrowserProvider) -> None:
    session = await provider.open("c", SessionOptions(allowed_domains=["dams.example"]))
    shown = await do(session, "search", query="metres lighthouse dam library")
    assert [source.url for source in shown.action.sources] == [DAM]
    refused = await do(session, "open", id="file:///library.txt")
    assert refused.error.type == "denied"


async def test_without_external_web_access_only_documents_answer(provider: BrowserProvider) -> None:
    session = await provider.open("c", SessionOptions(external_web_access=False))
    assert (await do(session, "open", id=DAM)).error is None
    refused = await do(session, "open", id="https://site.example/")
    assert refused.error.type == "denied"
    assert "may not use the web" in refused.text


async def test_pages_that_another_process_has_shown_are_found_again(provider: BrowserProvider) -> None:
    async with aclosing(await start()) as other:
        session = await other.open("c", SessionOptions())
        shown = [await do(session, "search", query="Velmora"), await do(session, "open", id=0)]
    past = [{"recipient": "browser.open", "recall": result.recall} for result in shown]
    session = await provider.open("c", SessionOptions(past=past))
    found = await do(session, "find", pattern="87 METRES")
    assert found.action == BrowserAction("find_in_page", url=DAM, pattern="87 METRES")
    assert found.text.startswith("[2] ")


@pytest.mark.parametrize(
    ("web", "said"),
    [
        (True, "No search is available: this server has neither a key for a search service nor a folder of documents"),
        (False, "No search is available without external web access: this server has no folder of documents"),
    ],
)
async def test_without_a_search_the_model_reads_why(web: bool, said: str) -> None:
    async with aclosing(BrowserProvider(BrowserConfig(), environ={})) as provider:
        session = await provider.open("c", SessionOptions(external_web_access=web))
        assert (await do(session, "search", query="dam")).text == said


async def test_search_context_size_bounds_what_is_shown(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"d{number}.txt").write_text(f"Report {number}\n" + "shared words " * 400)
    provider = BrowserProvider(BrowserConfig(documents=tmp_path), environ={})
    await provider.start()
    shown = {}
    for size in ("low", "medium", "high"):
        session = await provider.open(size, SessionOptions(search_context_size=size))
        result = await do(session, "search", query="shared", topn=30)
        page = await do(session, "open", id=0)
        shown[size] = (len(result.action.sources), len(page.text))
    assert [shown[size][0] for size in ("low", "medium", "high")] == [5, 10, 20]
    assert shown["low"][1] < shown["medium"][1] < shown["high"][1]
    fewer = await do(await provider.open("n", SessionOptions()), "search", query="shared", topn=3)
    assert len(fewer.action.sources) == 3
    await provider.aclose()


async def test_a_long_conversation_keeps_citations_and_bounds_memory(
    session: BrowserSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_gptoss.tools.browser.state.MAX_PAGES", 3)
    for _ in range(6):
        await do(session, "open", id=DAM)
    assert session.source(0) == Source(0, DAM, "The Velmora dam")
    assert "too long ago" in (await do(session, "find", cursor=0, pattern="x")).text
    assert (await do(session, "find", cursor=5, pattern="87")).error is None


async def test_pages_of_all_conversations_have_a_limit_together(tmp_path: Path) -> None:
    """The longest unused pages of the caller with most go first; the model's next look fetches them again."""
    (tmp_path / "long.txt").write_text("word " * 60_000)
    provider = BrowserProvider(BrowserConfig(documents=tmp_path, cache_mib=8), environ={})
    await provider.start()

    async def open_page(owner: str, conversation: str) -> None:
        session = await provider.open(conversation, SessionOptions(owner=owner))
        assert (await do(session, "open", id="file:///long.txt")).error is None
        await session.aclose()

    await open_page("modest", "m")
    for number in range(30):
        await open_page("greedy", f"g{number}")
    assert sum(state.size for state in provider._states.values()) <= 8 << 20
    assert provider._states["m"].dropped == 0
    assert provider._states["g0"].dropped == 1
    assert provider._states["g29"].dropped == 0
    session = await provider.open("g0", SessionOptions(owner="greedy"))
    assert (await do(session, "find", pattern="word")).error is None
    await session.aclose()
    await provider.aclose()


async def test_links_count_as_text_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_gptoss.tools.browser.state.MAX_BYTES", 1 << 20)
    state = State()
    for number in range(4):
        links = [Link(f"http://a.example/{number}/" + "x" * 8000, "l") for _ in range(100)]
        state.add(Page(f"http://a.example/{number}", "t", "short", links))
    assert state.dropped == 3
    assert state.size < 1 << 20
    state.add(large := Page("http://a.example/5", "t", "x" * (1 << 20)))
    assert state.page(-1) is large, "the display that the model looks at stays"


async def test_links_out_of_the_folder_and_oversized_files_are_not_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_gptoss.tools.browser.backends.offline.MAX_BYTES", 1000)
    (tmp_path / "secret.txt").write_text("keyword outside")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "big.txt").write_text("keyword " * 1000)
    (folder / "in.txt").write_text("keyword inside")
    provider = BrowserProvider(BrowserConfig(documents=folder), environ={})
    await provider.start()
    session = await provider.open("c", SessionOptions())
    result = await do(session, "search", query="keyword")
    assert [source.url for source in result.action.sources] == ["file:///in.txt"]
    await provider.aclose()


BATCH = 200


async def test_ended_conversations_leave_memory_flat() -> None:
    provider = await start(max_conversations=50)

    async def converse(name: str) -> None:
        session = await provider.open(name, SessionOptions())
        await do(session, "search", query="Velmora dam")
        await do(session, "open", id=0)
        await do(session, "find", pattern="metres")
        await session.aclose()

    async def batch(first: int) -> int:
        for number in range(first, first + BATCH):
            await converse(f"c{number}")
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = await batch(0)
        after = await batch(BATCH)
    finally:
        tracemalloc.stop()
    # Both ends hold 50 conversations of 3 pages, about 20 kB each; a page left by each of a batch is more than 1 MB.
    assert after - before < 300_000
    assert len(provider._states) == 50
    await provider.aclose()
