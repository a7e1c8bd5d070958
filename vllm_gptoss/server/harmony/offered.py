"""Which recipients count as tool calls in one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm_gptoss.server.harmony.messages import FUNCTIONS, ToolNamespace


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a request: namespace to tool names; with an empty set the namespace is the tool.

    free_text: full names of custom tools that take text, not JSON; a namespace without tools never takes JSON
    wrapped: full names of custom tools that take `{"input": …}`
    """

    namespaces: Mapping[str, frozenset[str]] = field(default_factory=dict)
    free_text: frozenset[str] = frozenset()
    wrapped: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        namespaces: Iterable[ToolNamespace] = (),
        functions: Iterable[str] = (),
        free_text: Iterable[str] = (),
    ) -> OfferedTools:
        """From the namespaces in the prompt, plus names of `functions`."""
        table = {n.name: frozenset(t.name for t in n.tools) for n in namespaces}
        if names := frozenset(functions):
            table[FUNCTIONS] = table.get(FUNCTIONS, frozenset()) | names
        return cls(table, frozenset(free_text))

    def takes_json(self, recipient: str) -> bool:
        """Whether the arguments of the offered tool `recipient` (full name) are a JSON object."""
        return recipient not in self.free_text and self.namespaces.get(recipient) != frozenset()

    def resolve(self, recipient: str) -> str | None:
        """The full name of the offered tool that `recipient` means, or None.

        Also understands names that the model shortens or prefixes wrongly, where only one offered tool fits:
        `get_weather` for `functions.get_weather`, `functions.browser.search` for `browser.search`, `python.exec` for
        `python`.
        """
        if self._is_offered(recipient):
            return recipient
        unprefixed = recipient.removeprefix(FUNCTIONS + ".")
        if unprefixed != recipient and self._is_offered(unprefixed):
            return unprefixed
        owners = [name for name, tools in self.namespaces.items() if recipient in tools]
        if len(owners) == 1:
            return f"{owners[0]}.{recipient}"
        namespace = unprefixed.split(".", 1)[0]
        return namespace if namespace != recipient and self.namespaces.get(namespace) == frozenset() else None

    def _is_offered(self, recipient: str) -> bool:
        if self.namespaces.get(recipient) == frozenset():
            return True
        # Namespaces and tools may both contain dots, so every split is tried.
        at = recipient.find(".")
        while at >= 0:
            if recipient[at + 1 :] in self.namespaces.get(recipient[:at], frozenset()):
                return True
            at = recipient.find(".", at + 1)
        return False


NO_TOOLS = OfferedTools()
