"""Text that means nothing: filler for the parts of a prompt that an answer must not depend on."""

from __future__ import annotations

import json
import random

_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue side
kind head house service friend father power hour game line end member law car city community name
president team minute idea kid body information back parent face others level office door health person
art war history party result change morning reason research girl guy moment air teacher force education
good new first last long great little own other old big high different small large next early young
important few public bad same able be have do say get make go know take see come think look want give
use find tell ask seem feel try leave call the of and to in that it with for as on at by from or an but
not what all were when we there can more if out so up about who which their will would could has her him
this
""".split()  # noqa: SIM905 - three hundred quotes would not be clearer
_MARKS = (". ", ", ", "\n", "? ", ": ", "\n\n", " - ", '", "', "! ", " (", ") ", "; ")

INSTRUCTIONS = (
    "You are a helpful assistant.",
    "You are a helpful agent.",
    "Be concise.",
    "Answer briefly and politely.",
    "You are a helpful weather agent. Use the tools to answer.",
    "Use a friendly tone.",
    "Think step by step.",
    "Always use the tools that are offered.",
    "You are a coding agent running in a terminal. Work on the task until it is done.",
    "Respond in English.",
    "You help customers of an online shop. Never invent facts.",
    "Use tools when they help. Cite your sources.",
)


def filler(rng: random.Random, words: int) -> str:
    """`words` random words and numbers with punctuation."""
    parts: list[str] = []
    for _ in range(words):
        kind = rng.random()
        word = str(rng.randint(0, 10 ** rng.randint(1, 6))) if kind < 0.1 else rng.choice(_WORDS)
        if kind > 0.9:
            word = word.capitalize()
        parts.append(word + (rng.choice(_MARKS) if rng.random() < 0.15 else " "))
    return "".join(parts).strip()


def output(rng: random.Random, words: int) -> str:
    """Possible tool outputs: prose, one line repeated, numbered lines, records."""
    kind = rng.random()
    if kind < 0.5 or words < 4:
        return filler(rng, words)
    if kind < 0.65:
        line = rng.choice(("x" * 100, "-" * 100, "=" * 60, filler(rng, 4), str(rng.random()), "ok"))
        return "\n".join([line] * max(1, words // 6))
    if kind < 0.85:
        start, width = rng.choice((0, 1, 40)), rng.choice((4, 12))
        lines = (f"L{start + i}: {filler(rng, width)}" for i in range(max(1, words // width)))
        return f"[{rng.randint(0, 3)}] {filler(rng, 4)}\n**viewing lines [0 - 9] of 9**\n\n" + "\n".join(lines)
    records = [{filler(rng, 1): filler(rng, 2), "id": rng.randint(0, 999)} for _ in range(max(1, words // 6))]
    return json.dumps(records, indent=rng.choice((None, 2)))
