"""Resolves `$ref` within one JSON schema: a JSON pointer, percent-encoded or not, or an anchor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote


class References:
    """The references of one root schema."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def target(self, ref: str) -> Any:
        """The schema that `ref` names. Raises LookupError if it is not in this document."""
        fragment = unquote(ref[1:])
        if not ref.startswith("#"):
            raise LookupError(ref)
        if fragment and not fragment.startswith("/"):
            return self._anchors[fragment]
        node = self._root
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping):
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and len(key) < 10:
                node = node[int(key)]
            else:
                raise LookupError(ref)
        return node

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        """By name: `$anchor`, or `#name` as the `$id` of drafts before 2019."""
        found: dict[str, Any] = {}
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Mapping):
                for name in (node.get("$anchor"), str(node.get("$id", node.get("id"))).partition("#")[2]):
                    if isinstance(name, str) and name:
                        found.setdefault(name, node)
                waiting += node.values()
            elif isinstance(node, list):
                waiting += node
        return found
