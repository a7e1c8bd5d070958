"""A logits processor that makes any weights call python once and then answer: engine, server and tool stay real."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_gptoss.harmony.tokens import encoding

CALL = "<|channel|>analysis to=python code<|message|>print(6 * 7)<|call|>"
ANSWER = "<|channel|>final<|message|>It is 42.<|return|>"


class CallsOnce(AdapterLogitsProcessor):
    """`ANSWER` where the prompt has python's output, else `CALL`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        del params
        said: list[int] = []

        def force(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if not said:
                text = ANSWER if "python to=assistant" in encoding().decode(list(prompt_ids)) else CALL
                said.extend(encoding().encode(text, allowed_special="all"))
            if len(output_ids) < len(said):
                logits.fill_(float("-inf"))
                logits[said[len(output_ids)]] = 0.0
            return logits

        return force
