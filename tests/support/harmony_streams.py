"""Token streams for the Harmony tests: what models write, well formed and not."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from vllm_gptoss.server.harmony.events import ContentDelta, HarmonyEvent, MessageEnded, MessageStarted, Repair, Repaired
from vllm_gptoss.server.harmony.offered import OfferedTools
from vllm_gptoss.server.harmony.tokens import FIRST_CONTROL, VOCABULARY, control_name, encoding, token_bytes

TOOLS = OfferedTools(
    {
        "functions": frozenset({"get_weather", "now", "web-browsing"}),
        "browser": frozenset({"search", "open", "find"}),
        "python": frozenset(),
        "my_mcp": frozenset({"lookup"}),
    }
)

WORDS = [
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>", "<|endoftext|>"),
    *("assistant", "user", "analysis", "commentary", "final", " to=", "to=functions.get_weather", " to=python"),
    *("functions.", "get_weather", "json", " code", " ", "\n", '{"city": "Ulm"}', "Hello", " world", "好", "👩‍🚀", "é"),
    *("<|reserved_200013|>", " to=functions.nope", " to=user", "finalHello", "commentaryto=functions.now"),
]


def tokens(text: str) -> list[int]:
    """Ids of `text`, where control tokens are control tokens."""
    ids: list[int] = encoding().encode(text, allowed_special="all")
    return ids


_WORD_IDS = [tokens(word) for word in WORDS]
# Bytes that are no characters by themselves: every prefix of a multi-byte character and stray continuation bytes.
_PARTIAL = [i for i in range(2000) if b"\xff" > token_bytes(i)[:1] > b"\x7f"][:64]

any_token = st.one_of(
    st.sampled_from(_WORD_IDS),
    st.sampled_from(_PARTIAL).map(lambda token: [token]),
    st.integers(0, VOCABULARY + 50).map(lambda token: [token]),
)
streams = st.lists(any_token, max_size=60).map(lambda parts: [token for part in parts for token in part])


def spelled(ids: Sequence[int]) -> str:
    """The generated text: control tokens spelled, each run of text tokens decoded with U+FFFD for what is no UTF-8."""
    out, run = "", b""
    for token in ids:
        if token < FIRST_CONTROL:
            run += token_bytes(token)
        else:
            out, run = out + run.decode("utf-8", "replace") + control_name(token), b""
    return out + run.decode("utf-8", "replace")


def transcript(events: Sequence[HarmonyEvent]) -> str:
    """The generated text, joined from the events."""
    out, is_added = "", False
    for event in events:
        match event:
            case ContentDelta(text=text) if not is_added:
                out += text
            case MessageStarted(raw=raw) | MessageEnded(raw=raw) | Repaired(raw=raw):
                out += raw
        is_added = isinstance(event, Repaired) and event.kind is Repair.EMPTY_ARGUMENTS
    return out


def merged(events: Sequence[HarmonyEvent]) -> list[HarmonyEvent]:
    """The events with neighbouring deltas joined: what does not depend on how a stream was cut."""
    out: list[HarmonyEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            assert last.index == event.index
            assert last.first + last.tokens == event.first
            out[-1] = ContentDelta(last.index, last.text + event.text, last.tokens + event.tokens, last.first)
        else:
            out.append(event)
    return out
