"""A logits processor that makes any weights call python once and then answer: engine, server and tool stay real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.forcing import Forcing
from vllm_gptoss.server.harmony.tokens import encoding

CALL = "<|channel|>analysis to=python code<|message|>print(6 * 7)<|call|>"
ANSWER = "<|channel|>final<|message|>It is 42.<|return|>"


class CallsOnce(Forcing):
    """`ANSWER` where the prompt has python's output, else `CALL`."""

    def answer(self, prompt: Sequence[int], params: Any) -> list[int]:
        del params
        text = ANSWER if "python to=assistant" in encoding().decode(list(prompt)) else CALL
        said: list[int] = encoding().encode(text, allowed_special="all")
        return said
