"""`vllm-gptoss bench consistency` offline, with the distance of decode and prompts from float64 (`truth.py`).

    python -m benchmarks.consistency --model DIR --after reload,trainer --reload-from OTHER_DIR
    python -m benchmarks.consistency --shape 20b:2 --variant plugin --variant triton     # random weights

The distance from float64 shows stale weights on which decode and prompts agree.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import checkpoint, shapes, truth
from vllm_gptoss.cli.bench import consistency, worker

VOCABULARY = 8192
"""Of random checkpoints, so that the LM head is a small part of the file."""


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one engine in this process."""
    rows = consistency.measure(job)
    for row in rows:  # float64 takes the memory that the engine has left
        answers = row.pop("answers")
        row |= consistency.summary(answers) | from_float64(answers, _exact(row["weights"], answers))
    return rows


def from_float64(answers: list[consistency.Completion], exact: list[float]) -> dict[str, float]:
    """The distances of decode and prompt from float64's log-probabilities of all tokens in order."""
    decoded = [value for answer in answers for value in answer.decoded]
    read = [value for answer in answers for value in answer.read]
    return consistency.distance(decoded, exact, "decode_float64_") | consistency.distance(
        read, exact, "prompt_float64_"
    )


def _exact(model: str, answers: list[consistency.Completion]) -> list[float]:
    whole = [[*one.prompt, *one.tokens] for one in answers]
    none: list[tuple[int, ...]] = [()] * sum(len(one.tokens) for one in answers)
    return list(truth.read(Path(model), whole, len(answers[0].prompt), none)["likely"])


def main(
    model: Annotated[Path | None, typer.Option(help="a checkpoint directory")] = None,
    shape: Annotated[str, typer.Option(help="random weights of this shape where no model is given")] = "20b:2",
    variants: Annotated[list[str] | None, typer.Option("--variant", help="plugin, or a --moe-backend of vLLM")] = None,
    engine: Annotated[str, typer.Option(help="engine arguments of vllm.LLM, as JSON")] = "{}",
    after: Annotated[str, typer.Option(help="operations in turn")] = "",
    reload_from: Annotated[Path | None, typer.Option(help="other weights of the same shape for a reload")] = None,
    concurrency: Annotated[str, typer.Option(help="requests at once, one size after the other")] = "1,8,40,200",
    limit: Annotated[float, typer.Option(help="the largest mean difference that is no error")] = 0.3,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
) -> None:
    """Compares decode, prompts and float64; exit status 1 where a mean difference is above --limit."""
    load = consistency.Load(tuple(map(int, concurrency.split(","))), 150, 16, VOCABULARY)
    with tempfile.TemporaryDirectory() as folder:
        directories = [model or Path(folder) / "first", reload_from or model or Path(folder) / "second"]
        for seed, directory in enumerate(directories):
            if not directory.exists():
                checkpoint.write(dataclasses.replace(shapes.shape(shape), vocabulary=VOCABULARY), directory, seed)
        job = consistency.job_of(*directories, after, engine)
        rows = list(consistency.offline_rows("benchmarks.consistency", job, variants or ["plugin"], load))
    consistency.report(rows, load, limit, out)


if __name__ == "__main__":
    if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir():
        worker.answer(run)
    else:
        typer.run(main)
