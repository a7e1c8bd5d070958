"""The two built-in tools that gpt-oss was trained with, as the prompt shows them.

Their words are the tools' own; a test holds them against openai_harmony's.
"""

from __future__ import annotations

from vllm_gptoss.server.harmony.messages import ToolNamespace, ToolSpec
from vllm_gptoss.tools import protocol


def for_prompt(namespace: protocol.Namespace) -> ToolNamespace:
    """`namespace` without the tools that are hidden from the prompt."""
    tools = (tool for tool in namespace.tools if tool.include_in_prompt)
    specs = tuple(ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools)
    return ToolNamespace(namespace.name, namespace.description, specs)


PYTHON = for_prompt(protocol.python_namespace())
BROWSER = for_prompt(protocol.BROWSER)
