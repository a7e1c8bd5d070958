"""Client frameworks, each in a separate process with the dependencies of its release.

A script takes the address, the questions and the tool's answers as JSON on stdin, and prints by scene what its user
gets: texts, tool calls, parsed objects, ids. `check` compares it with the expected results, for both engines.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.places import CACHE, ROOT
from tests.support.responses import npm

NAMES = ("langchain", "litellm", "pydantic_ai", "vercel", "agents")
SCRIPTS = ROOT / "tests" / "server" / "responses"
HOW = "scripts/environment.py test installs it, where there is a way to the registry"

ASK = {
    "read": ["What is the capital of France?"],
    "function": ["Compare the weather in Rome and Oslo."],
    "function_streamed": ["What is the weather in Paris?"],
    "sealed": ["What's the weather in Tokyo?"],
    "mixed": ["Get the weather in Vienna and convert it to Fahrenheit with Python."],
    "shaped": ["Describe Paris as JSON."],
    "python": ["Set x to 20 in Python, then double it.", "Add one to it."],
    "chained": ["What is the capital of France?", "And of Germany?"],
    "conversation": ["My favorite color is teal.", "What is my favorite color?"],
}
WEATHER = {
    "Rome": "28 degrees",
    "Oslo": "9 degrees",
    "Paris": "sunny",
    "Tokyo": "The weather in Tokyo is sunny.",
    "Vienna": "20",
}

FUNCTION = {
    "texts": ["Rome is warmer than Oslo."],
    "calls": [["get_weather", {"city": "Rome"}], ["get_weather", {"city": "Oslo"}]],
    "thoughts": "First Rome.Then Oslo.Rome is warmer.",
}
PYTHON = {"texts": ["x is now 40.", "x + 1 is 41."], "runs": [["x = x * 2\nprint(x)", "40"], ["x + 1", "41"]]}
EXPECTED: dict[str, dict[str, Any]] = {
    "read": {"texts": ["The capital of France is Paris."], "thoughts": "The capital of France is Paris."},
    "function": FUNCTION,
    "function_streamed": {
        "texts": ["It is sunny in Paris."],
        "calls": [["get_weather", {"city": "Paris"}]],
        "thoughts": "I need the weather in Paris. Call get_weather.The tool says it is sunny.",
    },
    "sealed": {
        "texts": ["The weather in Tokyo is sunny."],
        "calls": [["get_weather", {"city": "Tokyo"}]],
        "thoughts": "Look up Tokyo.The tool has answered.",
        "sealed": 2,
    },
    "mixed": {
        "texts": ["It is 68 degrees Fahrenheit in Vienna."],
        "calls": [["get_weather", {"city": "Vienna"}]],
        "thoughts": "Weather first.Convert 20 degrees.68.",
        "runs": [["20 * 9 / 5 + 32", "68.0"]],
    },
    "shaped": {"city": "Paris", "country": "France", "population": 2102650},
    "python": PYTHON,
    "python_streamed": PYTHON,
    "chained": {"texts": ["The capital of France is Paris.", "The capital of Germany is Berlin."]},
    "conversation": {
        "texts": ["Teal is a lovely color!", "Your favorite color is teal."],
        "kept": ["message", "reasoning", "message"] * 2,
    },
    "chat": FUNCTION,
    "chat_streamed": FUNCTION,
    "overflow": dict.fromkeys(
        ("chat", "streamed", "completions", "responses", "messages"), "ContextWindowExceededError"
    ),
}
"""The small model's memorised answers. Of each turn's python calls, the last one's code and what it printed."""

CHAT = {"chat", "chat_streamed", "overflow"}
"""Scenes of the one framework that also uses chat completions, where the server has them."""


def play(name: str, api: str, model: str, folder: Path, *, chat: bool = False, **ask: list[str]) -> dict[str, Any]:
    """Results for the framework's user, by scene. `chat`: whether the server has chat completions, too. Questions in
    `ask` replace those of `ASK`."""
    asked = {"url": api, "model": model, "ask": ASK | ask, "weather": WEATHER, "chat": chat}
    ran = subprocess.run(
        _command(name, folder),
        cwd=folder,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # otherwise it uses the network
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    scenes: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return scenes


def _command(name: str, folder: Path) -> list[str]:
    script = SCRIPTS / "js" / f"{name}.mjs"
    if not script.exists():
        home = CACHE / "clients-py" / name
        if not (home / "digest").exists():
            pytest.skip(f"no {name}: {HOW}")
        return [str(home / "bin" / "python"), str(SCRIPTS / "clients" / f"with_{name}.py")]
    if why := npm.missing():
        pytest.skip(why)
    (folder / "node_modules").symlink_to(npm.PACKAGES)
    (folder / script.name).symlink_to(script)
    return ["node", "--preserve-symlinks", "--preserve-symlinks-main", script.name]


def check(scenes: dict[str, Any], api: str, **other: dict[str, Any]) -> None:
    """Every scene ended as it must; ids and usage are those of the stored responses. `other`: than `EXPECTED`."""
    expected = EXPECTED | other
    assert set(scenes) | CHAT == set(expected), "no scene is left out"
    for name, scene in scenes.items():
        if "runs" in scene:
            scene["runs"] = [[turn[-1][0], turn[-1][1].strip()] for turn in scene["runs"] if turn]
        if "thoughts" in scene:  # some clients have one text of all that was thought in a turn
            scene["thoughts"] = "".join(scene["thoughts"])
        assert {key: scene.get(key) for key in expected[name]} == expected[name], name
    with httpx.Client(base_url=api, headers={"Authorization": "Bearer alice"}) as http:
        read, chained = (
            http.get(f"/responses/{scenes[name]['id']}").raise_for_status().json() for name in ("read", "chained")
        )
    used = read["usage"]
    thought = used["output_tokens_details"]["reasoning_tokens"]
    assert scenes["read"]["usage"] == [used["input_tokens"], used["output_tokens"], thought]
    assert chained["previous_response_id"]
