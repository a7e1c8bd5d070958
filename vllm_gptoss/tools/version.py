"""The name of the tools for servers and web sites."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NAME = "vllm-gptoss"

try:
    VERSION = version(NAME)
except PackageNotFoundError:  # a source tree that was never installed
    VERSION = "0"
