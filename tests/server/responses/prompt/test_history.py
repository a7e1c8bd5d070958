"""Earlier turns in the prompt, where a turn was cut or its reasoning cannot be decrypted."""

from __future__ import annotations

import base64

import pytest

from tests.support.responses.server import MODEL, Start, create, harmony
from tests.support.responses.turns import CALL, HELLO, WEATHER
from vllm_gptoss.server.responses.state.sealing import new_key

NOTE = {"type": "custom", "name": "note", "description": "Keeps a note."}
CUT_NOTE = ' to=functions.note<|channel|>commentary json<|message|>{"input":"hello there"}<|call|>'


@pytest.mark.parametrize(("said", "tool"), [(CALL, WEATHER), (CUT_NOTE, NOTE)], ids=["function", "custom"])
@pytest.mark.parametrize("echoes", [False, True])
def test_a_call_that_was_cut_does_not_block_the_next_request(start: Start, said: str, tool: dict, echoes: bool) -> None:  # type: ignore[type-arg]
    server = start(said, HELLO)
    with server.http() as http:
        cut = create(http, input="hi", tools=[tool], max_output_tokens=len(harmony(said)) - 4)
        assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")
        question = {"role": "user", "content": "go on"}
        if echoes:
            made = create(http, input=[{"role": "user", "content": "hi"}, *cut["output"], question], tools=[tool])
        else:
            made = create(http, input=[question], previous_response_id=cut["id"], tools=[tool])
    assert made["status"] == "completed"
    assert "to=functions" not in server.prompt().split("go on")[0].split("<|start|>user")[1]


def test_a_cut_call_that_the_client_answered_all_the_same_is_told(start: Start) -> None:
    server = start(CALL, HELLO)
    with server.http() as http:
        cut = create(http, input="hi", tools=[WEATHER], max_output_tokens=len(harmony(CALL)) - 4)
        answer = {"type": "function_call_output", "call_id": cut["output"][-1]["call_id"], "output": "sunny"}
        create(http, input=[answer], previous_response_id=cut["id"], tools=[WEATHER])
    assert "sunny" in server.prompt()


def encoded() -> str:
    return base64.b64encode(new_key()).decode()


def test_keys_can_be_changed_and_reasoning_of_a_retired_one_is_left_out(start: Start) -> None:
    old, new = encoded(), encoded()
    fields = {"store": False, "include": ["reasoning.encrypted_content"]}
    with start(HELLO, config={"secret": old}).http() as http:
        reasoning, message = create(http, input="hi", **fields)["output"]
    reasoning = {**reasoning, "content": None}
    history = [{"role": "user", "content": "hi"}, reasoning, {"role": "user", "content": "go on"}]
    both = start(HELLO, config={"secret": f"{new},{old}"})
    with both.http() as http:
        create(http, input=history, **fields)
        assert "The user greets." in both.prompt()
        sealed_anew = {**create(http, input="hi", **fields)["output"][0], "content": None}
    retired = start(HELLO, config={"secret": new})
    with retired.http() as http:
        create(http, input=history, **fields)
        assert "The user greets." not in retired.prompt()
        create(http, input=[sealed_anew, history[-1]], **fields)
        assert "The user greets." in retired.prompt()
    assert message["content"][0]["text"] == "Hello there!"


def test_a_session_outlives_the_key_of_its_summary(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    old, new = encoded(), encoded()
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "the blue one"},
        {"role": "user", "content": "go on"},
    ]
    with start("<|channel|>final<|message|>It was blue.<|return|>", config={"secret": old}).http() as http:
        body = {"model": MODEL, "input": said[:2]}
        summary = http.post("/responses/compact", json=body).raise_for_status().json()["output"][-1]
    server = start(HELLO, config={"secret": new})
    with server.http() as http:
        create(http, input=[*said[:2], summary, said[2]])
        assert "the blue one" in server.prompt(), "what was summarised is still there"
        assert "can not be read" not in server.prompt()
        create(http, input=[said[0], summary, said[2]])
        assert "can not be read" in server.prompt()
        altered = {**summary, "encrypted_content": summary["encrypted_content"].replace("gptoss2", "gptoss3")}
        assert http.post("/responses", json={"model": MODEL, "input": [altered, said[2]]}).status_code == 400
    assert "which is not on this server's ring" in caplog.text


def test_what_the_stores_own_key_sealed_is_read_after_an_operator_set_another(start: Start) -> None:
    fields = {"store": False, "include": ["reasoning.encrypted_content"]}
    with start(HELLO).http() as http:
        reasoning = {**create(http, input="hi", **fields)["output"][0], "content": None}
    server = start(HELLO, config={"secret": encoded()})
    with server.http() as http:
        create(http, input=[reasoning, {"role": "user", "content": "go on"}], **fields)
    assert "The user greets." in server.prompt()


def test_reasoning_that_no_prompt_shows_takes_no_room_from_the_history(start: Start) -> None:
    """`truncation: auto` counted what rendering leaves out, and refused what fits."""
    server = start(HELLO, max_model_len=400)
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
    thought["content"] = [{"type": "reasoning_text", "text": "word " * 500}]
    items = [
        {"role": "user", "content": "message 0"},
        thought,
        {"role": "assistant", "content": "message 1 " + "word " * 170},
        {"role": "user", "content": "message 2 " + "word " * 170},
    ]
    with server.http() as http:
        body = {"model": MODEL, "input": items, "truncation": "auto", "max_output_tokens": 60}
        assert http.post("/responses", json=body).status_code == 200
    assert "message 2" in server.prompt()
    assert "message 1" not in server.prompt()
