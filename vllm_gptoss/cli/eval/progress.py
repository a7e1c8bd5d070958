"""How far a run is: a bar with the time left in a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_gptoss.cli.eval.answer import LOST, Fate
from vllm_gptoss.cli.eval.record import Key

Told = Callable[[Key, Fate], None]


@contextlib.contextmanager
def progress(total: int, there: int, console: Console) -> Iterator[Told]:
    """Yields the function to call after every sample. there: samples of an earlier command."""
    if there:
        console.print(f"{there} of {total} samples are there already", highlight=False)
    counts: Counter[Fate] = Counter()
    with _bar(total, there, console) if console.is_terminal else _lines(total, there, console) as show:

        def told(key: Key, fate: Fate) -> None:
            counts[fate] += 1
            lost = sum(counts[one] for one in LOST)
            name = f"{key[0]} {key[1]}".strip()
            show(name, f"{counts[Fate.RIGHT]} right, {counts.total() - lost - counts[Fate.RIGHT]} not, {lost} lost")

        yield told


@contextlib.contextmanager
def _bar(total: int, there: int, console: Console) -> Iterator[Callable[[str, str], None]]:
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, completed=there, state="")
        yield lambda name, state: bar.update(task, advance=1, description=name, state=state)


@contextlib.contextmanager
def _lines(total: int, there: int, console: Console) -> Iterator[Callable[[str, str], None]]:
    began, count, shown = time.monotonic(), 0, 0

    def show(name: str, state: str) -> None:
        nonlocal count, shown
        count += 1
        tenth = 10 * (there + count) // max(1, total)
        if tenth > shown:
            shown = tenth
            left = (time.monotonic() - began) / count * (total - there - count)
            console.print(
                f"{there + count} of {total}: {state} ({name}), {left:.0f} s left", markup=False, highlight=False
            )

    yield show
