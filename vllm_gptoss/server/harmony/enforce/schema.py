"""Rewrites a JSON schema as alternatives without `$ref`, `allOf`, `anyOf` and `oneOf`, for the grammar.

These keywords are multiplied out, and schemas that apply together are merged. An assertion without a grammar raises an
error that names the keyword. Annotations are dropped; `format` is one, as in JSON Schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.references import References

Schema = Mapping[str, Any]
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
MAX_ALTERNATIVES, MAX_STEPS = 64, 20_000

REFUSED = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "multipleOf"),
        *("dependentSchemas", "dependentRequired", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
"""Assertions without a grammar here."""
_LARGEST = ("minLength", "minItems", "minProperties")
_SMALLEST = ("maxLength", "maxItems", "maxProperties")
_ITEMS = frozenset({"items", "prefixItems"})
_MEMBERS = frozenset({"properties", "patternProperties", "additionalProperties"})
_KEPT = ("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "items", "prefixItems")


class Alternatives:
    """Multiplies out schemas of one root."""

    def __init__(self, root: Any) -> None:
        self._references = References(root)
        self._steps = 0

    def of(self, schema: Any, seen: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """The plain schemas of which an instance must meet one; none for `false`.

        Raises:
            NotEnforceableError: a keyword that has no grammar here, or a schema that grows too large.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise NotEnforceableError("schema", f"takes more than {MAX_STEPS} steps to multiply out")
        if schema is True:
            return [{}]
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            raise NotEnforceableError("schema", f"has a {type(schema).__name__} where a schema should be")
        found = [_plain(schema)]
        if (ref := schema.get("$ref")) is not None:
            if ref in seen:
                raise NotEnforceableError("$ref", f"{ref} means itself")
            found = _both(found, self.of(self._target(ref), (*seen, ref)))
        for part in _list(schema, "allOf"):
            found = _both(found, self.of(part, seen))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                branches = [self.of(part, seen) for part in _list(schema, key)]
                if key == "oneOf":
                    _check_disjoint([_both(found, branch) for branch in branches])
                found = _both(found, [plain for branch in branches for plain in branch])
        if schema.get("nullable") is True:  # OpenAPI 3.0
            found.append({"type": ["null"]})
        return found

    def _target(self, ref: Any) -> Any:
        try:
            return self._references.target(ref)
        except (LookupError, TypeError, AttributeError):
            raise NotEnforceableError("$ref", f"{str(ref)[:80]!r} is not in this schema") from None


def _list(schema: Schema, key: str) -> Sequence[Any]:
    value = schema.get(key, [])
    if not isinstance(value, list) or (key in schema and not value):
        raise NotEnforceableError(key, "is not a list of schemas")
    return value


def _plain(schema: Schema) -> dict[str, Any]:
    """One schema's keywords without its combinations, in the spelling of draft 2020-12."""
    if unknown := sorted(REFUSED & set(schema)):
        raise NotEnforceableError(unknown[0], "has no grammar here")
    plain = {key: schema[key] for key in (*_LARGEST, *_SMALLEST, *_KEPT) if schema.get(key) is not None}
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not isinstance(types, list) or not types or not all(kind in TYPES for kind in types):
            raise NotEnforceableError("type", f"is {json.dumps(schema['type'])[:80]}, which is no type")
        plain["type"] = sorted(set(types))
    if "enum" in schema:
        if not isinstance(schema["enum"], list) or not schema["enum"]:
            raise NotEnforceableError("enum", "lists no value")
        plain["enum"] = schema["enum"]
    if "const" in schema:
        plain["enum"] = _common(plain.get("enum"), [schema["const"]])
    if "pattern" in schema:
        plain["patterns"] = [schema["pattern"]]
    if "propertyNames" in plain:
        plain["propertyNames"] = [plain["propertyNames"]]
    plain |= _limits(schema)
    if isinstance(plain.get("items"), list):  # drafts before 2020-12
        plain["prefixItems"] = plain.pop("items")
        if "additionalItems" in schema:
            plain["items"] = schema["additionalItems"]
    if plain.get("uniqueItems") or schema.get("uniqueItems") is True:
        raise NotEnforceableError("uniqueItems", "has no grammar here")
    return plain


def _limits(schema: Schema) -> dict[str, Any]:
    """`above` and `below`: lists of (limit, excluded)."""
    found: dict[str, Any] = {}
    for side, name, exclusive in (
        ("above", "minimum", "exclusiveMinimum"),
        ("below", "maximum", "exclusiveMaximum"),
    ):
        limit, strict = schema.get(name), schema.get(exclusive)
        limits = []
        if limit is not None:
            limits.append((_number(name, limit), strict is True))  # draft 4: exclusiveMinimum is true
        if strict is not None and not isinstance(strict, bool):
            limits.append((_number(exclusive, strict), True))
        if limits:
            found[side] = limits
    return found


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        raise NotEnforceableError(name, "is no number")
    return value


def _canonical(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return (type(value).__name__, value)
    if isinstance(value, int | float):
        return ("number", value)
    if isinstance(value, Mapping):
        return ("object", tuple(sorted((key, _canonical(entry)) for key, entry in value.items())))
    return ("array", tuple(map(_canonical, value)))


def _common(first: list[Any] | None, second: list[Any]) -> list[Any]:
    if first is None:
        return second
    known = {_canonical(value) for value in second}
    return [value for value in first if _canonical(value) in known]


def _both(first: Iterable[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged = [_merge(a, b) for a in first for b in second]
    if len(merged) > MAX_ALTERNATIVES:
        raise NotEnforceableError("anyOf", f"has more than {MAX_ALTERNATIVES} alternatives once multiplied out")
    return merged


def _merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The schema of instances that meet both `a` and `b`."""
    if not a or not b:
        return a or b
    merged = {**a, **b}
    if "type" in a and "type" in b:
        merged["type"] = _types_of_both(a["type"], b["type"])
    if "enum" in a and "enum" in b:
        merged["enum"] = _common(a["enum"], b["enum"])
    for key in ("patterns", "above", "below", "propertyNames"):
        if key in a and key in b:
            merged[key] = [*a[key], *b[key]]
    for keys, choose in ((_LARGEST, max), (_SMALLEST, min)):
        for key in keys:
            if key in a and key in b:
                merged[key] = choose(a[key], b[key])
    if "required" in a and "required" in b:
        merged["required"] = list(dict.fromkeys([*a["required"], *b["required"]]))
    for group, merge in ((_ITEMS, _merged_items), (_MEMBERS, _merged_members)):
        if group & set(a) and group & set(b):
            merged |= merge(a, b)
    return merged


def _types_of_both(a: list[str], b: list[str]) -> list[str]:
    found = set(a) & set(b)
    if "integer" in {*a, *b} and ("number" in a or "number" in b) and (_has_number(a) and _has_number(b)):
        found.add("integer")
    return sorted(found)


def _has_number(types: Sequence[str]) -> bool:
    return "integer" in types or "number" in types


def _merged_items(a: Schema, b: Schema) -> dict[str, Any]:
    if "prefixItems" in a or "prefixItems" in b:
        raise NotEnforceableError("prefixItems", "is in two schemas that must both hold")
    return {"items": {"allOf": [a["items"], b["items"]]}}


def _merged_members(a: Schema, b: Schema) -> dict[str, Any]:
    if "patternProperties" in a or "patternProperties" in b:
        raise NotEnforceableError("patternProperties", "is in two schemas that must both hold")
    rest = [side.get("additionalProperties", True) for side in (a, b)]
    names = dict.fromkeys([*a.get("properties", {}), *b.get("properties", {})])
    properties = {
        name: _all(side.get("properties", {}).get(name, other) for side, other in zip((a, b), rest, strict=True))
        for name in names
    }
    return {"properties": properties, "additionalProperties": _all(rest)}


def _all(schemas: Iterable[Any]) -> Any:
    parts = [schema for schema in schemas if schema is not True]
    if any(part is False for part in parts):
        return False
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _check_disjoint(branches: list[list[dict[str, Any]]]) -> None:
    for first, second in combinations(branches, 2):
        if not all(_is_disjoint(a, b) for a in first for b in second):
            raise NotEnforceableError("oneOf", "has branches that may hold at once")


def _is_disjoint(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if "type" in a and "type" in b and not _types_of_both(a["type"], b["type"]):
        return True
    if "enum" in a and "enum" in b:
        return not _common(a["enum"], b["enum"])
    if a.get("type") != ["object"] or b.get("type") != ["object"]:
        return False
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    return any(_is_tag(a["properties"].get(n), b["properties"].get(n)) for n in shared if _has_both(a, b))


def _has_both(a: Schema, b: Schema) -> bool:
    return isinstance(a.get("properties"), Mapping) and isinstance(b.get("properties"), Mapping)


def _is_tag(a: Any, b: Any) -> bool:
    """Whether a property has different constants in two branches."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return False
    left, right = _constants(a), _constants(b)
    return isinstance(left, list) and isinstance(right, list) and not _common(left, right)


def _constants(schema: Any) -> Any:
    """The values that a property's schema lists, or None."""
    if not isinstance(schema, Mapping):
        return None
    parts = [[schema["const"]] if "const" in schema else schema.get("enum"), *map(_constants, schema.get("allOf", ()))]
    return next((values for values in parts if values is not None), None)
