"""One writer per kind of Harmony message: from text as it is generated to an item and its events.

Orders of events follow the "Streaming events" reference of the OpenAI API. An item that a tool completes gets its
`completed` and `output_item.done` only once the tool has run (`tool_writers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.server.harmony.custom import InputUnwrapper
from vllm_gptoss.server.harmony.events import Channel
from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.run.citations import Citations
from vllm_gptoss.server.responses.run.events import Event, Output, TextDeltas
from vllm_gptoss.tools.protocol import File, Source

Logprobs = Sequence[dict[str, Any]] | None


class Writer:
    """Writes the item of one message. `cut`: generation stopped inside the message.

    text_deltas: the events of plain text, where one event carries it; `adds` then replaces `delta`
    """

    text_deltas: TextDeltas | None = None

    def adds(self, text: str) -> bool:
        """Adds text that its event carries unchanged. False if it needs `delta`; then nothing was added."""
        return True

    def delta(self, text: str, logprobs: Logprobs = None) -> list[Event]:
        """The events of more text; `logprobs` are those of its tokens, as the API shows them."""
        return []

    def end(self, text: str, *, cut: bool) -> list[Event]:
        """The events of the message's end; `text` is all of it."""
        return []


class ItemWriter(Writer):
    """A writer of an item, which `_start` places. `kind`: of its events; `prefix`: of its id."""

    kind: str
    prefix: str

    def __init__(self, out: Output) -> None:
        self._out = out
        self.item_id = ids.new(self.prefix)
        self._index = -1
        self._where: dict[str, Any] = {}

    def _start(self) -> list[Event]:
        raise NotImplementedError

    def _started(self) -> list[Event]:
        """The events of the item's start, where it is not placed yet."""
        return self._start() if self._index < 0 else []

    def _place(self, item: Mapping[str, Any]) -> list[Event]:
        self._index, added = self._out.add({"id": self.item_id, **item})
        self._where = {"item_id": self.item_id, "output_index": self._index}
        return [added]

    def _event(self, name: str, /, **fields: Any) -> Event:
        return self._out.event(f"response.{self.kind}{name}", **self._where, **fields)


@dataclass(frozen=True, slots=True)
class Style:
    """Optional parts of items. `seal` encrypts reasoning, or is None; `source` resolves the cursor of a citation."""

    reasoning: bool = True
    summary: str | None = None
    seal: Callable[[str], str] | None = None
    logprobs: bool = False
    outputs: bool = False
    sources: bool = False
    source: Callable[[int, int | None], Source | None] = lambda cursor, line: None


def status(cut: bool) -> str:
    """The status of an item that has ended."""
    return "incomplete" if cut else "completed"


class SilentWriter(Writer):
    """Writes nothing: reasoning that is not included, or a call above `max_tool_calls`."""


class ReasoningWriter(ItemWriter):
    """`reasoning`: its text, a summary, and its encrypted form, each if requested.

    The summary is the text itself, without another model: all of it for `auto` and `detailed`, its first sentence for
    `concise`.
    """

    kind, prefix = "", "rs"

    def __init__(self, out: Output, style: Style) -> None:
        super().__init__(out)
        self._style = style
        self._where_text: dict[str, Any] = {}
        self._where_summary: dict[str, Any] = {}

    def _start(self) -> list[Event]:
        content: dict[str, Any] = {"content": []} if self._style.reasoning else {}
        events = self._place({"type": "reasoning", "status": "in_progress", "summary": [], **content})
        self._where_text = {**self._where, "content_index": 0}
        self._where_summary = {**self._where, "summary_index": 0}
        if self._style.reasoning and self._style.summary not in ("auto", "detailed"):
            self.text_deltas = TextDeltas("response.reasoning_text.delta", self._where_text)
        if self._style.reasoning:
            part = {"type": "reasoning_text", "text": ""}
            events.append(self._event("content_part.added", content_index=0, part=part))
        if self._style.summary in ("auto", "detailed"):
            part = {"type": "summary_text", "text": ""}
            events.append(self._event("reasoning_summary_part.added", summary_index=0, part=part))
        return events

    def delta(self, text: str, logprobs: Logprobs = None) -> list[Event]:
        events = self._started()
        if self._style.reasoning:
            events.append(self._out.delta("response.reasoning_text.delta", self._where_text, text))
        if self._style.summary in ("auto", "detailed"):
            events.append(self._out.delta("response.reasoning_summary_text.delta", self._where_summary, text))
        return events

    def end(self, text: str, *, cut: bool) -> list[Event]:
        if self._index < 0:
            return []
        events: list[Event] = []
        changes: dict[str, Any] = {"status": status(cut)}
        if self._style.reasoning:
            part = {"type": "reasoning_text", "text": text}
            changes["content"] = [part]
            events.append(self._event("reasoning_text.done", content_index=0, text=text))
            events.append(self._event("content_part.done", content_index=0, part=part))
        if self._style.summary:
            events += self._summarise(text, changes)
        if self._style.seal:
            changes["encrypted_content"] = self._style.seal(text)
        return [*events, self._out.done(self._index, **changes)]

    def _summarise(self, text: str, changes: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if self._style.summary == "concise":
            text = first_sentence(text)
            part = {"type": "summary_text", "text": ""}
            events.append(self._event("reasoning_summary_part.added", summary_index=0, part=part))
            events.append(self._out.delta("response.reasoning_summary_text.delta", self._where_summary, text))
        part = {"type": "summary_text", "text": text}
        changes["summary"] = [part]
        events.append(self._event("reasoning_summary_text.done", summary_index=0, text=text))
        events.append(self._event("reasoning_summary_part.done", summary_index=0, part=part))
        return events


def first_sentence(text: str) -> str:
    """Up to the first full stop, question mark, or line end that ends a sentence; at most 300 characters."""
    for at, character in enumerate(text[:300]):
        if character == "\n" or (character in ".?!" and text[at + 1 : at + 2] in ("", " ", "\n")):
            return text[: at + 1].strip()
    return text[:300].strip()


class MessageWriter(ItemWriter):
    """`message`: the final answer, or on commentary the text before tool calls."""

    kind, prefix = "", "msg"

    def __init__(self, out: Output, style: Style, channel: Channel, files: list[File]) -> None:
        super().__init__(out)
        self._files = files
        self._keeps_logprobs = style.logprobs
        self._citations = Citations(style.source)
        self._phase = "final_answer" if channel is Channel.FINAL else "commentary"
        self._annotations: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._pending: list[dict[str, Any]] = []

    def _start(self) -> list[Event]:
        item = {"type": "message", "role": "assistant", "phase": self._phase, "status": "in_progress", "content": []}
        added = self._place(item)
        self._where["content_index"] = 0
        self.text_deltas = TextDeltas("response.output_text.delta", self._where, {"logprobs": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [*added, self._event("content_part.added", part=part)]

    def adds(self, text: str) -> bool:
        if self._pending or not self._citations.passes(text):
            return False
        self._pieces.append(text)
        return True

    def delta(self, text: str, logprobs: Logprobs = None) -> list[Event]:
        events = self._started()
        if logprobs and self._keeps_logprobs:
            self._pending.extend(logprobs)
        for piece, annotation in self._citations.feed(text):
            self._write(piece, annotation, events)
        return events

    def _write(self, piece: str, annotation: dict[str, Any] | None, events: list[Event]) -> None:
        self._pieces.append(piece)
        logprobs, self._pending = self._pending, []
        self._logprobs += logprobs
        event = self._out.delta("response.output_text.delta", self._where, piece)
        event["logprobs"] = logprobs
        events.append(event)
        if annotation:
            events.append(self._annotate(annotation))

    def _annotate(self, annotation: dict[str, Any]) -> Event:
        self._annotations.append(annotation)
        number = len(self._annotations) - 1
        return self._event("output_text.annotation.added", annotation_index=number, annotation=annotation)

    def _cite_files(self, text: str) -> list[Event]:
        """Files that tools left since the last answer, at their first mention, else at the end of the text."""
        events = []
        if self._phase == "final_answer":
            for file in self._files:
                events.append(self._annotate(file_citation(file, text)))
            self._files.clear()
        return events

    def end(self, text: str, *, cut: bool) -> list[Event]:
        if self._index < 0 and (self._phase == "commentary" or cut):
            return []  # an empty message
        events = self._started()
        for piece, annotation in self._citations.flush():
            self._write(piece, annotation, events)
        text = "".join(self._pieces)
        events += self._cite_files(text)
        self._logprobs += self._pending
        part = {"type": "output_text", "text": text, "annotations": self._annotations, "logprobs": self._logprobs}
        events.append(self._event("output_text.done", text=text, logprobs=self._logprobs))
        events.append(self._event("content_part.done", part=part))
        events.append(self._out.done(self._index, content=[part], status=status(cut)))
        return events


def file_citation(file: File, text: str) -> dict[str, Any]:
    """`container_file_citation` of a file, spanning its first mention."""
    for mention in (f"sandbox:/mnt/data/{file.filename}", f"/mnt/data/{file.filename}", file.filename):
        if (start := text.find(mention)) >= 0:
            break
    else:
        start, mention = len(text), ""
    return {
        "type": "container_file_citation",
        "container_id": file.container_id,
        "file_id": file.file_id,
        "filename": file.filename,
        "start_index": start,
        "end_index": start + len(mention),
    }


class _CallWriter(ItemWriter):
    """The item of a call of one of the request's own tools. `namespace` is set for a tool inside one."""

    type: str
    field: str

    def __init__(self, out: Output, name: str, namespace: str | None) -> None:
        super().__init__(out)
        self._name = name
        self._namespace = {"namespace": namespace} if namespace else {}

    def _start(self) -> list[Event]:
        call = {"type": self.type, "call_id": ids.new("call"), "name": self._name, self.field: ""}
        return self._place({**call, "status": "in_progress", **self._namespace})


class FunctionCallWriter(_CallWriter):
    """`function_call`: JSON arguments for a function."""

    kind, prefix, type, field = "function_call_arguments", "fc", "function_call", "arguments"

    def _start(self) -> list[Event]:
        events = super()._start()
        self.text_deltas = TextDeltas("response.function_call_arguments.delta", self._where)
        return events

    def delta(self, text: str, logprobs: Logprobs = None) -> list[Event]:
        return [*self._started(), self._event(".delta", delta=text)]

    def end(self, text: str, *, cut: bool) -> list[Event]:
        # A call without arguments generates nothing and means `{}`.
        events = self.delta(text) if self._index < 0 else []
        events.append(self._event(".done", name=self._name, arguments=text))
        return [*events, self._out.done(self._index, arguments=text, status=status(cut))]


class CustomCallWriter(_CallWriter):
    """`custom_tool_call`: free text for a tool; see `harmony/custom.py`. `raw`: no JSON around it."""

    kind, prefix, type, field = "custom_tool_call_input", "ctc", "custom_tool_call", "input"

    def __init__(self, out: Output, name: str, namespace: str | None, *, raw: bool) -> None:
        super().__init__(out, name, namespace)
        self._unwrap = None if raw else InputUnwrapper()
        self._pieces: list[str] = []

    def delta(self, text: str, logprobs: Logprobs = None) -> list[Event]:
        return self._started() + self._add(self._unwrap.feed(text) if self._unwrap else text)

    def _add(self, piece: str) -> list[Event]:
        if not piece:
            return []
        self._pieces.append(piece)
        return [self._event(".delta", delta=piece)]

    def end(self, text: str, *, cut: bool) -> list[Event]:
        events = self._started()
        if self._unwrap:
            events += self._add(self._unwrap.end(text, cut=cut))
        value = "".join(self._pieces)
        events.append(self._event(".done", input=value))
        return [*events, self._out.done(self._index, input=value, status=status(cut))]
