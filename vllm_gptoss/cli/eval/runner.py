"""Many samples at once: a fixed number of workers over one list of questions, a line for each as it ends.

Memory holds the questions, one dialogue a worker, and nothing of what was answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_gptoss.cli.eval import dialogue
from vllm_gptoss.cli.eval.apis import LOST, Fate, RequestSettings
from vllm_gptoss.cli.eval.client import EvalClient
from vllm_gptoss.cli.eval.questions import Question, QuestionSet
from vllm_gptoss.cli.eval.record import Key, Recorder

Told = Callable[[Key, Fate], None]


class StoppedError(Exception):
    """The server has stopped answering; completed samples are stored."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Every question of every set, at every effort, `repeats` times (None: the set's number)."""

    sets: Sequence[QuestionSet]
    efforts: Sequence[str | None]
    seed: int
    repeats: int | None = None

    def times(self, of: QuestionSet) -> int:
        """How often each question of a set is sent at one effort."""
        return self.repeats or of.repeats

    def samples(self) -> Iterator[tuple[Key, Question]]:
        """All samples, each with its key."""
        for of in self.sets:
            for effort in self.efforts:
                for repeat in range(self.times(of)):
                    for question in of.questions:
                        yield (of.name, effort or "", question.id, repeat), question

    def __len__(self) -> int:
        return sum(len(of.questions) * self.times(of) for of in self.sets) * len(self.efforts)


async def run(
    client: EvalClient, settings: RequestSettings, plan: SamplePlan, recorder: Recorder, skip: set[Key],
    told: Told, *, at_once: int, keep_reasoning: bool,
) -> None:  # fmt: skip
    """Runs a plan's samples except `skip`; `told` is called after each.

    Raises:
        StoppedError: the server has stopped answering: two rounds of the workers, and 20 samples more, were lost.
    """
    left = ((key, question) for key, question in plan.samples() if key not in skip)
    in_a_row = 0

    async def work() -> None:
        nonlocal in_a_row
        for key, question in left:
            name, effort, which, repeat = key
            sample = await dialogue.run(client, settings, effort or None, question.asked(plan.seed, repeat))
            head = {"eval": name, "effort": effort or None, "id": which, "repeat": repeat}
            recorder.add(head | sample.line(keep_reasoning))
            told(key, sample.verdict.fate)
            in_a_row = in_a_row + 1 if sample.verdict.fate in LOST else 0
            if in_a_row >= 2 * at_once + 20:
                raise StoppedError(f"{in_a_row} samples in a row were lost, the last: {sample.verdict.why}")

    workers = [asyncio.create_task(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


@contextlib.contextmanager
def progress(total: int, there: int, console: Console) -> Iterator[Told]:
    """Yields the function to call after every sample: a bar in a terminal, a line every tenth elsewhere.

    there: samples of an earlier command.
    """
    if there:
        console.print(f"{there} of {total} samples are there already", highlight=False)
    counts: Counter[Fate] = Counter()
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=there, state="")

        def told(key: Key, fate: Fate) -> None:
            counts[fate] += 1
            lost, right = sum(counts[one] for one in LOST), counts[Fate.RIGHT]
            name, state = (
                f"{key[0]} {key[1]}".strip(),
                f"{right} right, {counts.total() - lost - right} not, {lost} lost",
            )
            bar.update(task, advance=1, description=name, state=state)
            done = there + counts.total()
            if not console.is_terminal and 10 * done // total > 10 * (done - 1) // total:
                left = (bar.tasks[0].elapsed or 0) / counts.total() * (total - done)
                line = f"{done} of {total}: {state} ({name}), {left:.0f} s left"
                console.print(line, markup=False, highlight=False)

        yield told
