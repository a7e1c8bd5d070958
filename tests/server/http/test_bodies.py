"""Bodies at their limits, and what several callers may send at once; `tests/e2e` has whole routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from vllm_gptoss.engine.spec import MAX_POSITIONS
from vllm_gptoss.server.http import callers
from vllm_gptoss.server.http.bodies import APART, MAX_DEPTH, Bodies, BodyError, BodyLimits, bound, unless_gone


class Wanted(BaseModel):
    numbers: list[int] = []
    text: str = ""


@pytest.fixture
def http() -> TestClient:
    """A route like vLLM's that allows bodies of at most 1,000 bytes and 100 values."""
    app = FastAPI()

    @app.post("/")
    async def read(wanted: Wanted, raw_request: Request) -> int:
        assert await raw_request.json() == json.loads(await raw_request.body()), "handlers read the body as it was sent"
        return len(wanted.numbers) or len(wanted.text)

    bound(app, BodyLimits(max_bytes=1000, max_values=100))
    return TestClient(app)


def numbers(count: int) -> str:
    """A body of `count` values as they are counted: an object, a colon, a list, and commas."""
    values = ",".join(['"1"'] * (count - 2))
    return f'{{"numbers": [{values}]}}'


@pytest.mark.parametrize(("count", "status"), [(99, 200), (100, 200), (101, 413)])
def test_values_at_their_limit(http: TestClient, count: int, status: int) -> None:
    assert http.post("/", content=numbers(count), headers={"content-type": "application/json"}).status_code == status


@pytest.mark.parametrize("ids", [16 * 97 + 15, 16 * 97 + 16, 16 * 97 + 17])
@pytest.mark.parametrize("separator", [",", ", ", " ,\n\t-"])
async def test_token_ids_at_their_limit(ids: int, separator: str) -> None:
    """Sixteen count as one value, of 100: an object, a colon, a list, and 97 times 16 commas."""
    message, bodies = f'{{"prompt": [{separator.join(["2"] * ids)}]}}'.encode(), Bodies(BodyLimits(max_values=100))
    if ids <= 16 * 97 + 16:
        await bodies.check(message)
        return
    with pytest.raises(BodyError, match="more than 100 values"):
        await bodies.check(message)


async def test_the_longest_prompt_of_token_ids_is_read() -> None:
    """As vLLM's completions take it."""
    message = json.dumps({"prompt": [200_000] * MAX_POSITIONS, "max_tokens": 300}).encode()
    await Bodies(BodyLimits()).check(message)


@pytest.mark.parametrize("value", ["[]", "{}", '""', "true"])
async def test_numbers_do_not_hide_other_values(value: str) -> None:
    message = f"[{','.join([value, '1'] * 100)}]".encode()
    with pytest.raises(BodyError, match="more than 100 values"):
        await Bodies(BodyLimits(max_values=100)).check(message)


@pytest.mark.parametrize(("size", "status"), [(999, 200), (1000, 200), (1001, 413)])
@pytest.mark.parametrize("is_declared", [True, False])
def test_bytes_at_their_limit(http: TestClient, size: int, status: int, is_declared: bool) -> None:
    content = json.dumps({"text": "a" * (size - 12)}).encode()
    assert len(content) == size
    sent: bytes | Iterable[bytes] = content if is_declared else iter([content[:500], content[500:]])
    assert http.post("/", content=sent, headers={"content-type": "application/json"}).status_code == status


def test_only_the_first_wrong_value_is_told(http: TestClient) -> None:
    answer = http.post("/", json={"numbers": ["x"] * 90})
    assert answer.status_code == 422  # FastAPI's own; vLLM's handler makes it 400
    assert [error["loc"] for error in answer.json()["detail"]] == [["body", "numbers", 0]]


@pytest.mark.parametrize(("depth", "is_read"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
async def test_depth_at_its_limit(depth: int, is_read: bool) -> None:
    bodies, message = Bodies(BodyLimits()), b"[" * depth + b"]" * depth
    if is_read:
        await bodies.check(message)
        assert await bodies.parse(message)
        return
    with pytest.raises(BodyError, match="nested more than 128 deep"):
        await bodies.check(message)


@pytest.mark.parametrize("text", ['"a\\\\"', '"\\""', '"\\\\\\""', "\u00e9\\ud83d"])
async def test_marks_inside_of_texts_are_no_values(text: str) -> None:
    """After any escapes, and for every cut of the body."""
    value = text + "[{,:" * 40_000
    await Bodies(BodyLimits(max_values=3)).check(json.dumps([value, value]).encode())


@pytest.mark.parametrize("length", [APART - 2, APART - 1])
async def test_a_large_body_is_decoded_alike(length: int) -> None:
    text = "\u00e9" + "a" * (length - 2)
    assert await Bodies(BodyLimits()).parse(json.dumps(text, ensure_ascii=False).encode()) == text
    with pytest.raises(BodyError, match="is not JSON"):
        await Bodies(BodyLimits()).parse(b'"' + b"a" * length)


def request(key: str, parts: AsyncIterator[bytes], *, are_checked: bool = True) -> Request:
    app = FastAPI()
    callers.set_keys_are_checked(app, are_checked)

    async def receive() -> Any:
        try:
            return {"type": "http.request", "body": await anext(parts), "more_body": True}
        except StopAsyncIteration:
            return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"authorization", f"Bearer {key}".encode())]
    return Request({"type": "http", "app": app, "headers": headers}, receive)


async def parts(*given: bytes) -> AsyncIterator[bytes]:
    for part in given:
        yield part


async def beside(bodies: Bodies, inner: Request, part: bytes) -> AsyncIterator[bytes]:
    """A body in the middle of which another comes."""
    yield part
    await bodies.read(inner)


@pytest.mark.parametrize("are_checked", [True, False])
async def test_what_one_key_sends_leaves_room_for_others(are_checked: bool) -> None:
    bodies = Bodies(BodyLimits(caller_bytes=10, total_bytes=100))

    def from_(key: str, of: AsyncIterator[bytes]) -> Request:
        return request(key, of, are_checked=are_checked)

    await bodies.read(from_("alice", beside(bodies, from_("alice", parts(b"12345")), b"12345")))
    with pytest.raises(BodyError) as refused:
        await bodies.read(from_("alice", beside(bodies, from_("alice", parts(b"123456")), b"12345")))
    assert refused.value.status_code == 429
    other = beside(bodies, from_("bob", parts(b"123456")), b"12345")
    if are_checked:
        await bodies.read(from_("alice", other))
        return
    with pytest.raises(BodyError):  # made-up keys are one caller
        await bodies.read(from_("alice", other))


async def test_in_total_whoever_has_most_is_refused() -> None:
    bodies = Bodies(BodyLimits(total_bytes=10))
    await bodies.read(request("alice", beside(bodies, request("bob", parts(b"123")), b"123456789")))
    with pytest.raises(BodyError):
        await bodies.read(request("alice", beside(bodies, request("bob", parts(b"1234567890")), b"123")))


async def test_what_nobody_waits_for_ends() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await unless_gone(Request({"type": "http"}, receive), work())
    assert ended.is_set()
