"""Every event that this server sends is in openai-python's union, and every event of the union is sent or excluded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.responses.events import EVENT_TYPES, check_response, stream, unparsed
from tests.support.responses.scenes import NEVER, SCENES, TERMINALS, Stage, providers, request
from tests.support.responses.server import Start


def test_every_event_is_openais_and_none_is_missing(start: Start) -> None:
    server = start(Stage(), providers=providers())
    seen: set[str] = set()
    with server.http() as http:
        for name in SCENES:
            events = stream(http, request(name))
            assert events[-1]["type"] == TERMINALS.get(name, "response.completed"), (name, events[-1])
            seen |= {event["type"] for event in events}
    missing = {kind for kind in EVENT_TYPES if not kind.startswith(NEVER)} - seen
    assert not missing, "no scene makes these; if the server never sends them, NEVER should give the reason"
    assert not {kind for kind in seen if kind.startswith(NEVER)}


@pytest.mark.parametrize("name", SCENES)
def test_openai_pythons_stream_helper_ends_with_what_is_stored(start: Start, name: str) -> None:
    server = start(Stage(), providers=providers())
    with server.client() as client, client.responses.stream(**request(name)) as helper:
        events = list(helper)
        final: Any = events[-1].response if name in TERMINALS else helper.get_final_response()
    for event in events:
        assert isinstance(event, EVENT_TYPES[event.type])
    with server.http() as http:
        stored = http.get(f"/responses/{final.id}").json()
    check_response(stored)
    assert [unparsed(item.model_dump(exclude_unset=True)) for item in final.output] == stored["output"]
