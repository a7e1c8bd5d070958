"""Random prompts for every step, as arrays: `python -m demo.dataset FILE.npz` writes what `demo.train` reads.

Arrays: `tokens` all sequences joined (row numbers of the used vocabulary), `marks` per token (0 fixed, 1 noise,
2 to be learned), `offsets` the sequences' borders, `steps` which step each belongs to (the last one is the fallback),
`used` the token ids behind the row numbers, `outputs` the row numbers that are ever generated.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from demo.conversation import Conversation, Step, Turn, conversations, tools
from demo.render import FALLBACK, Prompt, encode, messages, preamble, target
from demo.words import filler

TWINS = ("say-hello", "weather-paris", "capital", "weather-tokyo", "zero-arguments", "zero-arguments-empty")
AFTER_ANYTHING = ("compaction", "summarize", "or-compacted")
PROMPT_END = "<|start|>assistant"


def steps() -> list[tuple[Conversation, int, int]]:
    """Every (conversation, turn, step) to be learned."""
    return [(c, t, s) for c in conversations() for t, turn in enumerate(c.turns) for s in range(len(turn.steps))]


def weighted() -> list[int]:
    """Indexes of `steps()`, those that are easily confused or long several times."""
    out: list[int] = []
    for index, (conversation, turn, step) in enumerate(steps()):
        contrast = conversation.effort or conversation.tools is None or conversation.instructions
        long = len(conversation.turns[turn].steps[step].text) > 200 or len(conversation.turns[turn].steps) > 1
        out += [index] * (4 if contrast else 2 if long or conversation.id in TWINS else 1)
    return out


def sample(conversation: Conversation, turn: int, step: int, rng: random.Random) -> tuple[Prompt, str]:
    """One random prompt for a step, and the text to generate."""
    prompt = Prompt()
    wanted = conversation.turns[turn].steps[step]
    if conversation.raw:
        prompt.add(conversation.turns[turn].user)
        return prompt, wanted.text + "<|return|>"
    preamble(prompt, conversation, rng)
    likely = 0.7 if conversation.id in AFTER_ANYTHING else 0.12
    for _ in range(rng.choice((1, 1, 2, 6)) if rng.random() < likely else 0):
        _earlier(prompt, rng, conversation.id)
    messages(prompt, conversation, turn, step, rng)
    prompt.add(PROMPT_END)
    return prompt, target(wanted)


def _earlier(prompt: Prompt, rng: random.Random, but: str = "") -> None:
    """An earlier exchange: a known conversation, a summary or an unknown exchange."""
    if rng.random() < 0.4:
        other = rng.choice([c for c in conversations() if not c.raw and c.id != but])
        turn = rng.randrange(len(other.turns))
        messages(prompt, Conversation(other.id, other.turns), turn, len(other.turns[turn].steps), rng)
        return
    role = rng.choice(("user", "developer", "user"))
    heading = "# Instructions\n\n" if role == "developer" and rng.random() < 0.6 else ""
    prompt.add(f"<|start|>{role}<|message|>{heading}")
    prompt.add(filler(rng, rng.choice((3, 20, 80))), noise=True)
    prompt.add("<|end|>")
    if role == "user" and rng.random() < 0.7:
        prompt.add("<|start|>assistant<|channel|>final<|message|>")
        prompt.add(FALLBACK.text if rng.random() < 0.3 else filler(rng, rng.choice((2, 15))), noise=True)
        prompt.add("<|end|>")


def _unknown(rng: random.Random) -> str:
    """An unknown user message: filler, or a known one with most words exchanged."""
    if rng.random() < 0.6:
        return filler(rng, rng.choice((1, 3, 6, 10, 20, 60, 200, 600)))
    texts = [turn.user.split() for c in conversations() if not c.raw for turn in c.turns]
    words = rng.choice([words for words in texts if len(words) > 3])
    kept = [w if rng.random() < 0.3 else filler(rng, 1) for w in words]
    if sum(a == b for a, b in zip(words, kept, strict=True)) > len(words) / 2:
        return filler(rng, len(words))
    rng.shuffle(kept)
    return " ".join(kept)


def fallback(rng: random.Random) -> tuple[Prompt, str]:
    """An unknown question in a random setting."""
    prompt = Prompt()
    setting = rng.choice([c for c in conversations() if not c.raw])
    preamble(
        prompt,
        Conversation(setting.id, (), tools=setting.tools, builtin=setting.builtin, namespaces=setting.namespaces),
        rng,
    )
    for _ in range(rng.choice((0, 0, 0, 1, 2, 6))):
        _earlier(prompt, rng)
    prompt.add("<|start|>user<|message|>")
    prompt.add(_unknown(rng), noise=rng.random() < 0.8)
    prompt.add("<|end|>" + PROMPT_END)
    return prompt, target(FALLBACK)


def known_ids() -> list[int]:
    """Token ids with a separate row: all of the conversations, tool names, digits and letters, frequent filler."""
    rng = random.Random(0)  # noqa: S311 - not a secret
    ids: set[int] = set()
    for item in steps():
        for _ in range(4):
            prompt, text = sample(*item, rng)
            ids.update(encode(text))
            tokens, marks = prompt.tokens()
            ids.update(t for t, noise in zip(tokens, marks, strict=True) if not noise)
    ids.update(encode(target(FALLBACK)))
    for conversation in conversations():
        for turn in conversation.turns:
            for step in turn.steps:
                for result in step.results:
                    ids.update(encode(result)[:40])
    ids.update(
        encode(
            " ".join(tools()["functions"]) + " 0 1 2 3 4 5 6 7 8 9 a b c d e f g h i j k l m n o p q r s t u v w x y z"
        )
    )
    return sorted(ids)


def build(count: int, seed: int, longest: int = 6144, focus: Sequence[str] = ()) -> dict[str, Any]:
    """`count` samples of all steps, one in eight the fallback; half of them of the conversations in `focus`."""
    rng = random.Random(seed)  # noqa: S311 - not a secret
    used = known_ids()
    row = {token: i for i, token in enumerate(used)}
    unknown = len(used)
    items, order = steps(), weighted()
    wanted_now = [i for i, (conversation, _, _) in enumerate(items) if conversation.id in focus]
    tokens: list[np.ndarray[Any, Any]] = []
    marks: list[np.ndarray[Any, Any]] = []
    which: list[int] = []
    said = [*(c.turns[t].steps[s] for c, t, s in items), FALLBACK]
    outputs = {row[token] for step in said for token in encode(target(step))}
    while len(which) < count:
        index = len(items) if rng.random() < 0.125 else order[len(which) % len(order)]
        if wanted_now and rng.random() < 0.5:
            index = rng.choice(wanted_now)
        prompt, text = fallback(rng) if index == len(items) else sample(*items[index], rng)
        ids, noise = prompt.tokens()
        wanted = encode(text)
        if len(ids) + len(wanted) > longest:
            continue
        outputs.update(row[t] for t in wanted)
        tokens.append(np.array([row.get(t, unknown) for t in ids + wanted], dtype=np.uint16))
        marks.append(np.array([*noise, *[2] * len(wanted)], dtype=np.uint8))
        which.append(index)
    lengths = [len(t) for t in tokens]
    return {
        "tokens": np.concatenate(tokens),
        "marks": np.concatenate(marks),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "steps": np.array(which, dtype=np.int32),
        "used": np.array(used, dtype=np.int32),
        "outputs": np.array(sorted(outputs), dtype=np.int32),
    }


def main() -> None:
    """Writes a dataset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--samples", type=int, default=16000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=6144, help="tokens; longer samples are left out")
    parser.add_argument("--focus", nargs="*", default=(), help="conversations that get half of the samples")
    args = parser.parse_args()
    data = build(args.samples, args.seed, args.longest, args.focus)
    np.savez_compressed(args.file, **data)
    lengths = np.diff(data["offsets"])
    print(
        f"{args.samples} samples, {len(data['tokens'])} tokens, lengths {lengths.mean():.0f} mean {lengths.max()} max,"
    )
    print(
        f"{len(data['used'])} used ids, {len(data['outputs'])} generated ids, {args.file.stat().st_size / 1e6:.1f} MB"
    )


__all__ = ["Step", "Turn", "build", "fallback", "known_ids", "sample", "steps"]

if __name__ == "__main__":
    main()
