"""The output of one response as it grows: numbered events, and items with stable ids and places.

An event is a plain dict, ready for JSON: one is made per generated token, so no model is built for it. Tests parse
every event with openai-python's type of it, strictly. Items follow openai-python's types the same way.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Protocol

from vllm_gptoss.server.responses.request.items import Item
from vllm_gptoss.server.streaming.direct_send import Outlet

Event = dict[str, Any]

Batches = AsyncGenerator[list[Event], None]
"""Events of one response, those together that belong together; closing it stops the response."""


class TextDeltas:
    """The text of one message: events that differ in number and text only. `after`: fields after the text."""

    def __init__(self, kind: str, where: Mapping[str, Any], after: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._kind, self._where, self._after = kind, where, after

    def event(self, number: int, text: str) -> Event:
        """The event numbered so that adds `text`."""
        return {"type": self._kind, "sequence_number": number, **self._where, "delta": text, **self._after}


class Live(Protocol):
    """The reader of a running response, in the same process. Its bytes go to `outlet`."""

    outlet: Outlet

    def framed(self, events: Sequence[Event]) -> bytes:
        """The bytes of the next events of the response, at least one."""

    def framed_text(self, deltas: TextDeltas, number: int, text: str) -> bytes:
        """The same for the event of `deltas`."""


TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled", "error"})
"""Types of a stream's last event. OpenAI's API has no `response.cancelled`: its stream ends without an event."""


def has_ended(batch: Sequence[Event]) -> bool:
    """Whether the last of these events is the stream's last."""
    return bool(batch) and batch[-1]["type"] in TERMINAL


class Output:
    """Numbers events and places items. An item is added once, keeps its index and id, and is updated in place."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._sequence = 0
        self._open: set[int] = set()

    def event(self, kind: str, **fields: Any) -> Event:
        """The next event, of type `kind`."""
        return {"type": kind, "sequence_number": self.number(), **fields}

    def delta(self, kind: str, where: Mapping[str, Any], text: str) -> Event:
        """The next event, which adds `text` at `where`; one per token, so it is made without keyword arguments."""
        return {"type": kind, "sequence_number": self.number(), **where, "delta": text}

    def number(self) -> int:
        """The next sequence number; the caller must emit that event."""
        number = self._sequence
        self._sequence = number + 1
        return number

    def add(self, item: Item) -> tuple[int, Event]:
        """Places `item`; returns its index and the event that announces it."""
        index = len(self.items)
        self.items.append(item)
        self._open.add(index)
        return index, self.event("response.output_item.added", output_index=index, item=dict(item))

    def done(self, index: int, **changes: Any) -> Event:
        """Applies the last `changes` to an item and announces that it is final."""
        self.items[index].update(changes)
        self._open.discard(index)
        return self.event("response.output_item.done", output_index=index, item=dict(self.items[index]))

    def give_up(self) -> list[Event]:
        """Ends the items that nothing will end any more; those that have a status become `incomplete`."""
        return [
            self.done(index, **({"status": "incomplete"} if "status" in self.items[index] else {}))
            for index in sorted(self._open)
        ]


async def last_body(batches: Batches) -> dict[str, Any]:
    """Drains a response's events; its final body, empty if there was no terminal event."""
    body: dict[str, Any] = {}
    async with aclosing(batches):
        async for batch in batches:
            if batch and batch[-1]["type"] in TERMINAL:
                body = batch[-1]["response"]
    return body
