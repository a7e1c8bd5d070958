"""JSON of one schema as an EBNF grammar.

Objects take their properties in any order. With up to `FREE` properties each comes once. With more, optional ones may
repeat; with more than `FREE` required ones, these come in the schema's order. Numbers with bounds are written without
an exponent, strings with a pattern or a length without needless escapes.

Only the blanks of `ws` are counted, which is cheap for so few. xgrammar 0.2.8 matches a counted rule up to ten thousand
times slower than the same rule written out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from vllm_gptoss.server.harmony.enforce import containers, numbers, strings
from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.pattern import automaton_of
from vllm_gptoss.server.harmony.enforce.rules import Rules
from vllm_gptoss.server.harmony.enforce.schema import TYPES, Alternatives

MAX_DEPTH, MAX_VALUES = 64, 1_000
"""Limits: levels of nested values, and values of an enum."""

COMMON = r"""
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws ( pair ( ws "," ws pair )* ws )? "}"
pair ::= string ws ":" ws value
array ::= "[" ws ( value ( ws "," ws value )* ws )? "]"
number ::= %s
integer ::= %s
string ::= "\"" s0
s0 ::= "\"" | "<" s1 | "\\" escaped s0 | [^"\\<\x00-\x1f] s0
s1 ::= "\"" | "<" s1 | "|" s2 | "\\" escaped s0 | [^"\\<|\x00-\x1f] s0
s2 ::= "\"" | "<" s1 | [a-z0-9_] s2 | "|" s3 | "\\" escaped s0 | [^"\\<|a-z0-9_\x00-\x1f] s0
s3 ::= "\"" | "<" s1 | "\\" escaped s0 | [^"\\<>\x00-\x1f] s0
escaped ::= ["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]
ws ::= [ \t\n\r]{0,%d}
"""
"""Any JSON. No string spells a control token: after `<|` and a name, `|>` cannot come (`\u003c|` can be written)."""


def any_object(whitespace: int) -> str:
    """Any JSON object; at most `whitespace` blanks in a row."""
    return "root ::= object\n" + COMMON % (numbers.NUMBER, numbers.INTEGER, whitespace)


def write(schema: str, whitespace: int) -> tuple[str, float]:
    """The grammar of exactly the JSON that `schema` (JSON text) allows; the milliseconds that its compilation may take.

    Raises:
        NotEnforceableError: a keyword of the schema has no grammar; the error names it.
    """
    try:
        compiler = _Compiler(json.loads(schema))
        root = compiler.value(compiler.root, 0)
    except RecursionError:
        raise NotEnforceableError("schema", "is nested too deeply") from None
    if root is None:
        raise NotEnforceableError("schema", "allows no value")
    common = COMMON % (numbers.NUMBER, numbers.INTEGER, whitespace)
    return f"root ::= {root}\n{compiler.rules}{common}", compiler.rules.cost


def write_pattern(pattern: str) -> tuple[str, float]:
    """As `write`, for plain text without control tokens that the regular expression matches as a whole.

    Raises:
        NotEnforceableError: the expression has no grammar.
    """
    rules = Rules()
    root = strings.bare(rules, automaton_of(f"^(?:{pattern})$"))
    if root is None:
        raise NotEnforceableError("pattern", "matches no text")
    return f"root ::= {root}\n{rules}", rules.cost


class _Compiler:
    """Writes rules. A value's rule is None if the schema allows no value."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.rules = Rules()
        self._alternatives = Alternatives(root)
        self._names: dict[str, str] = {}
        self._impossible: set[str] = set()

    def value(self, schema: Any, depth: int) -> str | None:
        """The rule for values of `schema`, made once. A schema that contains itself refers to its own rule."""
        if depth > MAX_DEPTH:
            raise NotEnforceableError("schema", f"nests more than {MAX_DEPTH} values")
        if schema is True or schema == {}:
            return "value"
        key = json.dumps(schema, sort_keys=True)
        if key not in self._names:
            self._names[key] = name = self.rules.new_name()
            plains = self._alternatives.of(schema)
            found = [text for plain in plains for text in self._plain(plain, depth)]
            if not found:
                self._impossible.add(name)
            else:
                self.rules.widths.value(name, found)
                self.rules.add(" | ".join(dict.fromkeys(found)), name)
        name = self._names[key]
        return None if name in self._impossible else name

    def _plain(self, plain: dict[str, Any], depth: int) -> list[str]:
        if not plain:
            return ["value"]
        if "enum" in plain:
            if len(plain["enum"]) > MAX_VALUES:
                raise NotEnforceableError("enum", f"has more than {MAX_VALUES} values")
            return [self._constant(value) for value in plain["enum"] if _fits(value, plain)]
        types = plain.get("type", [kind for kind in TYPES if kind != "integer"])
        if "number" in types:
            types = [kind for kind in types if kind != "integer"]
        return [text for kind in types if (text := self._of_type(kind, plain, depth)) is not None]

    def _of_type(self, kind: str, plain: dict[str, Any], depth: int) -> str | None:
        if kind == "null":
            return '"null"'
        if kind == "boolean":
            return '"true" | "false"'
        if kind in ("integer", "number"):
            return _number(plain, integer=kind == "integer")
        if kind == "string":
            return strings.string(self.rules, plain)
        write_container = containers.array if kind == "array" else containers.object_
        return write_container(self.rules, plain, lambda schema: self.value(schema, depth + 1))

    # Given values

    def _constant(self, value: Any) -> str:
        if isinstance(value, Mapping):
            pairs = {name: containers.pair(self.rules, name, self._constant(entry)) for name, entry in value.items()}
            members = containers.members(self.rules, pairs, list(pairs), [], may_be_empty=not pairs)
            assert members is not None, "all pairs are there"
            return members
        if isinstance(value, list):
            entries = [self._constant(entry) for entry in value]
            return containers.items(self.rules, entries, None, len(value), len(value))
        return strings.literal(value)


def _number(plain: Mapping[str, Any], *, integer: bool) -> str | None:
    def bound(side: str) -> numbers.Bound | None:
        limits = [numbers.Bound(Decimal(str(value)), excluded) for value, excluded in plain.get(side, ())]
        if side == "above":
            return max(limits, key=lambda b: (b.value, b.excluded), default=None)
        return min(limits, key=lambda b: (b.value, not b.excluded), default=None)

    low, high = bound("above"), bound("below")
    if low is None and high is None:
        return "integer" if integer else "number"
    return numbers.between(low, high, integer=integer)


def _fits(value: Any, plain: Mapping[str, Any]) -> bool:
    """Whether one value of an enum meets the schema's other keywords."""
    types = plain.get("type", TYPES)
    kind = _kind(value)
    if kind not in types and not (kind == "integer" and "number" in types):
        return False
    if kind in ("integer", "number"):
        number = Decimal(str(value))
        return all(_is_within(number, Decimal(str(b)), out, 1) for b, out in plain.get("above", ())) and all(
            _is_within(number, Decimal(str(b)), out, -1) for b, out in plain.get("below", ())
        )
    if kind == "string":
        language = strings.language({**plain, "patterns": plain.get("patterns", [])})
        return language is None or value in language
    if kind in ("object", "array") and plain.keys() - {"type", "enum"}:
        raise NotEnforceableError("enum", "has objects or arrays together with other keywords")
    return True


def _is_within(number: Decimal, bound: Decimal, excluded: bool, sign: int) -> bool:
    return (number - bound) * sign > 0 or (number == bound and not excluded)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value == int(value)):
        return "integer"
    names = {str: "string", float: "number", type(None): "null", list: "array", dict: "object"}
    return names[type(value)]
