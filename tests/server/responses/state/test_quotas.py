"""One API key fills its own quota of the store: its own data goes or is refused, that of others stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop_watch import watched
from tests.support.responses.postgres import ALSO_POSTGRES
from tests.support.responses.server import Start
from tests.support.responses.stores import opened
from tests.support.responses.turns import HELLO
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import LostError, QuotaError, Stored, TakenError, TooLargeError

Opened = Callable[..., Any]


def response(number: int, tenant: str, size: int = 1000, root: str = "") -> Stored:
    identifier = f"resp_{tenant}{number}"
    body = {"id": identifier, "status": "completed", "output": [], "text": "x" * size}
    return Stored(identifier, tenant, body, root=root or identifier)


def item(number: int, size: int = 1000) -> tuple[dict[str, Any], None]:
    return {"id": f"msg_{number}", "type": "message", "content": "x" * size}, None


async def left(store: Store, tenant: str, count: int) -> list[int]:
    return [n for n in range(count) if await store.get(tenant, f"resp_{tenant}{n}")]


async def test_conversations_of_one_key_delete_nothing_of_others(tmp_path: Path) -> None:
    """Six conversations of 10 MB in a store of 4 MiB were accepted, and everybody's responses deleted."""
    async with opened(tmp_path / "store.sqlite", max_bytes=4 << 20) as store:
        for number in range(3):
            await store.save(response(number, "bob"))
        for number in range(2):
            await store.conversations.put("alice", f"conv_{number}", {}, time.time(), [item(number, 1_000_000)])
        with pytest.raises(QuotaError, match=r"store 2097152 bytes \(GPTOSS_RESPONSES_KEY_BYTES\)"):
            await store.conversations.put("alice", "conv_2", {}, time.time(), [item(2, 1_000_000)])
        await store.sweep()
        assert await left(store, "bob", 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "kept"), [({"key_responses": 20}, 19), ({"key_bytes": 22_000}, 19), ({"key_responses": 19}, 19)]
)
async def test_a_keys_least_recently_used_chain_goes_first(tmp_path: Path, options: dict[str, int], kept: int) -> None:
    async with opened(tmp_path / "store.sqlite", **options) as store:
        await store.save(response(0, "bob"))
        await store.save(response(0, "alice", root="chain"))
        for number in range(1, 19):
            await store.save(response(number, "alice"))
        await store.save(response(19, "alice", root="chain"))
        await store.save(response(20, "alice", root="chain"))
        found = await left(store, "alice", 21)
        assert len(found) <= kept
        assert len(found) >= kept - 4
        assert {0, 19, 20} <= set(found), "the chain in use is whole"
        assert await left(store, "bob", 1) == [0]


async def test_a_response_that_is_larger_than_the_quota_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.sqlite", key_bytes=5000) as store:
        await store.save(response(0, "alice", 4500))
        with pytest.raises(TooLargeError, match="5000 may be stored"):
            await store.save(response(1, "alice", 5000))
        assert await left(store, "alice", 1) == [0]


async def test_the_total_takes_from_the_key_that_stores_most(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.sqlite", max_bytes=40_000, key_bytes=30_000) as store:
        for number in range(25):  # of which a background response's text counts when it ends
            begun = response(number, "alice", 0)
            begun.body["status"] = "in_progress"
            await store.save(begun)
            await store.update(response(number, "alice"))
        for number in range(10):
            await store.save(response(number, "bob"))
        for number in range(6):
            await store.save(response(number, "carol"))
        await store.sweep()
        assert await left(store, "bob", 10) == [*range(10)]
        assert await left(store, "carol", 6) == [*range(6)]
        found = await left(store, "alice", 25)
        assert found == [*range(25 - len(found), 25)], "the oldest went"
        assert 15 <= len(found) < 25


async def test_the_total_takes_conversations_where_nothing_else_is_left(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.sqlite", max_bytes=40_000, key_bytes=30_000) as store:
        for number in range(3):
            await store.conversations.put("alice", f"conv_{number}", {}, time.time(), [item(number, 9000)])
        await store.conversations.append("conv_0", [item(9, 10)], "alice")  # used now
        for number in range(10):
            await store.save(response(number, "bob"))
        await store.conversations.put("carol", "conv_carol", {}, time.time(), [item(50, 6000)])
        there = [await store.conversations.get("alice", f"conv_{number}") is not None for number in range(3)]
        assert there == [True, False, True]
        assert await left(store, "bob", 10) == [*range(10)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"key_conversations": 3}, r"This API key may store 3 conversations \(GPTOSS_RESPONSES_KEY_CONVERSATIONS\)"),
        ({"key_items": 3}, r"This API key may store 3 items \(GPTOSS_RESPONSES_KEY_ITEMS\)"),
    ],
)
async def test_what_conversations_would_exceed_is_refused_by_name(
    tmp_path: Path, options: dict[str, int], named: str
) -> None:
    async with opened(tmp_path / "store.sqlite", **options) as store:
        for number in range(3):
            await store.conversations.put("alice", f"conv_{number}", {}, time.time(), [item(number)])
        with pytest.raises(QuotaError, match=named):
            await store.conversations.put("alice", "conv_3", {}, time.time(), [item(3)])
        await store.conversations.put("bob", "conv_4", {}, time.time(), [item(4)])
        assert await store.conversations.delete("alice", "conv_0")
        await store.conversations.put("alice", "conv_3", {}, time.time(), [item(3)])


@ALSO_POSTGRES
def test_a_refusal_is_507_and_names_the_limit(start: Start) -> None:
    server = start(HELLO, config={"key_bytes": 20_000})
    body = {"items": [{"role": "user", "content": "x" * 15_000}]}
    with server.http() as http, server.http("bob") as bob:
        made = http.post("/conversations", json=body).raise_for_status().json()["id"]
        answers = [http.post("/conversations", json=body), http.post(f"/conversations/{made}/items", json=body)]
        for answer in answers:
            assert answer.status_code == 507, answer.text
            assert answer.json()["error"]["code"] == "storage_quota_exceeded"
            assert "may store 20000 bytes (GPTOSS_RESPONSES_KEY_BYTES)" in answer.json()["error"]["message"]
        bob.post("/conversations", json=body).raise_for_status()


async def test_evicting_one_keys_responses_delays_no_other_key(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.sqlite", key_responses=400) as store:
        numbers = iter(range(1 << 30))

        async def took(tenant: str, size: int = 2000) -> float:
            began = time.monotonic()
            await store.save(response(next(numbers), tenant, size))
            return time.monotonic() - began

        async def fill() -> None:
            while True:
                await took("alice", 20_000)

        for _ in range(380):
            await took("alice", 20_000)
        alone = sorted([await took("bob") for _ in range(20)])
        async with watched() as loop:
            filling = [asyncio.create_task(fill()) for _ in range(4)]
            beside = sorted([await took("bob") for _ in range(40)])
        for task in filling:
            task.cancel()
        await asyncio.gather(*filling, return_exceptions=True)
        assert loop.longest < 0.1
        assert beside[20] < alone[10] + 0.1, (alone, beside)


async def test_writes_that_fail_do_not_count(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.sqlite", max_bytes=20_000) as store:
        await store.save(response(0, "alice"))
        await store.sweep()
        for _ in range(20):
            with pytest.raises(TakenError):
                await store.save(response(0, "alice"))
        assert not store.quotas.is_full
        for _ in range(3):
            with pytest.raises(LostError):
                await store.update(response(0, "alice", 9_000))
        assert not store.quotas.is_full
