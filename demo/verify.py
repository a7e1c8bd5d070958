"""`python -m demo.verify [DIR]`: greedy recall of every step on real vLLM, for each renderer and for random prompts.

Prints a table and exits with 1 if a step is not generated token for token.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import dataset, prompts
from demo.expand import model_dir
from demo.render import FALLBACK, encode, encoding, target


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and what has to come out."""

    name: str
    source: str
    prompt: list[int]
    wanted: list[int]


def cases(fresh: int, seed: int = 7, every: int = 1) -> list[Case]:
    """Each `every`th step with our renderer, with vLLM's and with `fresh` random prompts; all raw and unknown ones."""
    rng = random.Random(seed)  # noqa: S311 - not a secret
    out = []
    chosen = (each for number, each in enumerate(dataset.steps()) if number % every == 0 or each[0].raw)
    for conversation, turn, step in chosen:
        wanted = conversation.turns[turn].steps[step]
        name = f"{conversation.id}/{turn}/{step}"
        if conversation.raw:
            out.append(Case(name, "raw", prompts.raw(conversation, turn), encode(wanted.text + "<|return|>")))
            continue
        goal = encode(target(wanted))
        out.append(Case(name, "ours", prompts.ours(conversation, turn, step), goal))
        out.append(Case(name, "vllm", prompts.upstream(conversation, turn, step), goal))
        for _ in range(fresh):
            prompt, _ = dataset.sample(conversation, turn, step, rng)
            out.append(Case(name, "random", encode(prompt.text), goal))
    for number in range(max(20, 20 * fresh)):
        prompt, _ = dataset.fallback(rng)
        out.append(Case(f"unknown/{number}", "unknown", encode(prompt.text), encode(target(FALLBACK))))
    return out


def engine(model: Path) -> Any:
    """vLLM in this process, on the CPU, small and eager."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # an eager engine too compiles a function, for logprobs
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM

    return LLM(str(model), enforce_eager=True, max_model_len=16384, seed=0, kv_cache_memory_bytes=2**28)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The output for a case, and the probability of its least likely token."""

    case: Case
    tokens: list[int]
    least: float

    @property
    def exact(self) -> bool:
        return self.tokens == self.case.wanted


def recall(llm: Any, wanted: list[Case]) -> list[Outcome]:
    """Greedy decoding of all cases."""
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=len(c.wanted) + 8, detokenize=False, logprobs=0) for c in wanted]
    inputs = [{"prompt_token_ids": c.prompt} for c in wanted]
    outputs = [o.outputs[0] for o in llm.generate(inputs, params, use_tqdm=False)]
    return [
        Outcome(
            case,
            list(out.token_ids),
            math.exp(min(p[t].logprob for p, t in zip(out.logprobs, out.token_ids, strict=True))),
        )
        for case, out in zip(wanted, outputs, strict=True)
    ]


def report(outcomes: list[Outcome]) -> bool:
    """Prints what failed, what was close, and a table; True if everything was exact."""
    for outcome in sorted(outcomes, key=lambda o: o.least):
        if not outcome.exact or outcome.least < 0.6:
            said = "close" if outcome.exact else repr(encoding().decode(outcome.tokens))
            print(f"{outcome.case.source:8} {outcome.case.name:24} {outcome.least:.2f} {said}")
    for source in dict.fromkeys(o.case.source for o in outcomes):
        group = [o for o in outcomes if o.case.source == source]
        exact, least = sum(o.exact for o in group), sorted(o.least for o in group)
        print(
            f"{source:8} {exact:5} of {len(group)} exact; least likely token {least[0]:.2f}, "
            f"in one of 20 cases below {least[len(least) // 20]:.3f}"
        )
    return all(o.exact for o in outcomes)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--fresh", type=int, default=1, help="random prompts per step")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--every", type=int, default=1, help="verify each N-th step alone")
    args = parser.parse_args()
    wanted = cases(args.fresh, args.seed, args.every)
    outcomes = recall(engine(args.model or model_dir()), wanted)
    sys.exit(0 if report(outcomes) else 1)


if __name__ == "__main__":
    main()
