"""Arrays and objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from vllm_gptoss.server.harmony.enforce import automaton, strings
from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.pattern import automaton_of
from vllm_gptoss.server.harmony.enforce.rules import Rules
from vllm_gptoss.server.harmony.enforce.strings import count, literal

FREE = 5
"""Properties with one state per combination of present ones: 2**5 states."""

MAX_ITEMS = 1_000
"""Largest bound on an array's length. Each item has a rule: counting in xgrammar 0.2.8 takes 1 ms a token, 20 times as
long."""

Value = Callable[[Any], str | None]
"""The rule for values of a schema; None if it allows none."""


def array(rules: Rules, plain: Mapping[str, Any], value: Value) -> str | None:
    """The rule for an array; None if there is none."""
    least, most = count(plain, "minItems", 0), count(plain, "maxItems", None)
    first = [value(schema) for schema in plain.get("prefixItems", ())]
    rest = value(plain.get("items", True))
    for key, bound in (("minItems", least), ("maxItems", most or 0)):
        if bound > MAX_ITEMS:
            raise NotEnforceableError(key, f"is more than {MAX_ITEMS}")
    if not plain.keys() & {"minItems", "maxItems", "prefixItems", "items"}:
        return "array"
    known = first.index(None) if None in first else len(first)
    if known < len(first) or rest is None:
        most = known if most is None else min(known, most)
    if most is not None and least > most:
        return None
    entries = [entry for entry in first if entry is not None]
    rule = items(rules, entries if most is None else entries[:most], rest, least, most)
    rules.widths.array(rule, entries if rest is None else [*entries, rest])
    return rule


def items(rules: Rules, first: Sequence[str], rest: str | None, least: int, most: int | None) -> str:
    """`least` to `most` values: those of `first`, at most `most`, then values of `rest`."""
    if not first and rest is not None and most != 0:
        first = [rest]
    if not first:
        return rules.shared('"[" ws "]"')
    then = _rest(rules, rest, max(0, least - len(first)), None if most is None else most - len(first))
    for number in range(len(first) - 1, -1, -1):
        comma = 'ws "," ws ' if number else ""
        here = f"{comma}{first[number]} {then}"
        then = here if number < least else f'( {here} | {"ws " if number else ""}"]" )'
    return rules.add(f'"[" ws {then}')


def _rest(rules: Rules, entry: str | None, least: int, most: int | None) -> str:
    """The part after a value: `least` to `most` more of `entry`, and the array's end."""
    end = 'ws "]"'
    if entry is None or most == 0:
        return end
    if most is None:
        name = rules.add(f'{end} | ws "," ws {entry} {entry}more', f"{entry}more")
    else:
        name = rules.add(end, f"{entry}m0")
        for more in range(1, most - least + 1):
            name = rules.add(f'{end} | ws "," ws {entry} {name}', f"{entry}m{more}")
    base = name
    for needed in range(1, least + 1):
        name = rules.add(f'ws "," ws {entry} {name}', f"{base}n{needed}")
    return name


def object_(rules: Rules, plain: Mapping[str, Any], value: Value) -> str | None:
    """The rule for an object; None if there is none."""
    known = {"properties", "patternProperties", "additionalProperties", "propertyNames", "required"}
    if not plain.keys() & {*known, "minProperties", "maxProperties"}:
        return "object"
    required = list(plain.get("required", ()))
    declared = _declared(plain, required, value)
    others = _others(rules, plain, list(declared), value)
    values = {name: rule for name, rule in declared.items() if rule is not None}
    if any(name not in values for name in required):
        return None
    pairs = {name: pair(rules, name, rule) for name, rule in values.items()}
    _check_counts(plain, pairs, required, bool(others))
    may_be_empty = not required and not plain.get("minProperties")
    rule = members(rules, pairs, required, list(others), may_be_empty=may_be_empty)
    if rule is not None:
        rules.widths.object(rule, values.items(), others.values())
    return rule


def pair(rules: Rules, name: str, value: str) -> str:
    return rules.add(f'{literal(name)} ws ":" ws {value}')


def _declared(plain: Mapping[str, Any], required: Sequence[str], value: Value) -> dict[str, str | None]:
    """The rule of each named property's value, or None where the property is not allowed."""
    properties, patterns = plain.get("properties", {}), plain.get("patternProperties", {})
    if not isinstance(properties, Mapping) or not isinstance(patterns, Mapping):
        raise NotEnforceableError("properties", "is no object")
    found: dict[str, str | None] = {}
    for name in dict.fromkeys([*properties, *required]):
        schemas = [schema for pattern, schema in patterns.items() if name in automaton_of(pattern)]
        if name in properties:
            schemas.append(properties[name])
        schema = _together(schemas) if schemas else plain.get("additionalProperties", True)
        is_allowed = "propertyNames" not in plain or name in strings.names(plain)
        found[name] = value(schema) if is_allowed else None
    return found


def _others(rules: Rules, plain: Mapping[str, Any], declared: Sequence[str], value: Value) -> dict[str, str]:
    """Rules of pairs with undeclared names, each with the rule of its values.

    Each combination of matched patterns, the empty one included, has one rule.
    """
    patterns = plain.get("patternProperties", {})
    rest = plain.get("additionalProperties", True)
    if rest is False and not patterns:
        return {}
    if len(patterns) > 3:
        raise NotEnforceableError("patternProperties", "has more than three patterns")
    names = strings.names(plain) & automaton.one_of(declared).complement()
    languages = {pattern: automaton_of(pattern) for pattern in patterns}
    found: dict[str, str] = {}
    for size in range(len(patterns) + 1):
        for matched in combinations(patterns, size):
            schema = _together([patterns[pattern] for pattern in matched]) if matched else rest
            rule = value(schema)
            language = names
            for pattern, one in languages.items():
                language = language & (one if pattern in matched else one.complement())
            if rule is not None and (key := strings.text(rules, language)) is not None:
                found[rules.add(f'{key} ws ":" ws {rule}')] = rule
    return found


def _together(schemas: Sequence[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)}


def _check_counts(plain: Mapping[str, Any], pairs: Mapping[str, str], required: Sequence[str], open_: bool) -> None:
    least, most = count(plain, "minProperties", 0), count(plain, "maxProperties", None)
    if least > max(1, len(required)):
        raise NotEnforceableError("minProperties", "is more than the required properties")
    if most is not None and (open_ or most < len(pairs) or len(pairs) > FREE):
        raise NotEnforceableError("maxProperties", "has no grammar here")


def members(
    rules: Rules, pairs: Mapping[str, str], required: Sequence[str], others: Sequence[str], *, may_be_empty: bool
) -> str | None:
    """One state per set of written properties: a tracked property comes at most once, required ones before the end."""
    in_order = len(required) > FREE
    tracked = list(required) if len(pairs) > FREE else list(pairs)
    free = [pair for name, pair in pairs.items() if name not in tracked] + list(others)
    whole = sum(1 << tracked.index(name) for name in required)
    names: dict[int, str] = {}

    def ways(mask: int, comma: str) -> list[str]:
        left = [index for index in range(len(tracked)) if not mask >> index & 1]
        left = left[:1] if in_order else left
        found = [f"{comma}{pairs[tracked[i]]} {state(mask | 1 << i)}" for i in left]
        return found + [f"{comma}{pair} {state(mask)}" for pair in free]

    def state(mask: int) -> str:
        if mask not in names:
            names[mask] = rules.new_name()
            found = ways(mask, 'ws "," ws ')
            if mask & whole == whole:
                found.append('ws "}"')
            rules.add(" | ".join(found), names[mask])
        return names[mask]

    first = ways(0, "")
    if may_be_empty:
        first.append('"}"')
    return rules.add(f'"{{" ws ( {" | ".join(first)} )') if first else None
