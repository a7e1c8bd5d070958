"""A logits processor that makes the engine generate given tokens, so that engine, server and client stay real."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    """Requests bring their tokens as `vllm_xargs: {"forced": "1 2 3"}`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        forced = [int(token) for token in str((params.extra_args or {}).get("forced", "")).split()]
        if not forced:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(forced):
                logits.fill_(float("-inf"))
                logits[forced[len(output_ids)]] = 0.0
            return logits

        return force
