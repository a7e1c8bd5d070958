"""JSON schemas as the TypeScript-like text that gpt-oss reads tool definitions in.

The layout is that of openai/harmony's renderer; docs/harmony.md lists where we differ, each time because its text
would lose what the schema means (`anyOf`, `$ref`, `allOf`, `const`, enums without type, maps come out as `any` there).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from vllm_gptoss.server.harmony.references import References

logger = logging.getLogger(__name__)

MAX_NODES = 4000
"""Schema nodes rendered per tool: nested references can double at every level, and a prompt has an end."""

_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$]*\Z")
_SIMPLE = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
_NEST = "    "
_UNIONS = ("oneOf", "anyOf")
_MORE: Any = object()
"""The key of unions and conditions of several parts of an `allOf`, where a merged schema has room for one."""
_BRACES_OR_UNION = re.compile(r"[{}]| [|&] ")


def function_type(parameters: Mapping[str, Any] | None) -> str:
    """The type of a tool with these `parameters`: `(_: {…}) => any`, or `() => any` if it takes none."""
    if not isinstance(parameters, Mapping):
        return "() => any"
    writer = _Writer(parameters)
    text = writer.type_of(parameters, "")
    if text in ("object", "any"):
        return "() => any"
    schema, _ = writer.resolve(parameters, ())
    heading = "".join(f"// {line}\n" for line in _lines(schema.get("description")))
    return f"(_: {heading}{text}) => any"


_LINE_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Line ends that JSON allows in strings."""


def literal(value: Any) -> str:
    """`value` as JSON, always in one line."""
    return json.dumps(value, ensure_ascii=False).translate(_LINE_BREAKS)


def _lines(text: Any) -> list[str]:
    return text.splitlines() if isinstance(text, str) else []


def _one_line(text: str) -> str:
    """`text` in one line: a second line could look like a heading of the prompt."""
    return " ".join(text.split())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


class _Writer:
    """Renders the parts of one root schema; `seen` is the chain of references being expanded."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._references = References(root)
        self.budget = MAX_NODES
        self.recursive: set[str] = set()

    def type_of(self, schema: Any, indent: str, seen: tuple[str, ...] = ()) -> str:
        """The type of `schema`; lines after the first start at `indent`."""
        if schema is False:
            return "never"
        self.budget -= 1
        if not isinstance(schema, Mapping) or self.budget < 0:
            if self.budget == -1:
                logger.warning("A tool's schema has over %d nodes; the rest is shown as any.", MAX_NODES)
            return "any"
        if schema.get("$ref") in seen:
            # A comment on the expanded property names this type.
            self.recursive.add(schema["$ref"])
            return self._name(schema["$ref"])
        schema, seen = self.resolve(schema, seen)
        text = self._plain_type(schema, indent, seen)
        if schema.get("nullable") is True and "null" not in text.split(" | "):
            text += " | null"
        return text

    def _plain_type(self, schema: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> str:
        """The type without `null`: the schema's own, combined with each of its unions."""
        own = self._own_type(schema, indent, seen)
        unions = [self._union(self._variant(v, schema, indent, seen) for v in union) for union in self.unions(schema)]
        # A union replaces a type without members; a union of assertions adds no type.
        said = [union for union in dict.fromkeys(unions) if union not in ("any", "object", own)]
        parts = [*([own] if own.startswith("{") or not said else []), *said]
        return " & ".join(map(self._parenthesised, parts)) if len(parts) > 1 else parts[0]

    def _variant(self, variant: Any, parent: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> str:
        """A variant's type; properties that `parent` requires are required in it."""
        if isinstance(variant, Mapping) and (properties := _mapping(variant.get("properties"))):
            required = (name for name in _list(parent.get("required")) if isinstance(name, str) and name in properties)
            variant = {**variant, "required": [*_list(variant.get("required")), *required]}
        return self.type_of(variant, indent, seen)

    def _own_type(self, schema: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> str:
        if "const" in schema:
            return literal(schema["const"])
        if values := _list(schema.get("enum")):
            return self._union(literal(value) for value in values)
        kind = schema.get("type")
        if isinstance(kind, str) and kind in _SIMPLE:
            return _SIMPLE[kind]
        if isinstance(kind, list):
            plain = {key: value for key, value in schema.items() if key not in (*_UNIONS, _MORE)}
            return self._union(self.type_of({**plain, "type": one}, indent, seen) for one in kind) or "any"
        has_fields = "type" not in schema and isinstance(schema.get("properties"), Mapping)
        if kind == "object" or has_fields or "additionalProperties" in schema:
            return self._object(schema, indent, seen)
        if kind == "array" or "items" in schema or "prefixItems" in schema:
            return self._array(schema, indent, seen)
        return "any"

    def resolve(self, schema: Mapping[str, Any], seen: tuple[str, ...]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Follows `$ref`, but not into itself, and merges `allOf`."""
        while isinstance(ref := schema.get("$ref"), str) and ref not in seen:
            siblings = {k: v for k, v in schema.items() if k != "$ref"}
            target = self._lookup(ref)
            if not isinstance(target, Mapping):
                return siblings, seen
            schema, seen = {**target, **siblings}, (*seen, ref)
        if parts := _list(schema.get("allOf")):
            merged: dict[str, Any] = {}
            for part in (*parts, {k: v for k, v in schema.items() if k != "allOf"}):
                if isinstance(part, Mapping):
                    part, seen = self.resolve(part, seen)
                    merged = _merge(merged, part)
            return merged, seen
        return schema, seen

    def _name(self, ref: str) -> str:
        name = unquote(re.split(r"[/#]", ref)[-1])
        return _one_line(name or str(self.root.get("title") or "Arguments"))

    def _lookup(self, ref: str) -> Any:
        try:
            return self._references.target(ref)
        except LookupError:
            return None

    def unions(self, schema: Mapping[str, Any]) -> list[list[Any]]:
        """The variants of each `oneOf` and `anyOf`, without those that only list required properties."""
        found = (_list(part.get(key)) for part in (schema, *schema.get(_MORE, ())) for key in _UNIONS)
        return [kept for union in found if (kept := [v for v in union if not _only_requires(v)])]

    def has_members(self, schema: Mapping[str, Any]) -> bool:
        return any(_mapping(schema.get(k)) for k in ("properties", "patternProperties", "additionalProperties"))

    @staticmethod
    def _union(types: Iterable[str]) -> str:
        return " | ".join(dict.fromkeys(types))

    def _array(self, schema: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> str:
        first, items = schema.get("prefixItems"), schema.get("items")
        if isinstance(items, list):  # drafts before 2020-12
            first, items = items, schema.get("additionalItems", False)
        if isinstance(first, list) and first:
            parts = [self.type_of(item, indent, seen) for item in first]
            if isinstance(items, Mapping):
                parts.append(f"...{self._parenthesised(self.type_of(items, indent, seen))}[]")
            return f"[{', '.join(parts)}]"
        return self._parenthesised(self.type_of(items, indent, seen)) + "[]"

    @staticmethod
    def _parenthesised(text: str) -> str:
        depth = 0
        for found in _BRACES_OR_UNION.findall(text):
            depth += {"{": 1, "}": -1}.get(found, 0)
            if depth == 0 and found not in "{}":
                return f"({text})"
        return text

    def _object(self, schema: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> str:
        if not self.has_members(schema):
            return "object"
        properties = _mapping(schema.get("properties"))
        required = {name for name in _list(schema.get("required")) if isinstance(name, str)}
        lines = ["{", *(f"{indent}// {line}" for line in self._conditions(schema, seen))]
        for key, value in properties.items():
            lines.extend(self._property(key, value, key in required, indent, seen))
        for pattern, value in _mapping(schema.get("patternProperties")).items():
            said = " ".join((f"keys match {_one_line(pattern)}", *self._described(value, seen)))
            lines.append(f"{indent}[key: string]: {self.type_of(value, indent + _NEST, seen)}, // {said}")
        if isinstance(extra := schema.get("additionalProperties"), Mapping) and extra:
            said = " ".join(self._described(extra, seen))
            text = self.type_of(extra, indent + _NEST, seen)
            lines.append(f"{indent}[key: string]: {text}," + (f" // {said}" if said else ""))
        return "\n".join((*lines, indent + "}"))

    def _described(self, schema: Any, seen: tuple[str, ...]) -> list[str]:
        return _lines(self.resolve(schema, seen)[0].get("description")) if isinstance(schema, Mapping) else []

    def _conditions(self, schema: Mapping[str, Any], seen: tuple[str, ...]) -> Iterator[str]:
        """Conditions on an object's properties besides their types, a line each."""
        for part in (schema, *schema.get(_MORE, ())):
            for key, words in (("oneOf", "exactly one of"), ("anyOf", "at least one of")):
                variants = [v["required"] for v in _list(part.get(key)) if _only_requires(v)]
                if variants:
                    yield _one_line(f"{words}: " + " | ".join(" and ".join(map(str, names)) for names in variants))
            if "if" in part:
                types = {k: _one_line(self.type_of(part[k], "", seen)) for k in ("if", "then", "else") if k in part}
                yield " ".join(f"{word} {text}" for word, text in types.items())

    def _property(self, key: str, value: Any, required: bool, indent: str, seen: tuple[str, ...]) -> Iterator[str]:
        name = (key if _IDENTIFIER.match(key) else literal(key)) + ("" if required else "?")
        if not isinstance(value, Mapping):
            yield f"{indent}{name}: {self.type_of(value, indent + _NEST, seen)},"
            return
        schema, inner = self.resolve(value, seen)
        before = set(self.recursive)
        self.recursive = set()
        lines = list(self._typed(name, schema, indent, inner))
        comments = [
            *self._comments(key, schema),
            *(f"Items: {line}" for line in self._described(schema.get("items"), inner)),
        ]
        comments += [f"{self._name(ref)} is this type" for ref in sorted(self.recursive) if ref not in seen]
        self.recursive = before | {ref for ref in self.recursive if ref in seen}
        yield from (f"{indent}// {line}".rstrip() for line in comments)
        yield from lines

    def _typed(self, name: str, schema: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> Iterator[str]:
        """The lines of a property after its comments."""
        default = _default(schema)
        unions = self.unions(schema) if "$ref" not in schema and not self.has_members(schema) else []
        variants = unions[0] if len(unions) == 1 else []
        plain = [self.resolve(v, seen)[0] if isinstance(v, Mapping) else {} for v in variants]
        # OpenAI's renderer lists `oneOf` one variant a line; `anyOf` reads better inline unless a variant has remarks.
        if not variants or ("oneOf" not in schema and not any(self._remark(v, schema) for v in plain)):
            text = self.type_of(schema, indent + _NEST, seen)
            yield f"{indent}{name}: {text}," + (f" // {default}" if default else "")
            return
        if default:
            yield f"{indent}// {default}"
        yield f"{indent}{name}:"
        for variant, resolved in zip(variants, plain, strict=True):
            remark = self._remark(resolved, schema)
            text = self._variant(variant, schema, indent + "   ", seen)
            yield f"{indent} | {text}" + (f" // {remark}" if remark else "")
        yield f"{indent},"

    @staticmethod
    def _comments(key: str, schema: Mapping[str, Any]) -> Iterator[str]:
        title = schema.get("title")
        if isinstance(title, str) and title != key.replace("_", " ").title():  # else pydantic made it from the name
            yield _one_line(title)
            yield ""
        yield from _lines(schema.get("description"))
        if isinstance(examples := schema.get("examples"), list) and examples:
            yield "Examples:"
            yield from (f"- {literal(example)}" for example in examples)

    @staticmethod
    def _remark(variant: Mapping[str, Any], parent: Mapping[str, Any]) -> str:
        """A variant's own comments that its property does not have."""
        description = variant.get("description")
        said = description if description != parent.get("description") else None
        return " ".join((*_lines(said), *filter(None, [_default(variant)])))


def _default(schema: Mapping[str, Any]) -> str:
    """`default: …` or "". A string that an enum lists is shown bare, as OpenAI's renderer and the template do."""
    if "default" not in schema:
        return ""
    value = schema["default"]
    bare = isinstance(value, str) and bool(schema.get("enum")) and len(value.splitlines()) < 2
    return f"default: {value if bare else literal(value)}"


def _only_requires(variant: Any) -> bool:
    return isinstance(variant, Mapping) and set(variant) == {"required"} and bool(_list(variant["required"]))


def _merge(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Both schemas at once: members are united, everything else is taken from the later one."""
    merged = {**left, **right}
    for key in ("properties", "patternProperties"):
        first, second = _mapping(left.get(key)), _mapping(right.get(key))
        if first or second:
            twice = {k: {"allOf": [first[k], second[k]]} for k in second if k in first and first[k] != second[k]}
            merged[key] = {**first, **second, **twice}
    if both_required := [*_list(left.get("required")), *_list(right.get("required"))]:
        merged["required"] = both_required
    kept = {key: left[key] for key in (*_UNIONS, "if", "then", "else") if key in left and key in right}
    merged[_MORE] = [*left.get(_MORE, ()), *right.get(_MORE, ()), *([kept] if kept else [])]
    return merged
