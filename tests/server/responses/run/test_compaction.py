"""Compaction: what it may cost, and histories that are longer than the context window."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.responses.server import MODEL, Start, create, harmony, text_of_prompt
from tests.support.responses.turns import HELLO, WEATHER

SUMMARY = "<|channel|>final<|message|>" + "They spoke at length. " * 10 + "<|return|>"
SHORT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "x"}]
COMPACTS = [{"type": "compaction", "compact_threshold": 20}]
QUESTION = {"role": "user", "content": "my question"}


def test_a_compaction_takes_nothing_from_max_output_tokens(start: Start) -> None:
    server = start(SUMMARY, HELLO)
    with server.http() as http:
        made = create(http, input=SHORT, context_management=COMPACTS, max_output_tokens=len(harmony(HELLO)))
    assert made["status"] == "completed"
    assert made["output"][-1]["content"][0]["text"] == "Hello there!"
    assert made["usage"]["output_tokens"] == len(harmony(SUMMARY)) + len(harmony(HELLO)), "it is paid for"


def test_a_history_beyond_the_window_is_summarised_part_by_part(start: Start) -> None:
    prompts: list[str] = []
    summary = "<|channel|>final<|message|>Summary {}.<|return|>"

    def model(prompt: Sequence[int]) -> list[int]:
        text = text_of_prompt(prompt)
        prompts.append(text)
        return harmony(summary.format(len(prompts)))

    window = 800
    server = start(model, max_model_len=window)
    items = [
        {"role": role, "content": f"{role} {n} " + "word " * 120} for n in range(8) for role in ("user", "assistant")
    ]
    with server.http() as http:
        made = http.post("/responses/compact", json={"model": MODEL, "input": items}).raise_for_status().json()
        create(http, input=[made["output"][-1], {"role": "user", "content": "go on"}])
    parts = server.engine.prompts[:-1]
    assert made["usage"]["input_tokens"] == sum(map(len, parts))
    assert made["usage"]["output_tokens"] == len(parts) * len(harmony(summary.format(1)))
    assert all(len(prompt) < window for prompt in server.engine.prompts)
    for item in items:
        assert any(item["content"][:11] in prompt for prompt in prompts[:-1]), "every message was read"
    assert "Summary 1." in prompts[1], "a part is summarised with the summary of those before it"
    assert f"Summary {len(prompts) - 1}." in prompts[-1]


def test_a_message_beyond_the_window_loses_its_middle_only(start: Start) -> None:
    server = start(SUMMARY, HELLO, max_model_len=800)
    items = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "the beginning " + "word " * 3000 + "the end"},
        {"role": "user", "content": "go on"},
    ]
    with server.http() as http:
        made = create(http, input=items, context_management=COMPACTS)
    assert made["status"] == "completed"
    said = "".join(map(text_of_prompt, server.engine.prompts[:-1]))
    assert "the beginning" in said
    assert "the end" in said


def test_words_of_users_that_do_not_fit_are_left_to_the_summary(start: Start) -> None:
    server = start(SUMMARY, max_model_len=800)
    items = [{"role": "user", "content": f"user {n} " + "word " * (200 if n > 2 else 1)} for n in range(6)]
    with server.http() as http:
        made = create(http, input=items, context_management=COMPACTS)
    assert made["status"] == "completed"
    assert [n for n in range(6) if f"user {n}" in server.prompt()] == [4, 5], "the newest stay"
    assert "They spoke at length." in server.prompt()


EARLIER = [*SHORT[:2], QUESTION]


@pytest.mark.parametrize(
    ("before", "words", "stay", "are_calls_shown"),
    [
        ([], 1, [], False),
        ([QUESTION], 150, ["my question"], False),
        (EARLIER, 150, ["hi", "my question"], False),
        (EARLIER, 1, ["hi", "my question"], True),
    ],
)
def test_calls_beyond_the_window_are_summarised_and_their_question_stays(
    start: Start, before: list[dict[str, Any]], words: int, stay: list[str], are_calls_shown: bool
) -> None:
    server = start(SUMMARY, max_model_len=800)
    items = [*before]
    for n in range(6):
        items.append({"type": "function_call", "call_id": f"c{n}", "name": "get_weather", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{n}", "output": "word " * words})
    with server.http() as http:
        made = create(http, input=items, context_management=COMPACTS, tools=[WEATHER])
    assert made["status"] == "completed"
    assert re.findall(r"<.start.>user<.message.>(.*?)<.end.>", server.prompt()) == stay
    assert "They spoke at length." in server.prompt()
    assert ("get_weather to=" in server.prompt()) is are_calls_shown


def test_a_forced_call_does_not_stop_a_compaction(start: Start) -> None:
    server = start(SUMMARY, HELLO)
    with server.http() as http:
        made = create(http, input=SHORT, context_management=COMPACTS, tools=[WEATHER], tool_choice="required")
    assert made["output"][0]["type"] == "compaction"
