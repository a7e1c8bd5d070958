"""A logits processor that makes the engine generate given tokens, so that engine, server and client stay real."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from demo.server import on_gpu

if TYPE_CHECKING or not on_gpu():
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor as Base
else:  # vLLM's second model runner, which a CPU does not have, takes processors of this class alone
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as Base

SURELY = 0.0


class Forcing(Base):
    """Each request is answered with `answer`, then goes on freely."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._requests = arguments[1] if on_gpu() else None
        self._params: dict[int, Any] = {}
        self._said: dict[int, list[int]] = {}

    @abstractmethod
    def answer(self, prompt: Sequence[int], params: Any) -> list[int]:
        """The tokens that the engine must generate. params: the request's `SamplingParams`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        said: list[list[int]] = []

        def force(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if not said:
                said.append(self.answer(prompt_ids, params))
            if len(output_ids) < len(said[0]):
                _only(logits, said[0][len(output_ids)])
            return logits

        return force

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Second runner: a request takes a slot."""
        self._params[req_idx] = sampling_params
        self._said.pop(req_idx, None)
        return True

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Second runner: all rows of a step, one for each request."""
        if ctx is None:
            return super().apply(logits)
        for row, (slot, at) in enumerate(zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True)):
            length = int(self._requests.prompt_len.np[slot])
            if slot in self._params and slot not in self._said:
                prompt = self._requests.all_token_ids.gpu[slot, :length].tolist()
                self._said[slot] = self.answer(prompt, self._params[slot])
            said, made = self._said.get(slot, []), at + 1 - length
            if 0 <= made < len(said):
                _only(logits[row], said[made])
        return logits


def _only(logits: torch.Tensor, token: int) -> None:
    logits.fill_(float("-inf"))
    logits[token] = SURELY
