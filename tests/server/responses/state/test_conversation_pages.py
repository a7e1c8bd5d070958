"""A long conversation is read in pages, which do not block the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.loop_watch import watched
from tests.support.responses.postgres import ALSO_POSTGRES
from tests.support.responses.server import Running, Start
from tests.support.responses.turns import HELLO
from vllm_gptoss.server.responses.request.items import parse_input

ITEMS = 22_000


def long_conversation(server: Running, items: int) -> str:
    with server.http() as http:
        made: str = http.post("/conversations", json={}).raise_for_status().json()["id"]
    given = parse_input([{"role": "user", "content": f"{number}", "id": f"i{number}"} for number in range(items)])
    store = server.endpoint.service.context.need_store("conversation").conversations

    async def fill() -> None:
        for at in range(0, items, 1000):
            await store.append(made, [(item, None) for item in given[at : at + 1000]])

    server.call(fill())
    return made


def test_a_page_of_a_long_conversation_costs_a_page(start: Start) -> None:
    """22,000 items were all read for `limit=1`, in 1.1 s."""
    server = start(HELLO)
    path = f"/conversations/{long_conversation(server, ITEMS)}/items"

    def ask() -> list[Any]:
        with server.http() as http:
            last = http.get(path, params={"limit": 1}).json()
            behind = http.get(path, params={"limit": 1, "after": last["last_id"]}).json()
            return [*last["data"], *behind["data"], http.get(f"{path}/i9").json()]

    async def pause() -> tuple[float, list[Any]]:
        async with watched() as watch:
            found = await asyncio.to_thread(ask)
        return watch.longest, found

    longest, found = server.call(pause())
    assert [item["id"] for item in found] == [f"i{ITEMS - 1}", f"i{ITEMS - 2}", "i9"]
    assert longest < 0.1


@ALSO_POSTGRES
def test_pages_follow_each_other_in_both_orders(start: Start) -> None:
    server = start(HELLO)
    path = f"/conversations/{long_conversation(server, 5)}/items"
    with server.http() as http:
        for order, names in (("asc", ["i0", "i1", "i2", "i3", "i4"]), ("desc", ["i4", "i3", "i2", "i1", "i0"])):
            seen: list[str] = []
            query: dict[str, Any] = {"order": order, "limit": 2}
            while True:
                page = http.get(path, params=query).raise_for_status().json()
                seen += [item["id"] for item in page["data"]]
                if not page["has_more"]:
                    break
                query["after"] = page["last_id"]
            assert seen == names
        assert http.get(path, params={"after": "nobody"}).status_code == 404
        assert http.get(path, params={"limit": 101}).status_code == 400


@ALSO_POSTGRES
def test_a_key_lists_its_own_conversations_in_pages(start: Start) -> None:
    server = start(HELLO)
    with server.http("bob") as bob, server.http("alice") as alice:
        foreign = bob.post("/conversations", json={}).json()["id"]
        made = [alice.post("/conversations", json={"metadata": {"title": f"{n}"}}).json() for n in range(3)]
        for order, expected in (("desc", made[::-1]), ("asc", made)):
            first = alice.get("/conversations", params={"limit": 2, "order": order}).json()
            query = {"limit": 2, "order": order, "after": first["last_id"]}
            rest = alice.get("/conversations", params=query).json()
            assert (first["data"] + rest["data"], first["has_more"], rest["has_more"]) == (expected, True, False)
        assert [each["id"] for each in bob.get("/conversations").json()["data"]] == [foreign]
        for wrong, status in (
            ({"after": foreign}, 404),
            ({"after": "\0"}, 404),
            ({"limit": 0}, 400),
            ({"limit": 101}, 400),
        ):
            assert alice.get("/conversations", params=wrong).status_code == status
        alice.delete(f"/conversations/{made[0]['id']}").raise_for_status()
        assert [each["id"] for each in alice.get("/conversations").json()["data"]] == [m["id"] for m in made[:0:-1]]
