"""Changes definitions in a copy of vLLM's source."""

from __future__ import annotations

from typing import Any

from vllm_gptoss._vllm.compatibility import VllmSource


def mutated(content: bytes, listed: Any) -> bytes:
    """The source with another statement in each of the listed functions and classes, another value in each constant."""
    nodes, edits, starts = VllmSource(content).nodes, [], [0]
    for row in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    for name in listed:
        for node in nodes[name]:
            if body := getattr(node, "body", None):
                first = min([body[0], *getattr(body[0], "decorator_list", [])], key=lambda each: each.lineno)
                at = starts[first.lineno - 1] + first.col_offset - (first is not body[0])  # before the @
                alone = not content[starts[first.lineno - 1] : at].strip()
                edits.append(
                    (at, b"mutated = 1" + (b"\n" + b" " * (at - starts[first.lineno - 1]) if alone else b"; "))
                )
            elif (value := node.value) is not None:  # type: ignore[attr-defined]
                edits.append((starts[value.lineno - 1] + value.col_offset, b"mutated or "))
    for at, text in sorted(edits, reverse=True):
        content = content[:at] + text + content[at:]
    return content
