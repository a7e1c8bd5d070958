"""What the model says to Codex, and a logits processor that makes a real engine say it.

Codex's prompt is long and its own, so the small model cannot have learned it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_gptoss.harmony.tokens import encoding

THINK = "<|channel|>analysis<|message|>Let me do it.<|end|><|start|>assistant"
COMMAND = ' to=functions.exec_command<|channel|>commentary json<|message|>{"cmd":"echo hello > hello.txt"}<|call|>'
WROTE = "<|channel|>final<|message|>I wrote hello.<|return|>"


def codex(prompt: Sequence[int]) -> list[int]:
    """The command, and when the prompt has a tool's answer, the final words."""
    answered = "to=assistant<|channel|>commentary" in encoding().decode(list(prompt))
    said: list[int] = encoding().encode(THINK + (WROTE if answered else COMMAND), allowed_special="all")
    return said


class ForcedCodex(AdapterLogitsProcessor):
    """Every request is answered with `codex`. A grammar still judges the tokens: it sees what was sampled."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        del params
        said: list[int] = []

        def force(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            said.extend(() if said else codex(prompt_ids))
            if len(output_ids) < len(said):
                logits.fill_(float("-inf"))
                logits[said[len(output_ids)]] = 0.0
            return logits

        return force
