"""A tool call's arguments against the tool's schema, both untrusted.

A schema of plain keywords is followed here where it and the arguments have few values: each of the arguments may be
compared with each of the schema. Any other, with patterns, references or combinations, is followed in a confined
worker, which a schema may cost but nothing else: `^(a+)+$` against thirty letters takes minutes, thirty doubled
references a billion steps.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from vllm_gptoss.tools.confined import BusyError, ConfinedError, Limit, pool
from vllm_gptoss.tools.confined.jobs import job
from vllm_gptoss.tools.confined.json_tree import json_problem, nodes

logger = logging.getLogger(__name__)

MAX_ARGUMENTS = 1 << 20
MAX_SCHEMA = 256 << 10
MAX_SCHEMA_NODES = 10_000
_MAX_DEPTH = 64
"""Characters of arguments and of a schema as JSON, values in a schema, and how deep they may lie."""

LIMIT = Limit(seconds=10.0, cpu_s=2, memory=256 << 20, answer=64 << 10)
_PLAIN_ARGUMENTS, _PLAIN_SCHEMA = 16 << 10, 4 << 10
_PLAIN_CHECKS = 20_000
"""Values of the arguments times those of the schema: 5,400 objects of which each lacks 590 names took 17.8 s."""
_MAX_FAULTS = 64
"""Faults among which the best is looked for. Each costs as much as ten checks."""
_PLAIN = {
    *("$schema", "additionalProperties", "const", "default", "deprecated", "description", "enum"),
    *("example", "examples", "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength"),
    *("maximum", "minItems", "minLength", "minimum", "multipleOf", "nullable", "properties", "required", "strict"),
    *("title", "type"),
}
"""Keywords with a cost of at most the product of schema and arguments."""


@dataclass
class ArgumentsVerdict:
    """`problem` is for the model, `note` for the log: why a schema is not followed."""

    problem: str = ""
    note: str = ""


async def argument_problem(arguments: str, schema: Mapping[str, Any] | None) -> str | None:
    """Describes for the model why `arguments` do not meet `schema`, so that it can call again; None if they do."""
    if len(arguments) > MAX_ARGUMENTS:
        return f"they are longer than {MAX_ARGUMENTS} characters."
    text = schema_text(schema) if schema else ""
    if text is None:
        return f"its schema is larger than {MAX_SCHEMA} characters or {MAX_SCHEMA_NODES} values, so nothing fits it."
    payload = arguments.encode("utf-8", "surrogatepass")
    if _is_cheap(payload, text):
        verdict = judged(payload, text)
    else:
        try:
            verdict = await pool().run(judged, payload, LIMIT, schema=text)
        except (ConfinedError, BusyError) as error:
            return f"they cannot be checked against its schema: {error}."
    if verdict.note:
        logger.warning("%s", verdict.note)
    return verdict.problem or None


def schema_text(schema: Mapping[str, Any]) -> str | None:
    """`schema` as JSON, or None where it is too large. Stops counting where it is."""
    nodes = 0
    waiting: list[Iterator[Any]] = [iter((schema,))]
    while waiting:
        value = next(waiting[-1], waiting)
        if value is waiting:
            waiting.pop()
            continue
        nodes += 1
        if nodes > MAX_SCHEMA_NODES or len(waiting) > _MAX_DEPTH:
            return None
        if isinstance(value, Mapping):
            waiting.append(iter(value.values()))
        elif isinstance(value, (list, tuple)):
            waiting.append(iter(value))
    text = json.dumps(schema, sort_keys=True)
    return text if len(text) <= MAX_SCHEMA else None


def _is_cheap(arguments: bytes, schema: str) -> bool:
    """Whether the arguments can be checked in a few milliseconds."""
    if len(arguments) > _PLAIN_ARGUMENTS or len(schema) > _PLAIN_SCHEMA or not _is_plain(schema):
        return False
    return nodes(arguments) * nodes(schema.encode()) <= _PLAIN_CHECKS


@functools.lru_cache(maxsize=256)
def _is_plain(text: str) -> bool:
    """Whether this schema has only keywords of known cost."""
    return not text or _plain(json.loads(text))


def _plain(schema: object) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or not _PLAIN.issuperset(schema):
        return False
    properties = schema.get("properties", {})
    inner = [schema.get("items", True), schema.get("additionalProperties", True)]
    return isinstance(properties, dict) and all(map(_plain, [*properties.values(), *inner]))


@job
def judged(payload: bytes, schema: str) -> ArgumentsVerdict:
    """The problems of the arguments `payload` under `schema`, a schema in JSON, or empty for no schema."""
    if problem := json_problem(payload):
        return ArgumentsVerdict(f"they cannot be read: {problem}.")
    arguments = payload.decode("utf-8", "surrogatepass")
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        return ArgumentsVerdict(f"they are not valid JSON ({error}). Write one JSON object.")
    if not isinstance(value, dict):
        return ArgumentsVerdict(f"they must be a JSON object, not {type(value).__name__}.")
    validator, note = _validator(schema) if schema else (None, "")
    if validator is None:
        return ArgumentsVerdict("", note)
    try:
        found = best_match(itertools.islice(validator.iter_errors(value), _MAX_FAULTS))
    except Exception as error:  # an unresolved reference, an endless one, a pattern that is none
        name = "" if isinstance(error, Unresolvable) else f"{type(error).__name__}: "
        return ArgumentsVerdict(
            "", f"a tool's schema cannot be followed, so its arguments go unchecked: {name}{_cut(str(error))}"
        )
    if found is None:
        return ArgumentsVerdict()
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in found.absolute_path).lstrip(".")
    place = f"`{_cut(where, 200)}`: " if where else ""
    return ArgumentsVerdict(f"{place}{_cut(found.message)}.{_expected(validator.schema)}")


def _cut(message: str, limit: int = 500) -> str:
    return message if len(message) <= limit else message[:limit] + "…"


def _expected(schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return " It takes no arguments." if properties == {} else ""
    required = schema.get("required") or ()
    names = (f"{name}{'' if name in required else '?'}" for name in properties)
    return f" Expected arguments: {_cut(', '.join(names), 2000)}."


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> tuple[Any, str]:
    """A validator that fetches nothing: the registry has no retrieval, so a remote `$ref` stays unresolved."""
    parsed = json.loads(schema)
    try:
        kind = validator_for(parsed, default=Draft202012Validator)
        kind.check_schema(parsed)
    except SchemaError as error:
        return None, f"a tool's schema is not valid, so its arguments go unchecked: {_cut(error.message)}"
    except Exception as error:  # `$schema` a list, `$ref` a number: the library does not expect them
        return None, f"a tool's schema is not valid, so its arguments go unchecked: {type(error).__name__}"
    return kind(parsed, registry=Registry()), ""


def warm() -> None:
    judged(
        b'{"a": "b"}',
        '{"type": "object", "properties": {"a": {"pattern": "c", "$ref": "#/$defs/a"}}, "$defs": {"a": {}}}',
    )
    for draft in ("draft-03", "draft-04", "draft-06", "draft-07"):
        _validator(json.dumps({"$schema": f"http://json-schema.org/{draft}/schema#", "type": "object"}))
    _validator(json.dumps({"$schema": "https://json-schema.org/draft/2019-09/schema", "type": "object"}))
    _validator.cache_clear()
