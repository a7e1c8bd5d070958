"""The distribution's Chromium, headless, driven by Selenium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.support.waiting import soon

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "no chromium and chromium-driver"
WIDE, NARROW = (1280, 900), (360, 700)

LONG_TASKS = """
window.longest = 0;
new PerformanceObserver(list => {
  for (const each of list.getEntries()) window.longest = Math.max(window.longest, each.duration);
}).observe({type: "longtask", buffered: true});
"""


class Browser:
    """One window. Waits are bounded; `texts` reads folded nodes too."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def find(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """`textContent` of the nodes; empty while the page replaces its nodes."""
        try:
            return [str(node.get_property("textContent")) for node in self.find(selector)]
        except StaleElementReferenceException:
            return []

    def shows(self, selector: str, text: str) -> Callable[[], bool]:
        return lambda: any(text in each for each in self.texts(selector))

    def until(self, what: Callable[[], bool], seconds: float = 60) -> None:
        """`soon`, which leaves most of the processor to the page and its server."""
        soon(what, seconds, pause=0.05)

    def wait(self, selector: str, text: str, seconds: float = 60) -> None:
        try:
            self.until(self.shows(selector, text), seconds)
        except AssertionError:
            pytest.fail(f"{selector} does not show {text!r}; the page: {self.texts('main')}")

    def click(self, text: str, within: str = "body") -> None:
        """The last button of this text."""
        self.click_one(lambda: [b for b in self.find(f"{within} button") if b.get_property("textContent") == text][-1])

    def click_one(self, find: Callable[[], WebElement]) -> None:
        """The node that `find` returns, again if the page replaces it before the click."""

        def is_clicked() -> bool:
            try:
                node = find()
                self.run("arguments[0].scrollIntoView({block: 'center'})", node)
                node.click()
            except StaleElementReferenceException:
                return False
            return True

        self.until(is_clicked)

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def violations(self) -> list[str]:
        """Messages of the Content-Security-Policy, and uncaught errors, since the last call."""
        messages = [str(entry["message"]) for entry in self.driver.get_log("browser")]
        return [each for each in messages if "Content Security Policy" in each or "Uncaught" in each]

    def faults(self, axe: Path) -> list[str]:
        """Serious and critical findings of axe-core in the page as it is."""
        self.run(axe.read_text())
        found = self.driver.execute_async_script("axe.run().then(arguments[0])")
        return [
            f"{each['id']}: {node['html'][:200]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    def save(self, path: Path) -> None:
        self.driver.save_screenshot(str(path))


@contextmanager
def browser() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--lang=en"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": LONG_TASKS})
    driver.set_window_size(*WIDE)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
