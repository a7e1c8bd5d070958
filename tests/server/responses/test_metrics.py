"""What the web page, the dashboard and the alerts read is counted where it happens."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from prometheus_client import REGISTRY

from tests.support.responses.server import MODEL, Start, create
from tests.support.responses.turns import HELLO
from tests.support.waiting import soon


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"gptoss_{name}", labels) or 0.0


def test_responses_and_conversations_are_counted_by_their_end(start: Start) -> None:
    server = start(HELLO, HELLO, HELLO)
    before = {status: value("responses_total", status=status) for status in ("completed", "incomplete", "failed")}
    conversations, transactions = value("conversations_total"), value("store_seconds_count")
    with server.http() as http:
        create(http, input="hi")
        create(http, input="hi", max_output_tokens=2)
        server.engine.fail_after = 1
        assert http.post("/responses", json={"model": MODEL, "input": "hi"}).status_code == 500
        http.post("/conversations", json={}).raise_for_status()
    for status, count in before.items():
        assert value("responses_total", status=status) == count + 1
    assert value("conversations_total") == conversations + 1
    assert value("store_seconds_count") >= transactions + 3


def test_background_responses_are_counted_until_they_end(start: Start) -> None:
    server = start("<|channel|>final<|message|>" + "word " * 2000 + "<|return|>", rate=50.0)
    with server.http() as http:
        names = [create(http, input="hi", background=True)["id"] for _ in range(2)]
        soon(lambda: value("background_responses", state="running") == 2)
        assert value("background_responses", state="accepted") == 2
        for name in names:
            http.post(f"/responses/{name}/cancel").raise_for_status()
    soon(lambda: value("background_responses", state="accepted") == 0)
    assert value("background_responses", state="running") == 0


def test_a_failing_store_is_counted(start: Start, tmp_path: Path) -> None:
    server = start(HELLO)
    failed = value("store_errors_total")
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        db.execute("alter table gptoss_conversations rename to gone")
    with server.http() as http:
        assert http.post("/conversations", json={"metadata": {}}).status_code == 503
        assert create(http, model=MODEL, input="hi")["status"] == "completed"
    assert value("store_errors_total") > failed
