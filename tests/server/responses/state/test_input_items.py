"""Clients that send the whole conversation with every request: each item is stored once, and gone with its last use."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.responses.postgres import ALSO_POSTGRES
from tests.support.responses.server import Running, Start, create
from tests.support.responses.turns import HELLO
from tests.support.responses.websocket import ask, dial
from vllm_gptoss.server.responses.state.tables import input_items, input_uses, item_index, responses

pytestmark = ALSO_POSTGRES

TURNS = 40


def words(number: int) -> str:
    return f"turn {number} " + "word " * 150


def rows(server: Running, table: sa.Table) -> int:
    async def count() -> int:
        query = sa.select(sa.func.count()).select_from(table)
        return int(await server.endpoint.service.context.store._db.run(lambda db: db.scalar(query)) or 0)  # type: ignore[union-attr]

    return int(server.call(count()))


def stored_bytes(server: Running) -> int:
    def measured(db: sa.Connection) -> int:
        own = db.scalar(sa.select(sa.func.sum(sa.func.length(responses.c.input))))
        items = db.scalar(sa.select(sa.func.sum(sa.func.length(input_items.c.item))))
        return int(own or 0) + int(items or 0)

    return int(server.call(server.endpoint.service.context.store._db.run(measured)))  # type: ignore[union-attr]


@pytest.mark.parametrize("with_ids", [True, False])
def test_an_echoed_history_grows_by_what_is_new(start: Start, with_ids: bool) -> None:
    server = start(*(f"<|channel|>final<|message|>Answer {n}.<|return|>" for n in range(TURNS)))
    history: list[dict[str, Any]] = []
    whole = 0
    with server.http() as http:
        for number in range(TURNS):
            history.append({"role": "user", "content": words(number)})
            made = create(http, input=history)
            whole += sum(len(words(n)) for n in range(number + 1))
            said = made["output"][-1]
            history.append(said if with_ids else {"role": "assistant", "content": said["content"][0]["text"]})
            items = http.get(f"/responses/{made['id']}/input_items", params={"order": "asc", "limit": 100}).json()[
                "data"
            ]
            texts = [item["content"][0]["text"] for item in items]
            expected = [words(n) if k == 0 else f"Answer {n}." for n in range(number + 1) for k in (0, 1)][:-1]
            assert texts == expected
            assert len({item["id"] for item in items}) == len(items)
            assert [item["id"] for item in items[1::2]] == [h["id"] for h in history[1:-1:2]] if with_ids else True
    assert stored_bytes(server) < whole / 8
    assert rows(server, item_index) <= 6 * TURNS


def test_an_item_goes_with_the_last_response_that_used_it(start: Start) -> None:
    server = start(HELLO)
    history = [{"role": "user", "content": words(n)} for n in range(3)]
    with server.http() as http, server.http("bob") as bob:
        first, second = create(http, input=history[:2]), create(http, input=history)
        others = create(bob, input=history)
        assert rows(server, input_items) == 6, "another key's items are its own"
        http.delete(f"/responses/{first['id']}")
        assert rows(server, input_items) == 6
        items = http.get(f"/responses/{second['id']}/input_items").json()["data"]
        assert len(items) == 3
        http.delete(f"/responses/{second['id']}")
        assert rows(server, input_items) == 3
        bob.delete(f"/responses/{others['id']}")
    assert rows(server, input_items) == rows(server, input_uses) == 0


def test_the_size_limit_counts_items_and_frees_them(start: Start) -> None:
    server = start(HELLO, config={"key_bytes": 60_000})
    with server.http() as http:
        made = [create(http, input=[{"role": "user", "content": f"{n} " + "word " * 2000}]) for n in range(10)]
        left = [one["id"] for one in made if http.get(f"/responses/{one['id']}").status_code == 200]
        assert 2 <= len(left) <= 4, "about 13,000 bytes each"
        assert http.get(f"/responses/{made[-1]['id']}").status_code == 200
        assert http.get(f"/responses/{made[0]['id']}").status_code == 404
    assert rows(server, input_items) == len(left)


def test_a_background_response_keeps_its_input(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        body = {"model": "gpt-oss-20b", "input": [{"role": "user", "content": words(1)}] * 3, "background": True}
        made = http.post("/responses", json=body).json()
        with http.stream("GET", f"/responses/{made['id']}?stream=true") as followed:
            followed.read()
        items = http.get(f"/responses/{made['id']}/input_items").json()["data"]
        assert [item["content"][0]["text"] for item in items] == [words(1)] * 3
        create(http, input="go on", previous_response_id=made["id"])
    assert server.prompt().count("turn 1 word") == 3
    assert rows(server, input_items) == 1


def test_a_page_of_input_items_reads_what_it_shows(start: Start) -> None:
    """A chain of responses, and a response of many items, were read completely for `limit=1`."""
    server = start(HELLO)
    statements: list[str] = []

    def count(*arguments: Any) -> None:
        statements.append(f"{arguments[2]} {arguments[3]}")

    with server.http() as http:
        made: dict[str, Any] = {}
        for turn in range(12):
            long = [{"role": "user", "content": words(1000 * turn + n), "id": f"i{turn}_{n}"} for n in range(30)]
            if turn == 6:  # one without output, which its own row has as the first of a chain
                with dial(server) as socket:
                    warmed = ask(socket, input=long, previous_response_id=made["id"], generate=False)
                    made = warmed[-1]["response"]
            else:
                made = create(http, input=long, previous_response_id=made.get("id"))
        path, numbers = f"/responses/{made['id']}/input_items", {}
        for order in ("asc", "desc"):
            seen: list[str] = []
            query: dict[str, Any] = {"order": order, "limit": 100}
            while True:
                page = http.get(path, params=query).raise_for_status().json()
                seen += [item["id"] for item in page["data"]]
                query["after"] = page["last_id"]
                if not page["has_more"]:
                    break
            numbers[order] = seen
        sa.event.listen(sa.Engine, "before_cursor_execute", count)
        try:
            for order, after in (("desc", "i6_3"), ("asc", "i6_3"), ("desc", None), ("asc", None), ("asc", "i6_29")):
                statements.clear()
                some = {"after": after} if after else {}
                (item,) = http.get(path, params={"order": order, "limit": 1, **some}).raise_for_status().json()["data"]
                assert item["id"] == numbers[order][numbers[order].index(after) + 1 if after else 0]
                contents = [text for text in statements if "gptoss_input_items.item" in text]
                assert len(contents) <= 2, "of the turn, and where the turn ends of the next"
                assert sum("gptoss_responses.input" in text for text in statements) <= 2
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", count)
        assert http.get(path, params={"after": "i"}).status_code == 404
    assert numbers["asc"] == numbers["desc"][::-1]
    assert len(numbers["asc"]) == len(set(numbers["asc"])) == 12 * 30 + sum(1 for n in numbers["asc"] if n[0] != "i")
    assert [n for n in numbers["asc"] if n.startswith("i")] == [f"i{t}_{n}" for t in range(12) for n in range(30)]


def test_a_missing_item_is_an_error_that_names_it(start: Start) -> None:
    server = start(HELLO)
    with server.http() as http:
        made = create(http, input=words(0) * 3)
        store = server.endpoint.service.context.store
        assert store is not None

        def lose(db: sa.Connection) -> None:
            db.execute(sa.delete(input_uses))
            db.execute(sa.delete(input_items))

        server.call(store._db.run(lose))
        for path in ("", "/input_items"):
            refused = http.get(f"/responses/{made['id']}{path}")
            assert refused.status_code == 503
            message = "The response store failed: NoResultFound: input items are missing"
            assert refused.json()["error"]["message"] == message
