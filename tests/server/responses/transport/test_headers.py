"""Headers: the id of every request, the caller, and the headers of routers in front of vLLM."""

from __future__ import annotations

import httpx
import pytest

from tests.support.responses.events import stream
from tests.support.responses.server import MODEL, Start, create
from tests.support.responses.turns import HELLO


def test_every_answer_has_a_request_id(start: Start) -> None:
    server = start(HELLO)
    seen = set()
    with server.http() as http:
        seen.add(http.post("/responses", json={"model": MODEL, "input": "hi"}).headers["x-request-id"])
        seen.add(http.post("/responses", json={"model": "nobody", "input": "hi"}).headers["x-request-id"])
        with http.stream("POST", "/responses", json={"model": MODEL, "input": "hi", "stream": True}) as streamed:
            seen.add(streamed.headers["x-request-id"])
            streamed.read()
        seen.add(http.get("/conversations/conv_0").headers["x-request-id"])
    assert len(seen) == 4
    with server.client() as client:
        assert client.responses.create(model=MODEL, input="hi")._request_id


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer "])
def test_the_case_of_bearer_makes_no_other_tenant(start: Start, scheme: str) -> None:
    server = start(HELLO)
    with server.http() as http, httpx.Client(base_url=f"{server.url}/v1") as other:
        made = create(http, input="hi")
        found = other.get(f"/responses/{made['id']}", headers={"Authorization": f"{scheme} alice"})
        assert found.status_code == 200
        assert other.get(f"/responses/{made['id']}", headers={"Authorization": "alice"}).status_code == 200
        assert other.get(f"/responses/{made['id']}", headers={"Authorization": "Basic alice"}).status_code == 404


def test_what_routers_say_reaches_the_engine(start: Start) -> None:
    server = start(HELLO)
    headers = {"X-Vllm-Priority": "-3", "X-Session-ID": "s1", "X-data-parallel-rank": "2"}
    with server.http() as http:
        http.headers.update(headers)
        create(http, input="hi", priority=5)
        stream(http, {"model": MODEL, "input": "hi", "session_id": "mine"})
        http.headers.update({"X-Vllm-Priority": "high", "X-data-parallel-rank": "all"})
        create(http, input="hi", priority=5)
        http.headers.update({"X-Vllm-Priority": "9" * 19, "X-data-parallel-rank": "-" + "9" * 5000})
        create(http, input="hi", priority=5)
    first, second, third, fourth = server.engine.samplings
    assert (first.priority, first.session_id, first.data_parallel_rank) == (-3, "s1", 2)
    assert (second.priority, second.session_id) == (-3, "mine"), "as vLLM: the header's priority, the body's session"
    assert (third.priority, third.data_parallel_rank) == (5, None), "as vLLM: what is no number is ignored"
    assert (fourth.priority, fourth.data_parallel_rank) == (5, None), "nor what no message to the engine can hold"


def test_the_operators_max_new_tokens_counts(start: Start) -> None:
    limited = start(HELLO, max_output_tokens=3)
    usual = start(HELLO, defaults={"max_tokens": 4})
    with limited.http() as http, usual.http() as other:
        assert create(http, input="hi")["usage"]["output_tokens"] == 3
        assert create(http, input="hi", max_output_tokens=100)["usage"]["output_tokens"] == 3
        assert create(other, input="hi")["usage"]["output_tokens"] == 4
        assert create(other, input="hi", max_output_tokens=100)["status"] == "completed"
