"""What reading Harmony costs: our parser, the one of oss-harmony, and vLLM's around it, in microseconds a token.

    python benchmarks/harmony.py [--fuzz 1000000]

Streams: a long answer (2,000 tokens of text), an agent's turn (reasoning, preamble, call), and text without a header.
Each is fed one token at a time, as streaming does, and whole, as a request without streaming does. Best of seven runs,
so that other load on the machine counts little. `--fuzz N` instead feeds N random streams; an exception ends it.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from openai_harmony import Role, StreamableParser

from vllm_gptoss.server.harmony.offered import OfferedTools
from vllm_gptoss.server.harmony.parser import HarmonyParser
from vllm_gptoss.server.harmony.tokens import encode, encoding

TOOLS = OfferedTools({"functions": frozenset({"get_weather"}), "python": frozenset()})
PROSE = "It rained for three days; on the fourth, the river — quiet until then — rose past the old mill. 雨が降った。 "
SEED = 20_251_120


def tokens(text: str) -> list[int]:
    return list(encoding().encode(text, allowed_special="all"))


def streams() -> dict[str, list[int]]:
    prose = encode(PROSE * 80)[:1000]
    think, start = tokens("<|channel|>analysis<|message|>"), tokens("<|end|><|start|>assistant")
    call = tokens('<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>')
    answer = [*think, *prose, *start, *tokens("<|channel|>final<|message|>"), *prose, *tokens("<|return|>")]
    say = tokens("<|channel|>commentary<|message|>I will look it up.")
    return {"answer": answer, "agent": [*think, *prose[:60], *start, *say, *start, *call], "no header": prose}


def ours(ids: list[int], size: int) -> None:
    parser = HarmonyParser(TOOLS)
    for at in range(0, len(ids), size):
        parser.feed(ids[at : at + size])
    parser.finish(cut=False)


def oss_harmony(ids: list[int], size: int) -> None:
    """The library alone, read as vLLM reads it: three properties a token."""
    parser = StreamableParser(encoding(), role=Role.ASSISTANT)
    for token in ids:
        parser.process(token)
        _ = parser.current_channel, parser.current_recipient, parser.last_content_delta


def upstream() -> Callable[[list[int], int], None] | None:
    """vLLM's `HarmonyParser.process_chunk`, if vLLM is installed."""
    try:
        from vllm.parser.harmony import HarmonyParser as Upstream
    except ImportError:
        return None

    def run(ids: list[int], size: int) -> None:
        parser = Upstream(encoding(), None)
        for at in range(0, len(ids), size):
            parser.process_chunk(ids[at : at + size])
        parser.flush()

    return run


def cost(read: Callable[[list[int], int], None], ids: list[int], size: int) -> float:
    """Microseconds a token, best of seven."""
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        read(ids, size)
        best = min(best, time.perf_counter() - began)
    return best / len(ids) * 1e6


def measure() -> dict[str, Any]:
    readers = {"ours": ours, "oss-harmony": oss_harmony, "vLLM": upstream()}
    rows: dict[str, Any] = {}
    for name, ids in streams().items():
        for label, size in (("streamed", 1), ("whole", len(ids))):
            row: dict[str, Any] = {}
            for reader, read in readers.items():
                if read is None:
                    continue
                try:
                    row[reader] = round(cost(read, ids, size), 2)
                except Exception as error:  # oss-harmony alone refuses what has no header
                    row[reader] = type(error).__name__
            rows[f"{name}, {label}"] = row
    return rows


def fuzz(count: int) -> dict[str, Any]:
    """Short random streams of control tokens, header words, text and arbitrary ids."""
    words = [
        "assistant",
        "analysis",
        "commentary",
        "final",
        "to=",
        "to=functions.get_weather",
        "to=python",
        "json",
        "好",
    ]
    control = ["start", "end", "message", "channel", "constrain", "return", "call", "endoftext"]
    parts = [tokens(f"<|{name}|>") for name in control] + [tokens(word) for word in (*words, " ", "\n", "👩‍🚀")]
    rng, read, began = random.Random(SEED), 0, time.perf_counter()
    for number in range(count):
        ids: list[int] = []
        for _ in range(rng.randrange(12)):
            ids += rng.choice(parts) if rng.random() < 0.8 else [rng.randrange(201_200)]
        parser = HarmonyParser(TOOLS)
        parser.feed(ids)
        parser.finish(bool(number & 1))
        read += len(ids)
    return {"streams": count, "tokens": read, "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--fuzz", type=int, default=0, metavar="N")
    count = arguments.parse_args().fuzz
    logging.disable(logging.WARNING)
    result = fuzz(count) if count else measure()
    print(json.dumps({"python": platform.python_version(), "machine": platform.processor(), **result}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
