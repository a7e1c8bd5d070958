"""The store on a real PostgreSQL: a database that goes away; test_state.py and test_background.py run on it too."""

from __future__ import annotations

import pytest

from tests.support.responses.postgres import Postgres
from tests.support.responses.server import MODEL, Start, create
from tests.support.responses.turns import HELLO

pytestmark = pytest.mark.parametrize("database", ["postgres"], indirect=True)


def test_a_database_that_drops_its_connections_costs_no_request(start: Start, postgres: Postgres) -> None:
    server = start(HELLO)
    with server.http() as http:
        made = create(http, input="hi")
        postgres.sql("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()")
        assert http.get(f"/responses/{made['id']}").json() == made


def test_a_database_that_is_gone_is_named_and_missed_only_while_it_is(start: Start, postgres: Postgres) -> None:
    server = start(HELLO)
    with server.http() as http:
        made = create(http, input="hi")
        postgres.stop()
        try:
            refused = http.get(f"/responses/{made['id']}")
            unstored = http.post("/responses", json={"model": MODEL, "input": "hi", "store": False})
        finally:
            postgres.start()
        assert refused.status_code == 503
        assert "response store failed" in refused.json()["error"]["message"]
        assert unstored.json()["status"] == "completed"
        assert http.get(f"/responses/{made['id']}").json() == made
