"""The arguments of a server as the plugin finds them, where it attaches."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any


def arguments(backend: str = "auto", **given: Any) -> Namespace:
    defaults = {
        "enable_auto_tool_choice": False,
        "tool_call_parser": None,
        "tool_strict_level": "auto",
        "middleware": [],
    }
    structured = SimpleNamespace(reasoning_parser="", backend=backend)
    return Namespace(**{**defaults, **given}, structured_outputs_config=structured)
