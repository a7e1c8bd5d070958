"""Random schemas and instances: our grammar accepts what `jsonschema` accepts and refuses what it refuses.

A failure prints seed, schema and text.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
import xgrammar
from jsonschema import Draft202012Validator

from tests.support.scale import count
from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.json_grammar import write

PAIRS = count(10_000, 400)
PER_SCHEMA = 8
NAMES = ("a", "b", "key", "x_1", "x_2", "long name", 'q"')
TEXTS = ("", "a", "ab", "abc", "http://a.b", "main.py", "x_1", 'say "hi"', "tab\t", "ü", "日本", "a|b", "12")
PATTERNS = ("^https?://", r"\.py$", "^[a-c]+$", "b", "^x_", r"^\d{1,2}$", "^(a|ab)c?$", "[^a]", "^$|^a")


class Writer:
    """Schemas and instances from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def schema(self, depth: int = 0) -> Any:
        kinds = [self.string, self.number, self.number, self.constant, self.plain]
        if depth < 3:
            kinds += [self.object, self.object, self.array, self.union, self.both, self.reference]
        return self.random.choice(kinds)(depth)

    def plain(self, depth: int) -> Any:
        return self.random.choice([{"type": "boolean"}, {"type": "null"}, {}, True, {"type": ["string", "null"]}])

    def string(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "string"}
        if self.chance(0.4):
            schema["pattern"] = self.random.choice(PATTERNS)
        if self.chance(0.3):
            schema["minLength"] = self.random.randrange(3)
        if self.chance(0.3):
            schema["maxLength"] = self.random.randrange(1, 6)
        if self.chance(0.25):  # beyond a block of characters
            least = self.random.choice([0, 1, 5, 16, 31, 32, 33, 40, 64])
            schema = {"type": "string", "minLength": least}
            if self.chance(0.8):
                schema["maxLength"] = least + self.random.choice([0, 1, 15, 16, 17, 31, 32, 33, 60])
        return schema

    def number(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": self.random.choice(["integer", "number"])}
        limits = (-120, -7, -1.5, -1, 0, 0.05, 0.5, 1, 3, 9.75, 10, 99, 1234)
        for low in self.random.sample(["minimum", "exclusiveMinimum"], self.random.randrange(2)):
            schema[low] = self.random.choice(limits)
        for high in self.random.sample(["maximum", "exclusiveMaximum"], self.random.randrange(2)):
            schema[high] = self.random.choice(limits)
        return schema

    def constant(self, depth: int) -> Any:
        values = [self.value(1) for _ in range(self.random.randrange(1, 4))]
        return {"const": values[0]} if self.chance(0.3) else {"enum": values}

    def object(self, depth: int) -> Any:
        names = self.random.sample(NAMES, self.random.randrange(len(NAMES) + 1))
        schema: dict[str, Any] = {"type": "object", "properties": {n: self.schema(depth + 1) for n in names}}
        if self.chance(0.6):
            schema["required"] = self.random.sample(NAMES, self.random.randrange(4))
        if self.chance(0.5):
            schema["additionalProperties"] = False if self.chance(0.6) else self.schema(depth + 2)
        if self.chance(0.2):
            schema["patternProperties"] = {self.random.choice(["^x_", "y$"]): self.schema(depth + 2)}
        if self.chance(0.1):
            schema["propertyNames"] = {"pattern": self.random.choice(["^[a-z]", "_"])}
        if self.chance(0.1):
            schema["minProperties"] = 1
        if self.chance(0.1):
            del schema["type"]
        return schema

    def array(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "array"}
        if self.chance(0.7):
            schema["items"] = False if self.chance(0.1) else self.schema(depth + 1)
        if self.chance(0.3):
            schema["prefixItems"] = [self.schema(depth + 1) for _ in range(self.random.randrange(1, 3))]
        if self.chance(0.3):
            schema["minItems"] = self.random.randrange(5)
        if self.chance(0.3):
            schema["maxItems"] = self.random.randrange(6)
        return schema

    def union(self, depth: int) -> Any:
        key = "anyOf" if self.chance(0.7) else "oneOf"
        return {key: [self.schema(depth + 1) for _ in range(self.random.randrange(1, 4))]}

    def both(self, depth: int) -> Any:
        return {"allOf": [self.schema(depth + 1) for _ in range(2)]}

    def reference(self, depth: int) -> Any:
        return {"$ref": "#/$defs/shared"}

    def root(self) -> Any:
        schema = self.schema()
        if not isinstance(schema, dict):
            schema = {"allOf": [schema]}
        shared = {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"$ref": "#/$defs/shared"}, {"type": "null"}]}},
            "required": ["a"],
        }
        return {**schema, "$defs": {"shared": shared}}

    # Instances

    def value(self, depth: int = 0) -> Any:
        kind = self.random.randrange(9 if depth < 3 else 6)
        if kind < 2:
            return self.random.choice(TEXTS)
        if kind == 2:
            return self.random.choice([0, 1, -1, 3, 7, 10, 99, 100, 1234, -120, 12345])
        if kind == 3:
            return self.random.choice([0.5, -1.5, 0.05, 9.75, 9.7, 0.51, 2.25, -0.25, 99.5])
        if kind < 6:
            return self.random.choice([None, True, False])
        if kind == 6:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        return {n: self.value(depth + 1) for n in self.random.sample(NAMES, self.random.randrange(5))}

    def near(self, schema: Any, root: Any, depth: int = 0) -> Any:
        """A value that the schema may well allow."""
        if not isinstance(schema, dict) or depth > 5 or self.chance(0.07):
            return self.value(2)
        if "$ref" in schema:
            return self.near(root["$defs"]["shared"], root, depth + 1)
        if "enum" in schema or "const" in schema:
            return self.random.choice(schema.get("enum") or [schema["const"]])
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self.near(self.random.choice(schema[key]), root, depth + 1)
        kind = schema.get("type")
        if kind == "string" and schema.get("minLength", 0) + schema.get("maxLength", 0) > 5:
            around = self.random.choice([schema.get("minLength", 0), schema.get("maxLength", 90)])
            size = max(0, around + self.random.choice([-2, -1, 0, 0, 1, 2]))
            return "".join(self.random.choice('ab "\\\n<|>ü日😀/') for _ in range(size))
        if kind == "array":
            parts = list(schema.get("prefixItems", ()))
            parts += [schema.get("items", True)] * self.random.randrange(6)
            return [self.near(part, root, depth + 1) for part in parts]
        if kind == "object" or "properties" in schema:
            properties = schema.get("properties", {})
            names = [n for n in properties if n in schema.get("required", ()) or self.chance(0.5)]
            names += [n for n in schema.get("required", ()) if n not in names and self.chance(0.9)]
            names += self.random.sample(NAMES, 1) if self.chance(0.3) else []
            return {n: self.near(properties.get(n, True), root, depth + 1) for n in names}
        return self.value(2)

    def spelled(self, value: Any) -> str:
        """As JSON, properties in any order, with or without blanks."""
        return json.dumps(
            self.shuffled(value), ensure_ascii=False, separators=self.random.choice([(",", ":"), (", ", ": ")])
        )

    def shuffled(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.shuffled(entry) for entry in value]
        if isinstance(value, dict):
            items = list(value.items())
            self.random.shuffle(items)
            return {key: self.shuffled(entry) for key, entry in items}
        return value


BYTES = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)] + [b""],
    vocab_type=xgrammar.VocabType.RAW,
    vocab_size=257,
    stop_token_ids=[256],
)


class Held:
    """Checks which texts a grammar accepts, with one token per byte."""

    def __init__(self, schema: Any) -> None:
        compiler = xgrammar.GrammarCompiler(BYTES, max_threads=1, cache_enabled=False)
        self._grammar = compiler.compile_grammar(write(json.dumps(schema), 32)[0])

    def __contains__(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._grammar)
        return bool(matcher.accept_string(text.encode()) and matcher.accept_token(256))


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]},
            ['{"a":1}', '{"b":1,"a":2}'],
            ["{}", '{"b":1}'],
        ),
        ({"type": "string", "pattern": "^b+$"}, ['"b"', '"bb"'], ['""', '"a"', "b"]),
        ({"type": "string", "pattern": "^[^a]$"}, ['" "', r'"\u001f"'], ['"a"', r'"\u0020"']),
        ({"type": "string", "minLength": 2}, ['"ab"', r'"\n\u0041"'], ['"a"']),
        ({"type": "integer"}, ["1", "-20"], ["1.5", '"1"']),
        ({"const": "\ue000"}, ['"\ue000"'], ['""', '"a"']),
    ],
    ids=["required", "pattern", "escapes", "least length", "integer", "private use"],
)
def test_a_keyword_admits_its_values_and_no_other(schema: Any, allowed: list[str], refused: list[str]) -> None:
    held = Held(schema)
    assert [text for text in (*allowed, *refused) if text in held] == allowed


@pytest.mark.soak
def test_the_grammar_is_the_schema() -> None:
    seen: Counter[str] = Counter()
    seed = 0
    while seen["allowed"] + seen["refused"] < PAIRS:
        seed += 1
        writer = Writer(seed)
        schema = writer.root()
        validator = Draft202012Validator(schema)
        try:
            held = Held(schema)
        except NotEnforceableError as error:
            seen[f"not enforceable: {error.keyword}"] += 1
            continue
        for number in range(PER_SCHEMA):
            value = writer.near(schema, schema) if number % 4 else writer.value()
            text, wanted = writer.spelled(value), validator.is_valid(value)
            assert (text in held) == wanted, f"seed {seed}: jsonschema says {wanted}: {json.dumps(schema)} {text}"
            seen["allowed" if wanted else "refused"] += 1
    print(dict(seen))
    assert min(seen["allowed"], seen["refused"]) > PAIRS / 5, seen
    assert sum(n for key, n in seen.items() if key.startswith("not")) < seed / 2, seen
