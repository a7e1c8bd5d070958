"""Frameworks against the replay engine, which shows what the model is given of the turns before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.responses import by_heart
from tests.support.responses.frameworks import ASK, NAMES, WEATHER, check, play
from tests.support.responses.server import MODEL, Running, Start

MIXED = {
    "texts": ["42, and 28 degrees."],
    "calls": [["get_weather", {"city": "Rome"}]],
    "thoughts": "First the number.It is 42. Now Rome.Both are known.",
    "runs": [["6 * 7", "42"]],
}


def last_prompt(server: Running, question: str) -> str:
    prompts = [server.prompt(index) for index in range(len(server.engine.prompts))]
    return next(prompt for prompt in reversed(prompts) if question in prompt)


@pytest.mark.parametrize("name", NAMES)
def test_a_framework_loses_nothing_between_turns(start: Start, tmp_path: Path, name: str) -> None:
    tool = by_heart.python()
    server = start(by_heart.by_heart, providers=[tool])
    api = f"{server.url}/v1"
    check(play(name, api, MODEL, tmp_path, mixed=[by_heart.MIXED]), api, mixed=MIXED)
    given = {
        "function": ["First Rome.", '{"city":"Rome"}', WEATHER["Rome"], "Then Oslo.", WEATHER["Oslo"]],
        "function_streamed": ["I need the weather in Paris.", '{"city":"Paris"}', WEATHER["Paris"]],
        "sealed": ["Look up Tokyo.", '{"city":"Tokyo"}', WEATHER["Tokyo"]],
        "mixed": ["First the number.", "6 * 7", ">42<", "It is 42. Now Rome.", '{"city":"Rome"}', WEATHER["Rome"]],
        "python": ["x is now 40."],
    }
    for scene, parts in given.items():
        prompt = last_prompt(server, by_heart.MIXED if scene == "mixed" else ASK[scene][-1])
        places = [prompt.find(part) for part in parts]
        assert -1 not in places, (scene, prompt)
        assert places == sorted(places), (scene, prompt)
    assert last_prompt(server, ASK["chained"][1]).count(ASK["chained"][0]) == 1
    keys = [conversation for conversation, _ in tool.opened]
    assert len(keys) == 6, "two of the scene with both tools, two each of those with python alone"
    assert keys[2] == keys[3] != keys[4] == keys[5], "an echoed call is gone on from in its container"
