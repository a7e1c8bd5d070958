"""A logits processor that makes the engine generate given tokens, so that engine, server and client stay real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.forcing import Forcing


class ForcedTokens(Forcing):
    """Requests bring their tokens as `vllm_xargs: {"forced": "1 2 3"}`."""

    def answer(self, prompt: Sequence[int], params: Any) -> list[int]:
        del prompt
        return [int(token) for token in str((params.extra_args or {}).get("forced", "")).split()]
