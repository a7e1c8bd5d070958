"""Stop strings for chat completions: they end the answer, not the reasoning before it.

vLLM searches the text of all channels, so a stop string in the reasoning ends the turn without an answer. This module
searches the content that `ChatReader` returns, and aborts the engine's request at the end of a stop string.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss.server.chat.chat import ChatReader
from vllm_gptoss.server.harmony.held import Held
from vllm_gptoss.server.harmony.messages import FUNCTIONS
from vllm_gptoss.server.harmony.offered import OfferedTools


class _AnyFunction(OfferedTools):
    """Every function: the engine client does not know the request's tools, and calls are never content."""

    def resolve(self, recipient: str) -> str | None:
        return recipient if recipient.startswith(FUNCTIONS + ".") else None


class AnswerStops:
    """Wraps vLLM's `EngineClient` and handles stop strings.

    makes_text: whether vLLM must detokenise answers, for example for its log of outputs. Our parser reads token ids
    """

    def __init__(self, client: Any, *, makes_text: bool = True) -> None:
        self._client = client
        self._makes_text = makes_text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        if getattr(sampling_params, "stop", None):
            return self._watched(prompt, sampling_params, request_id, options)
        if not self._makes_text:
            _vllm.without_text(sampling_params)
        return self._client.generate(prompt, sampling_params, request_id, **options)  # type: ignore[no-any-return]

    async def _watched(
        self, prompt: Any, asked: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        watch = _Watch(asked)
        params, wants_deltas = _vllm.without_stops(asked)
        if not self._makes_text:
            _vllm.without_text(params)
        whole = None
        async with aclosing(self._client.generate(prompt, params, request_id, **options)) as outputs:
            async for output in outputs:
                watch.cut(output)
                if wants_deltas:
                    yield output
                elif whole is None:
                    whole = copy.copy(output)
                else:
                    whole.add(output, aggregate=True)
                    whole.metrics = output.metrics
                if output.finished:
                    break
        if whole is not None:
            whole.outputs.sort(key=lambda choice: choice.index)
            yield whole


class _Watch:
    """Searches the choices of one request for stop strings."""

    def __init__(self, params: Any) -> None:
        self._params = params
        self._readers: dict[int, ChatReader] = {}
        self._ended: set[int] = set()

    def cut(self, output: Any) -> None:
        """Removes the tokens after a stop string from `output`, in place, and marks ended choices."""
        output.outputs = [choice for choice in output.outputs if choice.index not in self._ended]
        for choice in output.outputs:
            self._cut(choice)
            if choice.finish_reason is not None:
                self._ended.add(choice.index)
        output.finished = output.finished or len(self._ended) == self._params.n

    def _cut(self, choice: Any) -> None:
        reader = self._readers.get(choice.index)
        if reader is None:
            is_held = bool(getattr(self._params.structured_outputs, "structural_tag", None))
            reader = self._readers[choice.index] = ChatReader(
                _AnyFunction(),
                self._params.stop,
                min_tokens=self._params.min_tokens,
                counts=False,
                held=Held(calls=is_held),
                reads_on=self._params.ignore_eos,
            )
        kept = _until_stop(reader, choice.token_ids)
        if reader.stopped is not None:
            choice.token_ids = choice.token_ids[:kept]
            choice.logprobs = choice.logprobs[:kept] if choice.logprobs else choice.logprobs
            choice.finish_reason, choice.stop_reason = "stop", reader.stopped


def _until_stop(reader: ChatReader, token_ids: Sequence[int]) -> int:
    """The number of `token_ids` up to the end of a stop string."""
    for number, token in enumerate(token_ids, 1):
        reader.feed((token,))
        if reader.stopped is not None:
            return number
    return len(token_ids)
