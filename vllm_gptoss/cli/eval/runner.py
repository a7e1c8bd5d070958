"""Many samples at once: a fixed number of workers over one list of questions, a line for each as it ends.

Memory holds the questions, one dialogue a worker, and nothing of what was answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_gptoss.cli.eval.answer import LOST, Fate
from vllm_gptoss.cli.eval.apis import Api, Sampling
from vllm_gptoss.cli.eval.client import Client
from vllm_gptoss.cli.eval.dialogue import Dialogue, Sample
from vllm_gptoss.cli.eval.questions import Question, QuestionSet
from vllm_gptoss.cli.eval.record import MAX_TEXT, Key, Recorder


class StoppedError(Exception):
    """The server has stopped answering; completed samples are stored."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every question of every set, at every effort, `repeats` times (None: the set's number)."""

    sets: Sequence[QuestionSet]
    efforts: Sequence[str | None]
    seed: int
    repeats: int | None = None

    def times(self, of: QuestionSet) -> int:
        return self.repeats or of.repeats

    def samples(self) -> Iterator[tuple[Key, Question]]:
        for of in self.sets:
            for effort in self.efforts:
                for repeat in range(self.times(of)):
                    for question in of.questions:
                        yield (of.name, effort or "", question.id, repeat), question

    def __len__(self) -> int:
        return sum(len(of.questions) * self.times(of) for of in self.sets) * len(self.efforts)


@dataclass(slots=True)
class Runner:
    """Runs a plan's missing samples. `told` is called after every sample with its key and fate."""

    client: Client
    api: Api
    sampling: Sampling
    plan: Plan
    recorder: Recorder
    at_once: int
    keep_reasoning: bool = False
    told: Callable[[Key, Fate], None] = lambda key, fate: None
    counts: Counter[Fate] = field(default_factory=Counter)
    _in_a_row: int = 0

    @property
    def patience(self) -> int:
        """Lost samples in a row after which there is no use in going on: two rounds of the workers, and some."""
        return 2 * self.at_once + 20

    async def run(self, skip: set[Key]) -> None:
        """Raises StoppedError where the server has stopped answering."""
        left = ((key, question) for key, question in self.plan.samples() if key not in skip)
        workers = [asyncio.create_task(self._work(left)) for _ in range(self.at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, left: Iterator[tuple[Key, Question]]) -> None:
        for key, question in left:
            asked = question.asked(self.plan.seed, key[3])
            sample = await Dialogue(self.client, self.api, self.sampling, key[1] or None, asked).run()
            self.recorder.add(self._line(key, asked, sample))
            self.counts[sample.verdict.fate] += 1
            self.told(key, sample.verdict.fate)
            self._judge_server(sample)

    def _judge_server(self, sample: Sample) -> None:
        if sample.verdict.fate not in LOST:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= self.patience:
            raise StoppedError(f"{self._in_a_row} samples in a row were lost, the last: {sample.verdict.why}")

    def _line(self, key: Key, question: Question, sample: Sample) -> dict[str, Any]:
        name, effort, which, repeat = key
        verdict, turns = sample.verdict, question.turns
        row: dict[str, Any] = {
            "eval": name, "effort": effort or None, "id": which, "repeat": repeat,
            "fate": verdict.fate.value, "why": verdict.why[:1000], "found": verdict.found[:1000],
            "expected": [_expected(turn) for turn in turns],
            "answer": [_clipped(said.text) for said in sample.said],
            "calls": [[call.name[:200], call.arguments[:4096]] for said in sample.said for _, call in said.calls][:100],
            "usage": {"input": sample.usage.input, "output": sample.usage.output, "reasoning": sample.usage.reasoning},
            "requests": sample.requests, "tries": sample.tries, "parts": verdict.parts,
            "seconds": round(sample.seconds, 4),
            "first_s": None if sample.first_s is None else round(sample.first_s, 4), "at": round(time.time(), 3),
        }  # fmt: skip
        if self.keep_reasoning:
            row["thought"] = [_clipped(said.reasoning) for said in sample.said]
        return row


def _expected(turn: Any) -> Mapping[str, Any]:
    """The checks that the turn has."""
    wanted = {
        "choice": turn.choice, "number": None if turn.number is None else str(turn.number), "equals": turn.equals,
        "says": list(turn.says), "calls": [[call.name, call.arguments] for call in turn.calls],
    }  # fmt: skip
    return {name: value for name, value in wanted.items() if value}


def _clipped(text: str) -> str:
    """The end of a text holds its answer."""
    if len(text) <= MAX_TEXT:
        return text
    return f"[{len(text) - MAX_TEXT} characters left out]{text[-MAX_TEXT:]}"
