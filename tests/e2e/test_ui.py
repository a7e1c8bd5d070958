"""The web page in a real browser: a conversation with python, hostile answers, a reload in the middle of a stream."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from demo.server import Server
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import Script, running
from tests.support.waiting import soon
from vllm_gptoss.server.responses.options import ResponsesOptions

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromium-driver")

HOSTILE = """
<script>document.title = 'run'</script><img src=x onerror="document.title = 'run'"><svg onload="document.title='run'">

[a](javascript:document.title='run') [b](data:text/html,<script>1</script>) ![c](http://127.0.0.1:9/x.png)
[d](https://example.com/) `a\u202eb`

```html
<iframe srcdoc="<script>parent.document.title='run'</script>"></iframe>
```

| x | y |
|---|---|
| 1 | **2** |
"""


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


def texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    """`textContent`, which a folded node has too; empty while the page replaces its nodes."""
    try:
        return [str(node.get_property("textContent")) for node in browser.find_elements(By.CSS_SELECTOR, selector)]
    except StaleElementReferenceException:
        return []


def shows(browser: webdriver.Chrome, selector: str, text: str) -> Callable[[], bool]:
    return lambda: any(text in each for each in texts(browser, selector))


def ask(browser: webdriver.Chrome, text: str) -> None:
    """With the keyboard alone: the message has the focus when the page opens."""
    soon(lambda: bool(texts(browser, "#tools legend")))
    browser.switch_to.active_element.send_keys(text, Keys.ENTER)


def violations(browser: webdriver.Chrome) -> list[Any]:
    return [entry for entry in browser.get_log("browser") if "Content Security Policy" in entry["message"]]


@pytest.mark.namespaces
@pytest.mark.vllm
@pytest.mark.serve
def test_a_conversation_with_python_and_a_plot_is_shown_and_kept(browser: webdriver.Chrome, served: Server) -> None:
    browser.get(f"{served.url}/")
    soon(shows(browser, "#tools", "Python"))
    ask(browser, "Plot the square numbers.")
    soon(shows(browser, ".answer", "I plotted the squares and saved squares.png."), 180)
    soon(shows(browser, ".note", "tokens/s"))
    assert shows(browser, ".reasoning summary", "Reasoning (")()
    assert shows(browser, ".tool code", "plt.plot")()
    image = browser.find_element(By.CSS_SELECTOR, ".tool img")
    assert int(str(image.get_property("naturalWidth"))) > 100
    assert texts(browser, "button.file") == ["Download squares.png"]
    browser.refresh()
    soon(shows(browser, ".answer", "I plotted the squares"))
    assert texts(browser, ".user") == ["Plot the square numbers."]
    assert shows(browser, "nav li", "Plot the square numbers.")()
    assert violations(browser) == []
    browser.get(f"{served.url}/ui/server")
    soon(shows(browser, "#facts", "Tool python"))
    soon(shows(browser, "#live", "KV cache in use"))


def test_a_hostile_answer_runs_nothing(browser: webdriver.Chrome, tmp_path: Path) -> None:
    script = Script(f"<|channel|>final<|message|>{HOSTILE}<|return|>")
    with running(ReplayEngine(script), ResponsesOptions(store=str(tmp_path / "s.sqlite"), ui=True)) as server:
        browser.get(f"{server.url}/ui/")
        ask(browser, "<b>hi</b>")
        soon(shows(browser, ".note", "tokens in"))
        assert texts(browser, ".user") == ["<b>hi</b>"]
        assert browser.title == "gpt-oss"
        assert browser.find_elements(By.CSS_SELECTOR, ".turn :is(script, img, svg, iframe, b)") == []
        links = browser.find_elements(By.CSS_SELECTOR, ".answer a")
        assert {str(link.get_property("protocol")) for link in links} == {"http:", "https:"}
        assert shows(browser, ".answer code", "a[U+202E]b")()
        assert texts(browser, ".answer td strong") == ["2"]
        assert violations(browser) == []


def test_a_reload_continues_the_stream(browser: webdriver.Chrome, tmp_path: Path) -> None:
    words = " ".join(f"w{number}" for number in range(400))
    script = Script(f"<|channel|>final<|message|>{words}<|return|>")
    options = ResponsesOptions(store=str(tmp_path / "s.sqlite"), ui=True)
    with running(ReplayEngine(script, rate=100.0), options) as server:
        browser.get(f"{server.url}/ui/")
        ask(browser, "count")
        soon(shows(browser, ".answer", "w5"))
        browser.refresh()
        soon(shows(browser, ".answer", "w5"))
        assert not shows(browser, ".answer", "w399")()
        soon(shows(browser, ".answer", "w399"))
        assert [each.strip() for each in texts(browser, ".answer")] == [words]
        assert texts(browser, ".user") == ["count"]
        soon(shows(browser, ".turn .buttons", "Regenerate"))
        assert server.engine.running == 0


def test_stop_ends_the_answer_and_deleting_removes_the_conversation(browser: webdriver.Chrome, tmp_path: Path) -> None:
    script = Script("<|channel|>final<|message|>" + "word " * 4000 + "<|return|>")
    options = ResponsesOptions(store=str(tmp_path / "s.sqlite"), ui=True)
    with running(ReplayEngine(script, rate=50.0), options) as server:
        browser.get(f"{server.url}/ui/")
        ask(browser, "talk")
        soon(shows(browser, ".answer", "word word"))
        browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        soon(shows(browser, ".note", "cancelled"))
        soon(lambda: server.engine.running == 0)
        soon(shows(browser, "nav li", "talk"))
        browser.find_element(By.CSS_SELECTOR, "nav li button.small").click()
        soon(lambda: texts(browser, "nav li") == [])
        assert httpx.get(f"{server.url}/v1/conversations").json()["data"] == []
