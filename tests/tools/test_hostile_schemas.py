"""Schemas and arguments that would stop the server: each fails only its own call, within a worker's limits."""

from __future__ import annotations

import asyncio
import json
import resource
from functools import partial
from typing import Any

import pytest

from tests.support.loop_watch import shortest_pause
from vllm_gptoss.tools import arguments
from vllm_gptoss.tools.arguments import argument_problem, schema_text
from vllm_gptoss.tools.confined import pool

PAUSE_S = 0.1


def doubled(depth: int) -> dict[str, Any]:
    """Each definition refers twice to the next."""
    definitions: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    return {"$defs": {**definitions, f"d{depth}": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/d0"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema, "type": "array"}
    return {"properties": {"a": schema}}


SLOW: dict[str, tuple[Any, Any]] = {
    "pattern": ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 40 + "!"}),
    "names": ({"patternProperties": {"^(a+)+$": {}}}, {"a" * 40 + "!": 1}),
    "references": (doubled(30), {"a": "x"}),
    "unique": ({"properties": {"a": {"uniqueItems": True}}}, {"a": [{"n": n} for n in range(20_000)]}),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", SLOW)
async def test_a_schema_that_never_ends_is_an_error(name: str) -> None:
    """Each held the event loop for more than 20 s."""
    schema, value = SLOW[name]
    await pool().start()
    async with asyncio.timeout(90):
        pause, problem = await shortest_pause(lambda: argument_problem(json.dumps(value), schema), PAUSE_S)
    assert "cannot be checked" in str(problem)
    assert pause < PAUSE_S


LARGE: dict[str, Any] = {
    "text": {"description": "x" * 300_000},
    "values": {"enum": list(range(20_000))},
    "names": {"properties": {f"p{n}": {} for n in range(20_000)}},
    "deep": nested(200),
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_schema_that_is_too_large_is_refused_at_once(name: str) -> None:
    assert schema_text(LARGE[name]) is None
    assert "larger than" in str(await argument_problem("{}", LARGE[name]))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 60_000, "nested"),
        ('{"a": ' * 500 + "1" + "}" * 500, "nested"),
        ('{"a": [' + "[]," * 200_000 + "[]]}", "more than 100000 values"),
        (json.dumps({"a": "x" * (1 << 20)}), "longer than"),
        ('{"a": "\\ud800"}', None),
        ("\ud800", "not valid JSON"),
    ],
    ids=["deep", "objects", "wide", "long", "surrogate", "raw surrogate"],
)
async def test_arguments_are_bounded_whatever_the_schema(text: str, said: str | None) -> None:
    for schema in (None, {"properties": {"a": {}}}, {"properties": {"a": {"pattern": "x*"}}}):
        pause, problem = await shortest_pause(partial(argument_problem, text, schema), PAUSE_S)
        assert pause < PAUSE_S
        assert problem is None if said is None else said in str(problem)


NAMES, NUMBERS = [f"n{number}" for number in range(500)], list(range(1, 800))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("items", "values"),
    [
        ({"required": NAMES}, ["{}"] * 5400),
        ({"enum": NUMBERS}, ["0"] * 8000),
        ({"enum": NUMBERS}, ["799"] * 4000),
        ({"properties": {name: {} for name in NAMES[:300]}}, ["{}"] * 5400),
        ({"additionalProperties": {"const": NUMBERS}}, [json.dumps(dict.fromkeys(NAMES[:400], NUMBERS[:7]))]),
    ],
    ids=["required", "enum", "last of an enum", "properties", "const"],
)
async def test_many_values_against_a_long_schema_are_checked_in_a_worker(items: Any, values: list[str]) -> None:
    """16 KiB and 4 KiB of plain keywords held the event loop for 5 to 18 s."""
    schema, text = {"properties": {"a": {"items": items}}}, f'{{"a":[{",".join(values)}]}}'
    assert len(text) <= 16 << 10
    assert len(json.dumps(schema)) <= 4 << 10
    await pool().start()
    async with asyncio.timeout(90):
        pause, _ = await shortest_pause(lambda: argument_problem(text, schema), PAUSE_S)
    assert pause < PAUSE_S


@pytest.mark.parametrize(("values", "cheap"), [(199, True), (200, True), (201, False)])
async def test_what_is_checked_here_is_bounded_by_the_product(values: int, cheap: bool) -> None:
    schema = json.dumps({"properties": {"a": {"items": {"enum": [0] * 92}}}})  # 100 values
    assert arguments._is_cheap(f'{{"a":[{",".join("0" * (values - 2))}]}}'.encode(), schema) is cheap


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}, True),
        ({"properties": {"pattern": {"type": "string"}, "$ref": {"items": {"minimum": 1}}}}, True),
        ({"properties": {"a": {"pattern": "x"}}}, False),
        ({"properties": {"a": {"items": {"$ref": "#"}}}}, False),
        ({"additionalProperties": {"uniqueItems": True}}, False),
        ({"properties": []}, False),
        ({"anyOf": []}, False),
    ],
)
def test_only_keywords_of_known_cost_are_followed_here(schema: Any, plain: bool) -> None:
    assert arguments._is_plain(json.dumps(schema)) is plain


async def test_both_ways_of_checking_say_the_same() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    other = {**schema, "allOf": [{}]}
    for text in ('{"a": 1}', '{"a": "x"}', "{}", "[1]", "no", ""):
        assert await argument_problem(text, schema) == await argument_problem(text, other)


async def test_a_plain_check_costs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise AssertionError("a worker was requested")

    monkeypatch.setattr(arguments, "pool", none)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for _ in range(100):
        assert await argument_problem('{"a": "x"}', schema) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.5
