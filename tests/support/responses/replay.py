"""An engine that answers from a script, with the interface of vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from vllm_gptoss.server.harmony.tokens import CALL, RETURN
from vllm_gptoss.server.responses.errors import EngineError
from vllm_gptoss.server.responses.run.engine import HAS_ENDED, Chunk, Engine, Sampling, TokenLogprob
from vllm_gptoss.server.streaming.direct_send import Direct

Script = Callable[[Sequence[int]], Sequence[int]]
"""From a prompt's token ids to what the model answers."""


class ReplayEngine(Engine):
    """`Engine` that answers from a script.

    `rate` is tokens per second and stream, None for as fast as possible; `chunk` is tokens per step. It stops where a
    model would: at `max_tokens`, after `<|return|>` or `<|call|>`, the latter not with `stops_itself=False`. `running`
    and `aborted` show what clients caused. While it `drains` it begins nothing, as vLLM's engine when it is stopped
    (`EngineCoreProc._reject_add_in_shutdown`), and once it has `ended` it refuses.
    """

    def __init__(
        self,
        script: Script,
        *,
        rate: float | None = None,
        chunk: int = 1,
        max_model_len: int = 131_072,
        defaults: Mapping[str, Any] | None = None,
        max_output_tokens: int | None = None,
        stops_itself: bool = True,
    ) -> None:
        self._max_output_tokens = max_output_tokens
        self._stops_itself = stops_itself
        self._script = script
        self._delay = chunk / rate if rate else 0.0
        self._chunk = chunk
        self._max_model_len = max_model_len
        self._defaults = dict(defaults or {})
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.running = 0
        self.aborted = 0
        self.fail_after: int | None = None
        self.drains = False
        self.ended = False

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self._defaults

    @property
    def max_output_tokens(self) -> int | None:
        return self._max_output_tokens

    @property
    def holds_grammars(self) -> bool:
        return False

    @property
    def has_ended(self) -> bool:
        return self.ended

    async def choices(self) -> Mapping[str, str]:
        return {"layers": "replayed (a test)"}

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, request_id: str, direct: Direct | None = None
    ) -> AsyncGenerator[Chunk, None]:
        del request_id, direct
        self.prompts.append(list(prompt))
        self.samplings.append(sampling)
        if self.ended:
            raise EngineError(HAS_ENDED)
        if self.drains:
            yield Chunk((), "abort")
            return
        also = sampling.options.get("stop_token_ids") or ()
        ends = () if sampling.options.get("ignore_eos") or not self._stops_itself else (RETURN, CALL)
        tokens, finish = _stopped(self._script(prompt), sampling.max_tokens, (*ends, *also))
        stopped_by = tokens[-1] if finish == "stop" and tokens[-1:] and tokens[-1] in also else None
        self.running += 1
        try:
            for at in range(0, max(len(tokens), 1), self._chunk):
                if self.fail_after is not None and at >= self.fail_after:
                    raise EngineError("The replay engine was stopped by the test.")
                await asyncio.sleep(self._delay)
                part = tokens[at : at + self._chunk]
                last = at + self._chunk >= len(tokens)
                logprobs = [TokenLogprob(t, -0.5, [(t, -0.5)]) for t in part] if sampling.logprobs is not None else None
                yield Chunk(part, finish if last else None, stopped_by if last else None, logprobs, 0)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            self.running -= 1


def _stopped(tokens: Sequence[int], max_tokens: int, ends: Sequence[int]) -> tuple[list[int], str]:
    kept: list[int] = []
    for token in tokens:
        if len(kept) == max_tokens:
            return kept, "length"
        kept.append(token)
        if token in ends:
            return kept, "stop"
    return kept, "length" if len(kept) == max_tokens else "stop"
