"""Decode speed of gpt-oss shapes: the plugin against vLLM's own backends on the same GPU.

    python -m benchmarks.decode run --models 20b,120b --batches 1,2,4,8,16,32 --rounds 2
    python -m benchmarks.decode run --models 20b --budget 560   # ends within 560 s, and stores what it measured
    python -m benchmarks.decode merge day1.json day2.json --out all.json

Each variant runs in a separate process (vLLM's in-process engine, dummy weights, greedy, random prompts, no prefix
cache); rounds interleave the variants, repeats are inside a process. TPOT = (time for the whole output - time for one
token) / (output - 1); of many requests it also holds steps in which some still read their prompt. `decode_ms` is a step
while all of them decode, and GPU time the same by torch.profiler: the union of kernel intervals, so overlapping
launches count once. Dummy weights route about uniformly; `--skew` sends every token to the same experts.

Writes `decode-<gpu>-<date>.json` after every process: medians over repeats and rounds, and the spread (largest -
smallest) / median. The same command again measures only what the file lacks. A running server is measured by
`vllm bench serve`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import shapes
from benchmarks.decode import memory, worker
from benchmarks.decode.results import Results, ResultsError
from benchmarks.decode.worker import EngineRun
from vllm_gptoss.cli.bench.worker import PLUGIN

STOCK = ("triton", "marlin", "humming")
GRACE = 20.0
"""Seconds before the end of a budget in which a process is stopped rather than waited for."""


def lengths(text: str) -> list[tuple[int, int]]:
    """`512/128,8k/1k` as (prompt, output) tokens."""
    pairs = []
    for pair in text.split(","):
        prompt, _, output = pair.partition("/")
        numbers = [int(part.removesuffix("k")) * (1024 if part.endswith("k") else 1) for part in (prompt, output)]
        if numbers[1] < 2:
            raise typer.BadParameter(f"{pair}: at least 2 output tokens, or there is no time between tokens")
        pairs.append((numbers[0], numbers[1]))
    return pairs


def run_worker(job: EngineRun) -> tuple[dict[str, Any], str]:
    """What one process measured, and how it failed (empty: it did not, or only ran out of time)."""
    with tempfile.TemporaryDirectory() as folder:
        path, why = Path(folder) / "result.json", ""
        with memory.sampled() as samples, worker.started(job, path) as process:
            try:
                if code := process.wait(job.seconds + GRACE if job.seconds else None):
                    why = f"ended with {code}"
            except subprocess.TimeoutExpired:  # no failure: what it had not measured is measured by the next command
                typer.echo(f"{job.model} {job.variant}: stopped, the time is up")
        record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    if samples and record["rows"]:
        record["used_gib"] = max(samples)
        record["load_peak_gib"] = memory.load_peak(samples, record["memory"][0]["kv_gib"])
    return record, why


@dataclasses.dataclass
class Campaign:
    """Runs jobs one after another until they are done or the time is up, and keeps the file current."""

    results: Results
    path: Path
    budget: float
    took: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    cannot: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Models and variants that ended without a measurement: not started again."""
    began: float = dataclasses.field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.began) if self.budget else float("inf")

    def run(self, job: EngineRun, round_: int) -> bool:
        """Measures what round `round_` of a job lacks. False: there was no time for it."""
        missing = tuple(batch for batch in job.batches if self.results.done(job, batch) <= round_)
        if not missing:
            return True
        if (job.model, job.variant) in self.cannot:
            return False
        needs = self.took.get((job.model, job.variant), max(self.took.values(), default=0.0))
        if self.left() < max(needs, 2 * GRACE):
            typer.echo(f"{job.model} {job.variant}: not measured, {self.left():.0f} s are left of {self.budget:.0f}")
            return False
        seconds = self.left() - GRACE if self.budget else 0.0
        job = dataclasses.replace(job, batches=missing, seconds=seconds)
        before = time.monotonic()
        record, why = run_worker(job)
        self.took[job.model, job.variant] = time.monotonic() - before
        if why:
            self._failed(job, why)
        if record["rows"]:
            self.results.add_run(job, record)
        elif why:
            self.cannot.add((job.model, job.variant))
        self.results.write(self.path)
        _say(job, record)
        return len(record["rows"]) == len(missing)

    def _failed(self, job: EngineRun, why: str) -> None:
        typer.echo(f"{job.model} {job.variant}: {why}", err=True)
        self.results.add_failure(job, why)


_ALSO = {"decode_ms": "while all decode", "gpu_ms": "GPU"}


def _say(job: EngineRun, record: dict[str, Any]) -> None:
    if not record["rows"]:
        return
    typer.echo(f"{job.model} {job.variant} {job.prompt}/{job.output}: start {record['start_s']:.0f} s")
    for row in record["rows"]:
        more = "".join(f", {name} {row[key]:.3f}" for key, name in _ALSO.items() if key in row)
        typer.echo(f"  batch {row['batch']}: TPOT {statistics.median(row['tpot_ms']):.3f} ms{more}")


def main(
    models: Annotated[str, typer.Option(help="shapes, of 20b, 120b and tiny; 20b:2 is two layers")] = "20b",
    batches: Annotated[str, typer.Option(help="requests decoding at once")] = "1,2,4,8,16,32",
    variants: Annotated[str, typer.Option(help="plugin and vLLM's --moe-backend names")] = ",".join((PLUGIN, *STOCK)),
    lengths_: Annotated[str, typer.Option("--lengths", help="prompt/output tokens: 512/128,1k/1k,8k/1k")] = "512/128",
    rounds: Annotated[int, typer.Option(help="processes per variant, interleaved")] = 1,
    repeats: Annotated[int, typer.Option(help="measurements per batch in a process")] = 3,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share the model")] = 1,
    skew: Annotated[bool, typer.Option(help="send every token to the same four experts")] = False,
    eagle3: Annotated[
        int, typer.Option("--eagle3", "--drafts", help="EAGLE3 draft tokens a step; a dummy draft: none is accepted")
    ] = 0,
    accepted: Annotated[
        float, typer.Option(help="tokens of a step, by vLLM's synthetic acceptance: 1 to drafts + 1")
    ] = 0,
    draft_vocabulary: Annotated[int, typer.Option(help="tokens that the draft may propose; 0: all")] = 0,
    profile: Annotated[bool, typer.Option(help="GPU time per step from torch.profiler")] = True,
    options: Annotated[str, typer.Option(help='further engine arguments, JSON: {"kv_cache_dtype": "fp8"}')] = "{}",
    budget: Annotated[float, typer.Option(help="end within so many seconds with what there is; 0: no limit")] = 0.0,
    out: Annotated[Path, typer.Option(help="folder for, or path of, the results")] = Path("benchmarks/results"),
) -> None:
    """Measures TPOT and GPU time per step of the plugin and of vLLM's own backends."""
    path, found = _open(out)
    campaign = Campaign(found, path, budget)
    sizes = tuple(int(batch) for batch in batches.split(","))
    shared = (repeats, tensor_parallel, skew, eagle3, accepted, draft_vocabulary, profile, json.loads(options))
    for model in models.split(","):
        shapes.shape(model)
    jobs = [
        EngineRun(model, variant, sizes, prompt, output, *shared)
        for prompt, output in lengths(lengths_)
        for model in models.split(",")
        for variant in variants.split(",")
    ]
    done = [campaign.run(job, round_) for round_ in range(rounds) for job in jobs]
    _finish(found, path)
    if not all(done):
        typer.echo("not everything was measured: the same command again continues", err=True)
        raise typer.Exit(1)


def merge(
    files: Annotated[list[Path], typer.Argument(help="results of one machine and one vLLM")],
    out: Annotated[Path, typer.Option(help="the file to write")],
) -> None:
    """Adds up the measurements of several files and recalculates the rows."""
    try:
        whole = Results.read(files[0])
        for path in files[1:]:
            whole.merge(Results.read(path))
    except ResultsError as error:
        raise typer.BadParameter(str(error)) from None
    _finish(whole, out)


def _open(out: Path) -> tuple[Path, Results]:
    """The results file, and what is in it already."""
    head = _machine()
    name = head["gpu"].replace("NVIDIA ", "").replace(" ", "-").lower()
    path = out if out.suffix == ".json" else out / f"decode-{name}-{head['date']}.json"
    if not path.exists():
        return path, Results(head)
    try:
        found = Results.read(path)
        found.must_match(head)
    except ResultsError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"continuing {path}")
    return path, found


def _machine() -> dict[str, Any]:
    """The head of the file, from a separate process: this one must hold no GPU memory."""
    code = "import torch; from vllm_gptoss import _vllm; from vllm_gptoss.engine.choose import device; "
    code += "print(device.detect().name, _vllm.version() or 'unknown', torch.__version__, sep='\\n')"
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    gpu, vllm, torch = said.splitlines()[-3:]
    command = " ".join(("python -m benchmarks.decode", *sys.argv[1:]))
    return {"gpu": gpu, "vllm": vllm, "torch": torch, "date": str(date.today()), "command": command}


def _finish(found: Results, path: Path) -> None:
    found.write(path)
    typer.echo(f"written: {path}")


app = typer.Typer(no_args_is_help=True, help="Decode speed of the plugin and of vLLM's own backends on this machine.")
app.command("run", help="TPOT and GPU time per step, shapes of 20b and 120b with dummy weights.")(main)
app.command("merge", help="Add up the measurements of several results files.")(merge)

if __name__ == "__main__":
    app()
