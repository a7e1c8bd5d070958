"""A logits processor that makes the engine generate given tokens, so that engine, server and client stay real."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Forcing(AdapterLogitsProcessor):
    """Each request is answered with `answer` to its prompt, then goes on freely."""

    @abstractmethod
    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The tokens that the engine must generate."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        del params
        said: list[int] = []

        def force(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            said.extend(() if said else self.answer(prompt_ids))
            if len(output_ids) < len(said):
                logits.fill_(float("-inf"))
                logits[said[len(output_ids)]] = 0.0
            return logits

        return force
