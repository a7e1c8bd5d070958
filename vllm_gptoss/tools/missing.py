"""What to install where a package cannot be imported."""

from __future__ import annotations

import importlib.metadata
import re

from vllm_gptoss.tools.version import NAME

DISTRIBUTIONS = {
    "bs4": "beautifulsoup4",
    "httpx2": "mcp",
    "markdown_it": "markdown-it-py",
    "mcp_types": "mcp",
    "openai_harmony": "oss-harmony",
    "referencing": "jsonschema",
    "traitlets": "ipykernel",
    "yaml": "PyYAML",
    "zmq": "jupyter_client",
}
"""Modules that the package imports, and the requirement that brings each, where the names differ."""


def reason(error: Exception) -> str:
    """`error` in one line; of an import that failed, with the command that installs the package."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if module in ("", "vllm", "vllm_gptoss"):
        return f"{type(error).__name__}: {error}"
    return f"{error}; pip install '{requirement(module)}'"


def requirement(module: str) -> str:
    """The requirement in the package's metadata, of any extra, that installs `module`; else `module` itself."""
    wanted = DISTRIBUTIONS.get(module, module)
    try:
        lines = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
        lines = []
    for line in lines:
        found = line.partition(";")[0].strip()
        if _canonical(re.split(r"[^\w.-]", found, maxsplit=1)[0]) == _canonical(wanted):
            return found
    return wanted


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
