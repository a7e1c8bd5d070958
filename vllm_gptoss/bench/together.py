"""All variants of a model on the same GPU at once, measured in turns.

Engines start at the same time, which takes about as long as one start; then each measures one batch while the others
wait for a line on their stdin, so repeats of all variants lie seconds apart on one machine. Start, memory and KV cache
are of no use then and are not recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_gptoss.bench import shapes, worker
from vllm_gptoss.bench.worker import EngineRun
from vllm_gptoss.choose import Deployment
from vllm_gptoss.recipes import memory

TURN = {"max_num_batched_tokens": 16_384, "max_num_seqs": 0}
"""What vLLM's in-process engine takes on GPUs of 70 GiB and more; 0: the largest batch."""

POLL = 0.1
"""Seconds between two looks at what a process has written."""


@dataclasses.dataclass
class EngineProcess:
    """One variant's process. `path`: what it writes; `asked`: batches that it was asked for so far."""

    job: EngineRun
    path: Path
    process: subprocess.Popen[bytes]
    asked: int = 0

    def ask(self, batch: int) -> None:
        assert self.process.stdin is not None
        self.asked += 1
        with contextlib.suppress(BrokenPipeError):  # it ended: `answer` says how
            self.process.stdin.write(f"{batch}\n".encode())
            self.process.stdin.flush()

    def answer(self, left: Callable[[], float]) -> dict[str, Any] | None:
        """What it has written, once it has measured all it was asked for; None: the time is up.

        Raises:
            ChildProcessError: the process ended instead.
        """
        while left() > 0:
            ended = self.process.poll()
            if self.path.exists():
                record: dict[str, Any] = json.loads(self.path.read_text())
                if len(record["rows"]) == self.asked:
                    return record
            if ended is not None:
                raise ChildProcessError(f"ended with {ended}")
            time.sleep(POLL)
        return None


@contextlib.contextmanager
def started(jobs: Sequence[EngineRun]) -> Iterator[list[EngineProcess]]:
    """A process for every job; none outlives the block."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = []
        for number, job in enumerate(jobs):
            job = dataclasses.replace(job, by_turns=True)
            path = folder / f"{number}.json"
            engines.append(EngineProcess(job, path, stack.enter_context(worker.started(job, path, subprocess.PIPE))))
        yield engines


def too_much(jobs: Sequence[EngineRun], gib: float) -> str:
    """Why `jobs` do not fit a GPU of `gib` at once; empty where they do, by the arithmetic of `recipe plan`."""
    parts = {job.variant: needed(job) for job in jobs}
    whole = sum(weights + kv + rest for weights, kv, rest in parts.values())
    if whole <= gib:
        return ""
    said = (f"{name} {weights:.1f} of weights and {kv:.1f} of KV cache" for name, (weights, kv, _) in parts.items())
    return f"{jobs[0].model} does not fit: in GiB, {', '.join(said)}; in all {whole:.1f} of the GPU's {gib:.1f}"


def needed(job: EngineRun) -> tuple[float, float, float]:
    """GiB of one GPU for a job beside others: weights, KV cache, and what a step and the process take."""
    model = shapes.shape(job.model)
    experts = worker.settings(job.variant).get("experts", "gptoss") if job.is_plugin else job.variant
    layout = "triton" if experts == "upstream" else experts
    deployment = Deployment(model, tensor_parallel=job.tensor_parallel, drafts="eagle3" if job.eagle3 else None)
    tokens, requests = (job.options.get(key, own) for key, own in TURN.items())
    rest = memory.activations(model, tokens, requests or max(job.batches)) + memory.OVERHEADS.context
    return memory.weights(deployment, layout).total, worker.turns_kv_bytes(job) / memory.GIB, rest
