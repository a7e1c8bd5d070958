"""What a decode step takes: windows of steps in which every request decodes, and the GPU's part by torch.profiler.

`has_gpu`, `synchronize`, `start_trace` and `stop_trace` run in vLLM's workers: each takes the worker and returns plain
data.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any


def _per_step(spent: dict[str, Any], steps: float) -> dict[str, Any]:
    names = {name: ns / steps / 1e3 for name, ns in spent["names"].items()}
    return {
        "gpu_ms": spent["busy_ns"] / steps / 1e6,
        "kernel_sum_ms": spent["sum_ns"] / steps / 1e6,
        "kernels_us": dict(sorted(names.items(), key=lambda entry: -entry[1])[:25]),
    }


def decoding(engine: Any, batch: int, prompt: int, output: int, *, profile: bool) -> dict[str, Any]:
    """Wall and GPU time of a token while every request decodes and none reads its prompt; of several GPUs the one that
    works longest. Nothing where requests end before all have begun."""
    window = Window(engine, batch, prompt, output)
    try:
        if not window.open():
            return {}
        engine.collective_rpc(synchronize)
        began = time.perf_counter()
        tokens = window.steps()
        if not tokens:
            return {}
        row = {"decode_ms": (time.perf_counter() - began) * 1e3 / tokens, "tokens_per_step": tokens / window.STEPS}
        if profile and engine.collective_rpc(has_gpu)[0]:
            engine.collective_rpc(start_trace)
            tokens = window.steps()
            spent = max(engine.collective_rpc(stop_trace), key=lambda rank: float(rank["busy_ns"]))
            row.update(_per_step(spent, tokens) if tokens else {})
        return row
    finally:
        window.close()


class Window:
    """Steps of an engine in this process, one for each call."""

    STEPS = 32

    def __init__(self, engine: Any, batch: int, prompt: int, output: int) -> None:
        import numpy as np
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine = engine.llm_engine
        self._counts = {f"decoding-{number}": 0 for number in range(batch)}
        self._has_ended = False
        random = np.random.default_rng(1)
        params = SamplingParams(
            temperature=0, max_tokens=output + 63, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompts = random.integers(0, 190_000, (batch, prompt)).tolist()
        self._names = [
            self._engine.add_request(name, {"prompt_token_ids": ids}, params)
            for name, ids in zip(self._counts, prompts, strict=True)
        ]

    def open(self) -> bool:
        """Steps until all requests decode, and a little more; False where one has ended by then."""
        while not self._has_ended and min(self._counts.values()) < 3:
            self._step()
        return not self._has_ended

    def steps(self) -> float:
        """Tokens that `STEPS` steps gave each request; 0 where one has ended in them."""
        before = sum(self._counts.values())
        for _ in range(self.STEPS):
            self._step()
        return 0 if self._has_ended else (sum(self._counts.values()) - before) / len(self._counts)

    def _step(self) -> None:
        for output in self._engine.step():
            self._counts[output.request_id] += len(output.outputs[0].token_ids)
            self._has_ended |= output.finished

    def close(self) -> None:
        """Ends the requests."""
        self._engine.abort_request(self._names, internal=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()


def has_gpu(worker: Any) -> bool:
    import torch

    return bool(torch.cuda.is_available())


def synchronize(worker: Any) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def start_trace(worker: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    worker.gptoss_trace = profile(activities=[ProfilerActivity.CUDA])
    worker.gptoss_trace.__enter__()


def stop_trace(worker: Any) -> dict[str, Any]:
    """GPU time since `start_trace` in ns: union of kernel intervals, their sum, and by kernel."""
    from torch.autograd import DeviceType

    synchronize(worker)
    trace = worker.gptoss_trace
    trace.__exit__(None, None, None)
    names: dict[str, int] = {}
    intervals = []
    for event in trace.profiler.kineto_results.events():
        if event.device_type() != DeviceType.CUDA:
            continue
        intervals.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        name = event.name()[:80]
        names[name] = names.get(name, 0) + event.duration_ns()
    return {"busy_ns": busy_ns(intervals), "sum_ns": sum(end - start for start, end in intervals), "names": names}


def busy_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of (start, end) intervals."""
    total, until = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total
