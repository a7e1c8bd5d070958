"""Schemas that are made to cost: written in bounded time, compiled in bounded time, or refused by keyword."""

from __future__ import annotations

import json
import threading
import time
from functools import cache
from typing import Any

import pytest
import xgrammar

from tests.support.confined_workers import kill_workers
from vllm_gptoss.server.harmony.enforce import compiling
from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError, NotNowError
from vllm_gptoss.server.harmony.enforce.job import Written
from vllm_gptoss.server.harmony.enforce.json_grammar import write
from vllm_gptoss.server.harmony.tokens import CALL, ENDOFTEXT, RETURN, VOCABULARY, encode, token_bytes
from vllm_gptoss.tools.confined import pool
from vllm_gptoss.tools.confined.pool import nursery


def closed(schema: Any, count: int = 1) -> dict[str, Any]:
    names = [f"p{number}" for number in range(count)]
    properties = dict.fromkeys(names, schema)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


TEXT = ('the <b>quick</b> "fox", 日本 \\n | \t{jumps}: ' * 700)[:20_000]
SMALL = closed({"type": "array", "items": {"type": "number"}, "maxItems": 50}, 2)
LENGTHS = [{"type": "string", "maxLength": 100 + number} for number in range(3)]
DEARLY: dict[str, tuple[Any, Any]] = {
    **{f"length {most}": ({"type": "string", "maxLength": most}, TEXT[:most]) for most in (30, 100, 600, 20_000)},
    "exact length": ({"type": "string", "minLength": 64, "maxLength": 64}, TEXT[:64]),
    "least length": ({"type": "string", "minLength": 500}, TEXT[:900]),
    "counted class": ({"type": "string", "pattern": "^[a-z ]{1,180}$"}, "a small text " * 13),
    "counted any": ({"type": "string", "pattern": "^.{1,80}$"}, TEXT[:80].replace("\n", " ")),
    "many patterns": (closed({"type": "string", "pattern": "^[a-z ]{1,99}$"}, 30), {f"p{n}": "abc" for n in range(30)}),
    "wide": ({"type": "string", "pattern": "^(a|b)*a(a|b){8}$"}, "ab" * 300 + "a"),
    "many values": ({"enum": [f"value {number}" for number in range(1000)]}, "value 777"),
    "many items": ({"type": "array", "items": {"type": "string"}, "maxItems": 1000}, ["", "ab"] * 500),
    "many of anything": ({"type": "array", "maxItems": 1000, "minItems": 300}, [[1], {"a": "b"}] * 300),
    "many objects": ({"type": "array", "items": SMALL, "maxItems": 1000}, [{"p0": [1, 2] * 20, "p1": []}] * 20),
    "open": (
        {"type": "object", "properties": {f"n{number}": {"type": "string"} for number in range(5)}},
        {f"{letter}{number}": TEXT[:99] for letter in "nx" for number in range(5)},
    ),
    "hundred members": (closed({"type": "string"}, 100), {f"p{number}": TEXT[:20] for number in range(100)}),
    "begins alike": ({"anyOf": LENGTHS}, TEXT[:100]),
    "variants": ({"anyOf": [closed({"type": "string"}, n + 1) for n in range(40)]}, {"p0": TEXT[:200], "p1": "a"}),
    "anything long": ({"type": "object"}, {"text": TEXT}),
    "anything deep": ({"type": "object"}, {"a": json.loads("[" * 100 + "]" * 100)}),
}


@cache
def _compiler() -> Any:
    vocabulary = [token_bytes(token) for token in range(VOCABULARY)]
    raw, stops = xgrammar.VocabType.RAW, [RETURN, ENDOFTEXT, CALL]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=raw, vocab_size=VOCABULARY, stop_token_ids=stops)
    return xgrammar.GrammarCompiler(info, max_threads=1)


@pytest.mark.alone
@pytest.mark.parametrize("name", DEARLY)
def test_what_is_enforced_is_compiled_soon_and_no_token_waits(name: str) -> None:
    """In the engine every request waits for a token's mask. Counted rules took 1.5 s for each, lengths written out 11 s
    to compile. Measured: 0.03 to 0.7 ms a token, 3 where several strings begin alike; 10 at worst, in these 30."""
    schema, value = DEARLY[name]
    compiler = _compiler()
    compiler.compile_grammar(write("{}", 32)[0])
    began = time.process_time()
    compiled = compiler.compile_grammar(write(json.dumps(schema), 32)[0])
    assert time.process_time() - began < 8
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[RETURN])
    mask = xgrammar.allocate_token_bitmask(1, VOCABULARY)
    times = []
    for token in [*encode(json.dumps(value, ensure_ascii=False)), RETURN]:
        start = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        assert matcher.accept_token(token), f"refused after {len(times)} tokens"
        times.append(time.thread_time() - start)
    assert matcher.is_terminated()
    assert sum(times) / len(times) < 0.012
    assert max(times) < 0.12


def test_the_tools_of_one_request_share_a_budget() -> None:
    room = compiling.Room()
    dear = [closed({"type": "string", "pattern": f"^[a-z ]{{1,{140 + number}}}$"}) for number in range(4)]
    for schema in dear[:3]:
        compiling.grammar_of(schema, room)
    with pytest.raises(NotEnforceableError, match="together"):
        compiling.grammar_of(dear[3], room)
    compiling.grammar_of(closed({"type": "string"}), room)


@pytest.mark.alone
def test_a_new_schema_compiles_only_what_is_new_in_it() -> None:
    """xgrammar caches rules that refer only to each other. Measured: 165 ms for the first schema, then 100; 165 for all
    without the cache."""
    compiler, times = _compiler.__wrapped__(), []
    for name in map(str, range(10)):  # a busy core makes single times a fifth longer
        schema = {**closed({"type": "string"}), "title": name}
        schema["properties"][name] = {"type": "integer"}
        began = time.process_time()
        compiler.compile_grammar(write(json.dumps(schema), 32)[0])
        times.append(time.process_time() - began)
    assert min(times[1:]) < 0.8 * times[0], times


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {}}, "not"),
        ({"const": "\ud800"}, "enum"),
        ({"allOf": [{"patternProperties": {"^a": {}}}, {"properties": {"b": {}}}]}, "patternProperties"),
        ({"allOf": [{"prefixItems": [{}]}, {"items": {"type": "string"}}]}, "prefixItems"),
        ({"$ref": "#"}, "$ref"),
        ({"$ref": "https://example.org/schema"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"type": "any"}, "type"),
        ({"enum": []}, "enum"),
        (False, "schema"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"allOf": [{"anyOf": [{"const": n} for n in range(10)]}] * 3}, "anyOf"),
        ({"allOf": [{"anyOf": [{"const": n} for n in range(10)]}] * 9}, "anyOf"),
        ({"minimum": float("nan")}, "minimum"),
        ({"maximum": 1e300}, "maximum"),
        ({"type": "string", "pattern": "^[a-z ]{1,500}$"}, "schema"),
        ({"type": "string", "pattern": "^.{601}$"}, "pattern"),
        ({"type": "string", "pattern": "^.{1,900}$"}, "pattern"),
        ({"type": "string", "maxLength": 20_001}, "maxLength"),
        ({"type": "string", "maxLength": 601, "pattern": "a"}, "maxLength"),
        ({"type": "string", "minLength": 601, "pattern": "a"}, "minLength"),
        ({"type": "array", "maxItems": 1_001}, "maxItems"),
        ({"type": "array", "minItems": 1_001}, "minItems"),
        ({"enum": list(range(1_001))}, "enum"),
        ({"anyOf": [{"type": "string", "maxLength": 100 + number} for number in range(4)]}, "anyOf"),
        ({"type": "object", "properties": {f"name of {n}{n}": {} for n in range(80)}}, "schema"),
    ],
)
def test_what_cannot_be_enforced_names_its_keyword(schema: Any, keyword: str) -> None:
    with pytest.raises(NotEnforceableError) as found:
        write(json.dumps(schema), 32)
    assert found.value.keyword == keyword


TAGGED = [{"properties": {"mode": {"const": mode}, mode: {"type": "string"}}, "required": [mode]} for mode in "ab"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["mode"], "oneOf": TAGGED},
        {"type": "object", "required": ["mode"], "properties": {"mode": {"type": "string"}}, "oneOf": TAGGED},
        {"type": "object", "required": None, "properties": {"a": {"$ref": "#/$defs/L%3Ci%3E"}, "b": {"$ref": "#T"}}},
        {"anyOf": [{"$anchor": "N", "type": "integer"}, {"type": "array", "items": {"$ref": "#N"}}]},
    ],
)
def test_a_union_by_a_tag_and_every_reference_of_the_schema_have_a_grammar(schema: Any) -> None:
    write(json.dumps({"$defs": {"L<i>": {"$anchor": "T", "type": "integer"}}, **schema}), 32)


def test_the_grammars_of_one_request_share_their_bytes() -> None:
    room = compiling.Room()
    room.take(Written("x" * (compiling.MAX_GRAMMARS - 1)))
    with pytest.raises(NotEnforceableError, match=f"more than {compiling.MAX_GRAMMARS} bytes together"):
        room.take(Written("xx"))
    room.take(Written("x"))  # the refused one has reserved nothing


def test_depth_is_bounded_not_the_stack() -> None:
    schema: Any = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    with pytest.raises(NotEnforceableError, match="nests"):
        write(json.dumps(schema), 32)


async def test_a_worker_writes_what_this_process_would() -> None:
    schema = closed({"type": "string", "pattern": "^a+$"})
    assert (await compiling.prepare(schema)).grammar == write(json.dumps(schema), 32)[0]
    with pytest.raises(NotEnforceableError, match="'not'"):
        await compiling.prepare({"not": {}})


async def test_a_killed_worker_is_no_verdict_on_its_schema() -> None:
    """The kernel kills workers first when memory runs out; afterwards the same schema has its grammar."""
    slow = {f"p{n}": {"type": "string", "pattern": f"^(a|b)*a(a|b){{5}}{n}$"} for n in range(20)}  # 0.3 s to write
    schema = {"type": "object", "properties": slow, "additionalProperties": False}
    await pool().start()
    killing = threading.Event()

    def kill() -> None:
        while not killing.wait(0.001):
            kill_workers(nursery())

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(NotNowError) as found:
            await compiling.prepare(schema)
    finally:
        killing.set()
        thread.join()
    assert found.value.headers == {"Retry-After": "5"}
    assert (await compiling.prepare(schema)).grammar
