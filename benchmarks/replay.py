"""An executor that returns a prepared answer without a model, for the cost of vLLM's front end.

`vllm serve --distributed-executor-backend benchmarks.replay.ReplayExecutor` is vLLM's documented way to
bring an executor. Scheduler, engine process, transport between processes, API server and handlers are the real ones;
the weights are not read, and no GPU is used. Every request gets the same answer, half reasoning and half final message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.host import STEP_MS, TOKENS
from vllm_gptoss.server.harmony.tokens import encoding

_CACHE_BYTES = 1 << 33
"""The KV cache's size in bytes that the scheduler sees. No memory is allocated for it."""


def answer(tokens: int) -> list[int]:
    """The token ids of the answer: a thought of half of `tokens` words, and a final message of the other half."""
    words = " word" * (tokens // 2)
    text = f"<|channel|>analysis<|message|>{words}<|end|><|start|>assistant<|channel|>final<|message|>{words}<|return|>"
    ids: list[int] = encoding().encode(text, allowed_special="all")
    return ids


class ReplayExecutor(Executor):
    """Answers the scheduler's steps from `answer`, one token a request and step."""

    def _init_executor(self) -> None:
        self._answer = answer(int(os.environ.get(TOKENS, "200")))
        self._step_s = float(os.environ.get(STEP_MS, "0")) / 1000
        self._prompts: dict[str, int] = {}
        self._next_step = 0.0

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """A worker's answers about itself; None to actions."""
        del timeout, args, kwargs
        block = self.vllm_config.cache_config.block_size or 16
        answers: dict[Any, Any] = {
            "get_kv_cache_spec": {
                "layer": FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
            },
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "determine_available_memory": _CACHE_BYTES,
            "get_supported_tasks": ("generate",),
        }
        said = [answers[method]] if method in answers else []
        return _done(said) if non_block else said

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:  # type: ignore[override]
        output = self._step(scheduler_output)
        return _done(output) if non_block else output

    def _step(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """The step's tokens: the answer's at each request's position, none while its prompt is being read."""
        self._wait()
        for finished in scheduled.finished_req_ids:
            self._prompts.pop(finished, None)
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids or ())
            computed[new.req_id] = new.num_computed_tokens
        ids = list(scheduled.num_scheduled_tokens)
        sampled = []
        for request in ids:
            at = computed[request] + scheduled.num_scheduled_tokens[request] - self._prompts[request]
            sampled.append([self._answer[min(at, len(self._answer) - 1)]] if at >= 0 else [])
        return ModelRunnerOutput(ids, {request: at for at, request in enumerate(ids)}, sampled)

    def _wait(self) -> None:
        now = time.monotonic()
        time.sleep(max(0.0, self._next_step - now))
        self._next_step = max(now, self._next_step) + self._step_s

    def check_health(self) -> None:
        return None

    def take_draft_token_ids(self) -> None:
        return None


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
