"""The web page in a real browser, on a real `vllm serve` with an API key.

What the small model does not know is forced: tests/support/scripted.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from selenium.webdriver.common.keys import Keys

from demo.server import Server, reserved, serve
from tests.support import warm_vllm
from tests.support.browser import MISSING, NARROW, WIDE, Browser, browser
from tests.support.machine import SAME_EVERYWHERE
from tests.support.mcp_servers import McpServers
from tests.support.places import PYTHON, ROOT
from tests.support.responses import npm
from tests.support.responses.pdf import pdf
from tests.support.scripted import LAST, NUMBERS
from vllm_gptoss.server.ui.pages import FOLDER

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.serve,
    pytest.mark.namespaces,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]
KEY = "key of the page"
AXE = npm.PACKAGES / "axe-core" / "axe.min.js"
SCREENSHOT = ROOT / "docs" / "ui.png"
DEPLOY = ROOT / "recipes" / "deploy"


@dataclass
class Page:
    """The browser, and the server whose page it shows."""

    browser: Browser
    model: Path
    home: Path
    tools: Path
    port: int
    stack: ExitStack
    server: Server = field(init=False)

    def start(self) -> None:
        environment = {
            **SAME_EVERYWHERE,
            "GPTOSS_UI": "1",
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(self.home),
            "GPTOSS_STRICT_TOOLS": "0",
            "GPTOSS_RESPONSES_HEARTBEAT": "3",
            "GPTOSS_BROWSER_DOCUMENTS": str(ROOT / "demo" / "documents"),
        }
        arguments = [
            *("--tool-server", f"demo,{self.tools}", "--api-key", KEY),
            *("--logits-processors", "tests.support.scripted:Scripted"),
        ]
        log = self.home / "serve.log"
        started = serve(self.model, log, arguments, environment, self.port, popen=warm_vllm.popen)
        self.server = self.stack.enter_context(started)

    def kill(self) -> None:
        main = psutil.Process(self.server.process.pid)
        processes = [main, *main.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # its children may have ended by themselves
                process.kill()
        psutil.wait_procs(processes, 60)
        self.server.process.wait()

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.api, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    def open(self, path: str = "/ui/", *, tools: list[str] | None = None, **kept: str) -> None:
        """The page with the key, in a new tab's state. kept: entries of localStorage."""
        self.browser.driver.get(f"{self.server.url}/ui/chat.js")
        self.browser.run("localStorage.clear(); sessionStorage.clear()")
        entries = {"gptoss.options": json.dumps({"tools": tools or []}), **{f"gptoss.{k}": v for k, v in kept.items()}}
        for name, value in entries.items():
            self.browser.run("localStorage.setItem(...arguments)", name, value)
        self.browser.run("sessionStorage.setItem('gptoss.key', arguments[0])", KEY)
        self.browser.driver.get(f"{self.server.url}{path}")
        if path.startswith("/ui/") and "server" not in path:
            self.browser.until(lambda: bool(self.browser.find("#tools legend")))

    def ask(self, text: str) -> None:
        self.browser.find("#prompt")[0].send_keys(text, Keys.ENTER)


@pytest.fixture(scope="module")
def page(model_dir: Path, mcp_servers: McpServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    home = tmp_path_factory.mktemp("ui")
    tools = home / "tools.yaml"
    tools.write_text(yaml.safe_dump({"python": PYTHON, "mcp": mcp_servers.config}))
    with reserved() as held:
        port = int(held.getsockname()[1])
    with ExitStack() as stack:
        shown = Page(stack.enter_context(browser()), model_dir, home, tools, port, stack)
        shown.start()
        yield shown


@pytest.fixture(scope="module")
def plot(page: Page) -> str:
    """The path of a conversation that the page made: a plot of the python tool."""
    page.open(tools=["Python"])
    page.ask("Plot the square numbers.")
    page.browser.wait(".turn .buttons", "Regenerate", 180)
    return f"/ui/{page.browser.run('return location.hash')}"


def test_with_the_keyboard_alone_a_wrong_key_is_refused_and_the_right_one_opens_the_page(page: Page) -> None:
    seen = page.browser
    seen.driver.get(f"{page.server.url}/")
    seen.wait("#error", "API key is missing or wrong")
    seen.press("wrong", Keys.ENTER)
    seen.wait("#error", "HTTP 401")
    assert not seen.find("#tools legend")
    seen.press(KEY, Keys.ENTER)
    seen.until(lambda: bool(seen.find("#tools legend")))
    assert seen.texts("#error") == [""]
    seen.press(*[Keys.TAB] * 3)
    assert seen.run("return document.activeElement.id") == "prompt"
    seen.press("Compute 17 * 23 with Python.", Keys.ENTER)
    seen.wait(".answer", "391")
    seen.wait(".turn .buttons", "Regenerate")
    assert seen.shows(".reasoning summary", "Reasoning (")()
    assert re.search(r"tokens in .* tokens/s · first token after [\d.]+ s", seen.texts(".note")[0])
    for _ in range(30):
        seen.press(Keys.TAB)
        if seen.run("return document.activeElement.textContent") == "Edit":
            break
    seen.press(Keys.ENTER)
    seen.until(lambda: seen.texts(".user") == [])
    assert seen.run("return document.activeElement.value") == "Compute 17 * 23 with Python."
    seen.run("history.replaceState(null, '', '/ui/')")


def test_a_conversation_with_python_and_a_plot_is_shown_and_kept(page: Page, plot: str) -> None:
    seen = page.browser
    page.open(plot)
    seen.wait(".answer", "I plotted the squares and saved squares.png.")
    assert seen.shows(".tool code", "plt.plot")()
    seen.wait(".tool code .hl-keyword", "import")
    (image,) = seen.find(".tool img")
    assert int(str(image.get_property("naturalWidth"))) > 100
    assert seen.texts("button.file") == ["Download squares.png"]
    assert seen.texts(".user") == ["Plot the square numbers."]
    assert seen.shows("nav li", "Plot the square numbers.")()
    if "GPTOSS_SCREENSHOT" in os.environ:
        seen.save(SCREENSHOT)
    assert seen.violations() == []


@pytest.mark.skipif(npm.missing(node=False) is not None, reason=str(npm.missing(node=False)))
def test_the_page_is_accessible_in_both_themes_and_languages_and_on_a_phone(page: Page, plot: str) -> None:
    seen = page.browser
    background = []
    for theme, language, send, size in (("light", "en", "Send", WIDE), ("dark", "zh", "发送", NARROW)):
        seen.driver.set_window_size(*size)
        page.open(plot, theme=theme, language=language)
        seen.wait(".tool code .hl-keyword", "import")
        assert seen.texts("#send") == [send]
        seen.run("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert seen.faults(AXE) == []
        assert seen.run("return document.documentElement.scrollWidth <= window.innerWidth")
        background.append(seen.run("return getComputedStyle(document.querySelector('.user')).backgroundColor"))
        page.open("/ui/server", theme=theme, language=language)
        seen.until(lambda: len(seen.find("#live tr")) > 10)
        assert seen.faults(AXE) == []
        assert seen.run("return document.documentElement.scrollWidth <= window.innerWidth")
    assert background[0] != background[1]
    seen.driver.set_window_size(*WIDE)


def test_a_citation_opens_its_source_at_the_cited_line(page: Page) -> None:
    page.open(tools=["Web"])
    page.ask("Who built the Skarholm lighthouse and when?")
    page.browser.wait(".note", "tokens/s")
    sources = page.browser.find(".sources a")
    assert [str(each.get_property("href")) for each in sources] == [
        f"https://docs.example.org/skarholm-lighthouse#:~:text={text}"
        for text in (
            "The%20lighthouse%20of%20Skarholm%20was%20designed%20by%20Ingrid%20Thorsen.",
            "Its%20lamp%20was%20lit%20for%20the%20first%20time%20on%203%20May%201887.",
        )
    ]
    assert page.browser.texts(".sources li")[0].endswith("(lines 2 to 2)")


def test_a_call_waits_for_its_approval_also_after_a_reload(page: Page) -> None:
    seen = page.browser
    page.open(tools=["files"])
    page.ask("Delete notes.txt.")
    seen.wait(".approval", "May the model call files.delete_file?")
    seen.until(lambda: not seen.find("#stop")[0].is_displayed())
    seen.driver.refresh()
    seen.wait(".approval", "Approve")
    seen.click("Approve")
    seen.wait(".answer", "I asked the server to delete notes.txt.")
    seen.wait(".note", "tokens/s")
    seen.driver.refresh()
    seen.wait(".answer", "I asked the server to delete notes.txt.")
    assert seen.shows(".approval", "Approved")()
    assert seen.find(".approval > div button:not(.small)") == []


def users(http: httpx.Client, conversation: str) -> list[str]:
    """Ids of the user's messages in a conversation."""
    items = http.get(f"/conversations/{conversation[1:]}/items", params={"order": "asc", "limit": 100}).json()["data"]
    return [item["id"] for item in items if item.get("role") == "user"]


def copied(seen: Browser, label: str) -> str:
    """What a button of the last turn copies."""
    seen.click(label)
    seen.wait(".turn .buttons", "Copied")
    text = str(seen.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])"))
    seen.until(lambda: not seen.shows(".turn .buttons", "Copied")())
    return text


def test_a_turn_is_regenerated_branched_and_copied_as_a_program(page: Page, tmp_path: Path) -> None:
    seen = page.browser
    page.open(tools=["Python"])
    for number, text in enumerate(("Read.", "Write."), 1):
        page.ask(text)
        seen.until(
            lambda number=number: (
                len(seen.find(".turn .buttons")) == number and not seen.find("#stop")[0].is_displayed()
            )
        )
    seen.wait(".turn:last-child .buttons", "Branch")
    first = seen.run("return location.hash")
    with page.http() as http:
        before = users(http, first)
        seen.click("Regenerate")
        seen.until(lambda: users(http, first)[1:] not in ([], before[1:]))
        assert users(http, first)[:-1] == before[:1]
    seen.wait(".turn:last-child .buttons", "Branch")
    assert seen.texts(".user") == ["Read.", "Write."]
    seen.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    curl = copied(seen, "Copy as curl")
    assert '"type": "code_interpreter"' in curl
    for command in (["bash", "-c", curl], [sys.executable, "-c", copied(seen, "Copy as Python")]):
        environment = {**os.environ, "OPENAI_API_KEY": KEY}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
        assert "Written." in ran.stdout, ran.stderr
    seen.click("Branch")
    seen.until(lambda: seen.texts(".user") == ["Read."])
    seen.until(lambda: seen.run("return document.activeElement.value") == "Write.")
    assert [each.strip() for each in seen.texts(".answer")] == ["Read."]
    assert seen.run("return location.hash") != first
    seen.press(Keys.ENTER)
    seen.until(lambda: len(seen.find(".turn")) == 2)
    seen.wait(".turn:last-child .buttons", "Branch")
    seen.run("document.querySelector('#options').open = true")
    seen.click_one(lambda: seen.find("#effort option")[2])
    seen.find("#instructions")[0].send_keys("Be brief.", Keys.TAB)
    seen.driver.refresh()
    seen.wait(".turn:last-child .buttons", "Branch")
    request = copied(seen, "Copy as Python")
    assert ('"effort": "high"' in request, '"Be brief."' in request) == (True, True)


def test_text_and_pdf_files_are_sent_with_a_message(page: Page, tmp_path: Path) -> None:
    seen = page.browser
    text, document = tmp_path / "notes.txt", tmp_path / "paper.pdf"
    text.write_text("a <b>note</b>")
    document.write_bytes(pdf("words of the paper"))
    page.open()
    seen.find("#file")[0].send_keys(f"{text}\n{document}")
    seen.until(lambda: seen.texts("#files button") == ["notes.txt ✕", "paper.pdf ✕"])
    page.ask("Read.")
    seen.wait(".turn .buttons", "Branch")
    seen.driver.refresh()
    seen.wait(".answer", "Read.")
    assert seen.texts(".user div") == ["📄 notes.txt", "📄 paper.pdf", "Read."]
    with page.http() as http:
        items = http.get(f"/conversations/{seen.run('return location.hash')[1:]}/items").json()["data"]
    (sent,) = [item for item in items if item.get("role") == "user"]
    assert "a <b>note</b>" in sent["content"][0]["text"]
    assert "words of the paper" in sent["content"][1]["text"]


def test_stop_ends_the_answer_and_deleting_removes_the_conversation(page: Page) -> None:
    seen = page.browser
    page.open()
    page.ask("Talk.")
    seen.wait(".answer", "word word")
    seen.press(Keys.ESCAPE)
    seen.wait(".note", "cancelled")
    seen.until(lambda: bool(seen.find("nav li:has([aria-current])")))
    before = len(seen.find("nav li"))
    seen.click_one(lambda: seen.find("nav li:has([aria-current]) button.small")[0])
    seen.until(lambda: len(seen.find("nav li")) == before - 1)
    assert seen.texts(".user") == []


def test_a_hostile_answer_runs_nothing(page: Page) -> None:
    seen = page.browser
    page.open()
    page.ask("Attack.")
    seen.wait(".note", "tokens in")
    assert seen.driver.title == "gpt-oss"
    assert seen.find(".turn :is(script, img, svg, iframe, b)") == []
    links = seen.find(".answer a")
    assert {str(link.get_property("protocol")) for link in links} == {"http:", "https:"}
    assert seen.shows(".answer code", "a[U+202E]b")()
    seen.wait(".answer .code .hl-string", "parent.document.title='run'")
    assert seen.texts(".answer td strong") == ["2"]
    assert len(seen.find(".answer mfrac")) == 1
    assert seen.shows(".answer p", "it costs $5 and $6")()
    assert seen.violations() == []


def test_huge_conversations_do_not_freeze_the_page(page: Page) -> None:
    """10,000 items, among the newest of them 2 MB of text and texts that are slow for a parser of Markdown."""
    texts = ["x " * 1_000_000, "[" * 99_000, "*a **b " * 14_000, "> " * 49_000, "$" * 99_000, "\\(" * 49_000]
    texts += ["`" * 50_000 + "a" + "`" * 49_000, "|a" * 100 + "\n" + "|-" * 100 + ("\n" + "|a" * 100) * 450]
    answers: list[dict[str, Any]] = [{"role": "assistant", "content": text} for text in texts]
    with page.http() as http:
        identifier = http.post("/conversations", json={}).json()["id"]
        few = [{"role": "user" if number % 2 else "assistant", "content": f"{number}"} for number in range(20)]
        with ThreadPoolExecutor(4) as pool:
            path = f"/conversations/{identifier}/items"
            made = pool.map(lambda _: http.post(path, json={"items": few}).raise_for_status(), range(500))
            assert len(list(made)) == 500
        for answer in answers:
            http.post(f"/conversations/{identifier}/items", json={"items": [answer]}).raise_for_status()
    page.open(f"/ui/#{identifier}")
    seen = page.browser
    seen.until(lambda: len(seen.find(".answer")) > len(texts))
    seen.click("Earlier messages")
    seen.until(lambda: len(seen.find(".turn")) > 90)
    assert float(seen.run("return window.longest")) < 5_000


FAILING_FETCH = """
window.failing = new AbortController();
const fetched = window.fetch;
window.fetch = (url, options) => fetched(url, {...options, signal: window.failing.signal});
"""
"""Lets a test break the page's connections with fetch's error for that, and refuse new ones."""


def test_a_lost_connection_and_a_reload_continue_the_stream(page: Page) -> None:
    seen = page.browser
    page.open()
    seen.run(FAILING_FETCH)
    page.ask("Count.")
    seen.wait(".answer", "w5")
    seen.run("window.failing.abort(new TypeError('network error'))")
    seen.wait(".note", "The connection was lost. Reconnecting")
    seen.run("window.failing = new AbortController()")
    seen.wait(".answer", "w15")
    seen.driver.refresh()
    seen.wait(".answer", "w16")
    assert not seen.shows(".answer", LAST)()
    seen.wait(".answer", LAST)
    assert [each.strip() for each in seen.texts(".answer")] == [NUMBERS]
    assert seen.texts(".user") == ["Count."]
    seen.wait(".turn .buttons", "Branch")


@pytest.mark.usefixtures("plot")
def test_the_operator_page_needs_the_key_and_shows_the_server(page: Page) -> None:
    seen = page.browser
    assert httpx.get(f"{page.server.url}/v1/ui/server").status_code == 401
    page.open(tools=["weather"])
    page.ask("Are there weather alerts in Texas?")
    seen.wait(".approval", "May the model call weather.get_alerts?")
    seen.until(lambda: not seen.find("#stop")[0].is_displayed())
    seen.click("Approve")
    seen.wait(".turn:last-child .note", "tokens/s")
    page.open("/ui/server")
    seen.wait("#errors th", "weather.get_alerts")
    assert seen.shows("#errors td", "tool_failed: Error executing tool get_alerts")()
    seen.wait("#doctor th", "python tool", 180)
    assert seen.shows("#doctor td", "vllm-gptoss")()
    seen.wait("#facts", "Tool python")
    seen.wait("#facts", "Chosen: layers")
    seen.wait("#live", "KV cache in use")
    names, values = seen.texts("#live th"), seen.texts("#live td")
    rows = dict(zip(names, values, strict=True))
    assert "completed: " in rows["Responses"]
    assert "python: " in rows["Tool calls finished"]
    assert rows["Steps by tokens"].startswith("≤ 1: ")
    assert rows["Store errors"] == "0"
    assert rows["Time in the queue, mean"].endswith(" ms")
    seen.run("sessionStorage.clear()")
    seen.driver.refresh()
    seen.wait("#error", "API key is missing or wrong")
    assert seen.texts("#live, #facts, #errors, #doctor") == [""] * 4
    seen.find("#key")[0].send_keys(KEY, Keys.ENTER)
    seen.wait("#facts", "Tool python")


def test_metrics_that_page_dashboard_and_alerts_read_are_exported(page: Page) -> None:
    exported = set(re.findall(r"^# TYPE (\S+)", httpx.get(f"{page.server.url}/metrics").text, re.MULTILINE))
    readers = [*DEPLOY.glob("*dashboard.json"), *DEPLOY.glob("chart/alerts.yml"), FOLDER / "server.js"]
    assert len(readers) == 3
    for reader in readers:
        names = set(re.findall(r"\b(?:vllm:|gptoss_|http_)[a-z0-9_]*[a-z0-9]", reader.read_text()))
        asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names if "spec_decode" not in name}
        assert asked
        assert asked <= exported, reader


def test_a_killed_server_is_reported_and_its_conversation_continues_after_the_restart(page: Page) -> None:
    seen = page.browser
    page.open()
    page.ask("Talk.")
    seen.wait(".answer", "word word")
    page.kill()
    seen.wait(".note", "The connection was lost. Reconnecting")
    page.start()
    seen.wait(".note", "The server that ran this response has ended")
    page.ask("Read.")
    seen.wait(".answer", "Read.")
    seen.driver.refresh()
    seen.wait(".answer", "Read.")
