"""Restricts the log-probabilities of a chat answer to the tokens of `message.content`.

vLLM's handlers return those of every generated token, including control tokens and reasoning, and none if reasoning is
hidden. The batch handler returns hidden reasoning in log-probabilities and token ids.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm_gptoss.server.chat.vllm_constraint import offered_tools
from vllm_gptoss.server.chat.vllm_parser import HIDES_REASONING, chat_reader


class _Marked(list[int]):
    """Token ids, with (id, logprobs) of the content tokens that the client receives now."""

    def __init__(self, token_ids: Any, answer: list[tuple[int, Any]]) -> None:
        super().__init__(token_ids)
        self.answer = answer


class _Choice:
    """Selects the content tokens of one choice."""

    def __init__(self, request: Any) -> None:
        self._reader = chat_reader(request, offered_tools(getattr(request, "tools", None)), marks=True)
        self._tokens: list[tuple[int, Any]] = []

    def read(self, choice: Any) -> _Marked:
        self._tokens += zip(choice.token_ids, choice.logprobs or (), strict=False)
        self._reader.feed(choice.token_ids)
        if choice.finish_reason is not None:
            self._reader.finish()
        return _Marked(choice.token_ids, [self._tokens[at] for at in self._reader.take_answer()])


async def _marked(results: AsyncGenerator[Any, None], request: Any) -> AsyncGenerator[Any, None]:
    choices: dict[int, _Choice] = {}
    async with aclosing(results):
        async for result in results:
            for choice in result.outputs:
                known = choices.setdefault(choice.index, _Choice(request))
                choice.token_ids = known.read(choice)
            yield result


def _shown(request: Any) -> Any:
    """The request for vLLM's generators, which drop all logprobs if `include_reasoning` is false."""
    if request.include_reasoning:
        return request
    copy = request.model_copy(update={"include_reasoning": True, "return_token_ids": None})
    setattr(copy, HIDES_REASONING, True)
    return copy


class AnswerLogprobs:
    """Subclass part for vLLM's handlers of chat completions and batches."""

    def chat_completion_full_generator(self, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        """Overrides vLLM's method: the response of one request."""
        if request.logprobs:
            request, results = _shown(request), _marked(results, request)
        return super().chat_completion_full_generator(request, results, *args, **kwargs)  # type: ignore[misc]

    def chat_completion_stream_generator(self, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        """Overrides vLLM's method: server-sent events of one request."""
        if request.logprobs:
            request, results = _shown(request), _marked(results, request)
        return super().chat_completion_stream_generator(request, results, *args, **kwargs)  # type: ignore[misc]

    async def chat_completion_full_generator_batch(self, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        """Overrides vLLM's method: one response for several conversations."""
        if request.logprobs:
            results = [_marked(each, request) for each in results]
        response = await super().chat_completion_full_generator_batch(request, results, *args, **kwargs)  # type: ignore[misc]
        for choice in () if request.include_reasoning else getattr(response, "choices", ()):
            choice.token_ids = None
        return response

    def _create_chat_logprobs(self, token_ids: Any, top_logprobs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(token_ids, _Marked):
            if not token_ids.answer:
                return None
            token_ids, top_logprobs = zip(*token_ids.answer, strict=True)
        return super()._create_chat_logprobs(token_ids, top_logprobs, *args, **kwargs)  # type: ignore[misc]
