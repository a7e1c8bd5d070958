"""Strings: the language that a schema defines, and the rules of a language."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_gptoss.server.harmony.enforce import automaton
from vllm_gptoss.server.harmony.enforce.automaton import Automaton
from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.lengths import bounded, escape
from vllm_gptoss.server.harmony.enforce.pattern import automaton_of
from vllm_gptoss.server.harmony.enforce.rules import Rules, price
from vllm_gptoss.server.harmony.enforce.width import STATES

SPELLED = 250
"""Milliseconds of compilation up to which a string may not spell control tokens, which takes up to four times the
states. Above it the parser reads a spelled control token as text: see `server/harmony/held.py`."""

SHORT = 4
"""Largest `minLength` without `maxLength` that gives each character its own rules."""


def count(plain: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a counting keyword such as `minLength`, or `default`."""
    value = plain.get(key, default)
    if value is default:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise NotEnforceableError(key, "is no count")
    return int(value)


def language(plain: Mapping[str, Any]) -> Automaton | None:
    """The strings that the schema allows; None if it allows any."""
    least, most = count(plain, "minLength", 0), count(plain, "maxLength", None)
    if not plain.get("patterns") and not least and most is None:
        return None
    found = automaton.anything()
    for pattern in plain.get("patterns", ()):
        if not isinstance(pattern, str):
            raise NotEnforceableError("pattern", "is no string")
        found = found & automaton_of(pattern)
    if max(least, most or 0) > automaton.MAX_STATES:
        raise NotEnforceableError("maxLength" if most else "minLength", f"is more than {automaton.MAX_STATES}")
    return found & automaton.lengths(least, most) if least or most is not None else found


def names(plain: Mapping[str, Any]) -> Automaton:
    """The property names that the schema allows."""
    found = automaton.anything()
    for schema in plain.get("propertyNames", ()):
        if schema is False:
            return automaton.one_of(())
        if schema is True:
            continue
        if not isinstance(schema, Mapping) or set(schema) - {"pattern", "type", "minLength", "maxLength", "enum"}:
            raise NotEnforceableError("propertyNames", "has no grammar here")
        if "enum" in schema:
            found = found & automaton.one_of([name for name in schema["enum"] if isinstance(name, str)])
        part = language({**schema, "patterns": [schema["pattern"]]} if "pattern" in schema else schema)
        found = found & part if part is not None else found
    return found


def string(rules: Rules, plain: Mapping[str, Any]) -> str | None:
    """The rule for a quoted string; None if there is none."""
    least, most = count(plain, "minLength", 0), count(plain, "maxLength", None)
    if plain.get("patterns"):
        return text(rules, language(plain) or automaton.anything())
    if not least and most is None:
        return "string"
    return _at_least(rules, least) if least <= SHORT and most is None else bounded(rules, least, most)


def _at_least(rules: Rules, least: int) -> str:
    """`least` characters and then any; `s0` to `s3` are the rules after each part of a spelled control token."""
    spelling = automaton.without_control_tokens()
    then = [f"s{state}" for state in range(len(spelling.moves) - 1)]
    for _ in range(least):
        written = [_ways_on(rules, row, dict(enumerate(then)), _unescaped) for row in spelling.moves[: len(then)]]
        escaped = f"{escape(rules)} {then[0]}"
        then = [rules.add(" | ".join([*ways, escaped]), cost=cost) for ways, cost in written]
    return rules.add(f'"\\"" {then[0]}')


def text(rules: Rules, found: Automaton) -> str | None:
    """The rule for a quoted string of a language."""
    alive = found.alive()
    if 0 not in alive:
        return None
    found = _without_control_tokens(found)
    name = _states(rules, found, '"\\""', _ways)
    if name is None:
        return None
    rule = rules.add(f'"\\"" {name}')
    rules.widths.string(rule, STATES)
    return rule


def _without_control_tokens(found: Automaton) -> Automaton:
    try:
        safe = found & automaton.without_control_tokens()
    except NotEnforceableError:
        return found
    return safe if _price(safe) <= max(SPELLED, _price(found)) else found


def _price(found: Automaton) -> float:
    alive = found.alive()
    moves = [found.moves[state] for state in alive]
    return sum(price((low, high) for low, high, to in row if to in alive) for row in moves)


def bare(rules: Rules, found: Automaton) -> str | None:
    """The rule for a language's text without quotes, escapes and control tokens."""
    found = found & automaton.without_control_tokens()
    return _states(rules, found, '""', lambda _, part, then: [f"[{''.join(_range(*each) for each in part)}] {then}"])


Ways = Callable[[Rules, list[tuple[int, int]], str], list[str]]


def _states(rules: Rules, found: Automaton, end: str, write: Ways) -> str | None:
    """Writes a rule for each state and returns the first state's; `end` is the alternative where the string may end."""
    alive = found.alive()
    if 0 not in alive:
        return None
    names = {state: rules.new_name() for state in sorted(alive)}
    for state, name in names.items():
        ways, cost = _ways_on(rules, found.moves[state], names, write)
        rules.add(" | ".join([end, *ways] if state in found.final else ways), name, cost=cost)
    return names[0]


def _ways_on(
    rules: Rules, row: Sequence[tuple[int, int, int]], names: Mapping[int, str], write: Ways
) -> tuple[list[str], float]:
    """The alternatives from one state to the states in `names`, and the cost to compile them."""
    by_target: dict[int, list[tuple[int, int]]] = {}
    for low, high, to in row:
        if to in names:
            by_target.setdefault(to, []).append((low, high))
    ways = [way for to, ranges in by_target.items() for way in write(rules, ranges, names[to])]
    return ways, price(part for ranges in by_target.values() for part in ranges)


def _ways(rules: Rules, ranges: list[tuple[int, int]], then: str) -> list[str]:
    """Alternatives for one character of `ranges` in JSON, plain or escaped, each followed by the rule `then`.

    Each alternative repeats `then`, because masks take four times as long with a separate rule for the character.
    """
    escapes = _escapes(ranges)
    escaped = [f'"\\\\" {rules.shared(" | ".join(escapes))} {then}'] if escapes else []
    return [*_unescaped(rules, ranges, then), *escaped]


def _unescaped(rules: Rules, ranges: list[tuple[int, int]], then: str) -> list[str]:
    raw = "".join(_range(*part) for low, high in ranges for part in _without_escaped(low, high))
    return [f"[{raw}] {then}"] if raw else []


def literal(value: Any) -> str:
    """One given string, number, boolean or null."""
    if isinstance(value, str):
        if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
            raise NotEnforceableError("enum", "has half a surrogate pair")
        return _quoted(json.dumps(value, ensure_ascii=False).replace("<|", "\\u003c|"))
    if isinstance(value, float) and value == int(value):
        return f'"{int(value)}" ( "." "0"+ )?'
    return _quoted(json.dumps(value)) + (' ( "." "0"+ )?' if type(value) is int else "")


def _quoted(written: str) -> str:
    """An EBNF literal."""
    return '"' + "".join(c if c.isalnum() or c in " _-{}[]:,." else _code(ord(c)) for c in written) + '"'


def _code(point: int) -> str:
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


_SHORT = {0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}


def _escapes(ranges: Sequence[tuple[int, int]]) -> list[str]:
    """The characters of `ranges` that JSON requires escapes for, as they are written after the backslash."""
    points = [point for low, high in ranges for point in range(low, min(high, 0x1F) + 1)]
    if len(points) == 0x20:
        found = ["[bfnrt]", '"u00" [01] [0-9a-fA-F]']
    else:
        found = [f'"u00{point >> 4}" {_hex(point & 15)}' for point in points]
        found += [_quoted(_SHORT[point]) for point in points if point in _SHORT]
    return found + [_quoted(chr(p)) for p in (0x22, 0x5C) if any(low <= p <= high for low, high in ranges)]


def _hex(digit: int) -> str:
    written = f"{digit:x}"
    return f"[{written}{written.upper()}]" if written.isalpha() else f'"{written}"'


def _without_escaped(low: int, high: int) -> list[tuple[int, int]]:
    found, start = [], max(low, 0x20)
    for stop in (0x22, 0x5C):
        if start <= stop <= high:
            if start < stop:
                found.append((start, stop - 1))
            start = stop + 1
    if start <= high:
        found.append((start, high))
    return found


def _range(low: int, high: int) -> str:
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"
