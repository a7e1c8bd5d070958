"""JSON schemas as the TypeScript-like text that gpt-oss reads tool definitions in.

The layout is that of openai/harmony's renderer; docs/harmony.md lists where we differ, each time because its text
would lose what the schema means (`anyOf`, `$ref`, `allOf`, `const`, enums without type, maps come out as `any` there).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

MAX_NODES = 4000
"""Schema nodes rendered per tool: nested references can double at every level, and a prompt has an end."""

_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$]*\Z")
_SIMPLE = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
_NEST = "    "


def function_type(parameters: Mapping[str, Any] | None) -> str:
    """The type of a tool with these `parameters`: `(_: {…}) => any`, or `() => any` if it takes none."""
    if not isinstance(parameters, Mapping):
        return "() => any"
    writer = _Writer(parameters)
    schema = writer.resolve(parameters, ())
    if not _is_object(schema[0]) or not writer.has_members(schema[0]):
        named = writer.type_of(parameters, "")
        return "() => any" if named in ("object", "any") else f"(_: {named}) => any"
    heading = "".join(f"// {line}\n" for line in _lines(schema[0].get("description")))
    return f"(_: {heading}{writer.type_of(parameters, '')}) => any"


_LINE_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Those that JSON lets stand in a string."""


def literal(value: Any) -> str:
    """`value` as JSON, in one line whatever it holds."""
    return json.dumps(value, ensure_ascii=False).translate(_LINE_BREAKS)


def _lines(text: Any) -> list[str]:
    return text.splitlines() if isinstance(text, str) else []


def _one_line(text: str) -> str:
    """`text` where a line must not end: a second one could pass for a heading of the prompt."""
    return " ".join(text.split())


def _is_object(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "object" or ("type" not in schema and isinstance(schema.get("properties"), Mapping))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _is_automatic_title(title: str, key: str) -> bool:
    """Whether pydantic made `title` from the field's name, so that it says nothing new."""
    return title == key.replace("_", " ").title()


class _Writer:
    """Renders the parts of one root schema; `seen` is the chain of references being expanded."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
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
            # The property that is expanded says which type this is.
            self.recursive.add(schema["$ref"])
            return self._name(schema["$ref"])
        schema, seen = self.resolve(schema, seen)
        text = self._plain_type(schema, indent, seen)
        if schema.get("nullable") is True and "null" not in text.split(" | "):
            text += " | null"
        return text

    def _plain_type(self, schema: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> str:
        if "const" in schema:
            return literal(schema["const"])
        if values := _list(schema.get("enum")):
            return " | ".join(dict.fromkeys(literal(value) for value in values))
        if variants := self.variants(schema):
            return self._union([self.type_of(v, indent, seen) for v in variants])
        kind = schema.get("type")
        if isinstance(kind, str) and kind in _SIMPLE:
            return _SIMPLE[kind]
        if isinstance(kind, list):
            return self._union([self.type_of({**schema, "type": one}, indent, seen) for one in kind]) or "any"
        if _is_object(schema) or "additionalProperties" in schema:
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
        return _one_line(ref.rsplit("/", 1)[-1] if "/" in ref else str(self.root.get("title") or "Arguments"))

    def _lookup(self, ref: str) -> Any:
        if not ref.startswith("#"):
            return None
        node: Any = self.root
        for part in ref[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping):
                node = node.get(key)
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return node

    def variants(self, schema: Mapping[str, Any]) -> list[Any]:
        """The alternatives of `oneOf` or `anyOf`, without those that only say which properties are required."""
        found = _list(schema.get("oneOf")) or _list(schema.get("anyOf"))
        if _mapping(schema.get("properties")):
            return []
        return [v for v in found if not (isinstance(v, Mapping) and set(v) == {"required"})]

    def has_members(self, schema: Mapping[str, Any]) -> bool:
        return any(_mapping(schema.get(k)) for k in ("properties", "patternProperties", "additionalProperties"))

    @staticmethod
    def _union(types: Sequence[str]) -> str:
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
        return f"({text})" if " | " in text and not text.startswith("{") else text

    def _object(self, schema: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> str:
        if not self.has_members(schema):
            return "object"
        properties = _mapping(schema.get("properties"))
        required = {name for name in _list(schema.get("required")) if isinstance(name, str)}
        lines = ["{"]
        for key, value in properties.items():
            lines.extend(self._property(key, value, key in required, indent, seen))
        for pattern, value in _mapping(schema.get("patternProperties")).items():
            kind = self.type_of(value, indent + _NEST, seen)
            lines.append(f"{indent}[key: string]: {kind}, // keys match {_one_line(pattern)}")
        if isinstance(extra := schema.get("additionalProperties"), Mapping) and extra:
            lines.append(f"{indent}[key: string]: {self.type_of(extra, indent + _NEST, seen)},")
        return "\n".join((*lines, indent + "}"))

    def _property(self, key: str, value: Any, required: bool, indent: str, seen: tuple[str, ...]) -> Iterator[str]:
        name = (key if _IDENTIFIER.match(key) else literal(key)) + ("" if required else "?")
        if not isinstance(value, Mapping):
            yield f"{indent}{name}: {self.type_of(value, indent + _NEST, seen)},"
            return
        schema, inner = self.resolve(value, seen)
        before = set(self.recursive)
        self.recursive = set()
        lines = list(self._typed(name, schema, indent, inner))
        comments = list(self._comments(key, schema))
        comments += [f"{self._name(ref)} is this type" for ref in sorted(self.recursive) if ref not in seen]
        self.recursive = before | {ref for ref in self.recursive if ref in seen}
        yield from (f"{indent}// {line}".rstrip() for line in comments)
        yield from lines

    def _typed(self, name: str, schema: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> Iterator[str]:
        """The lines of a property after its comments."""
        default = _default(schema)
        variants = self.variants(schema) if "$ref" not in schema else []
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
            text = self.type_of(variant, indent + "   ", seen)
            yield f"{indent} | {text}" + (f" // {remark}" if remark else "")
        yield f"{indent},"

    @staticmethod
    def _comments(key: str, schema: Mapping[str, Any]) -> Iterator[str]:
        title = schema.get("title")
        if isinstance(title, str) and not _is_automatic_title(title, key):
            yield _one_line(title)
            yield ""
        yield from _lines(schema.get("description"))
        if isinstance(examples := schema.get("examples"), list) and examples:
            yield "Examples:"
            yield from (f"- {literal(example)}" for example in examples)

    @staticmethod
    def _remark(variant: Mapping[str, Any], parent: Mapping[str, Any]) -> str:
        """What a variant says about itself that its property has not said above."""
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


def _merge(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Both schemas at once: members are united, everything else is taken from the later one."""
    merged = {**left, **right}
    for key in ("properties", "patternProperties"):
        if both := {**_mapping(left.get(key)), **_mapping(right.get(key))}:
            merged[key] = both
    if both_required := [*_list(left.get("required")), *_list(right.get("required"))]:
        merged["required"] = both_required
    return merged
