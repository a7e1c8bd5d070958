"""Token generation: vLLM's engine client."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_gptoss import _vllm, startup_line
from vllm_gptoss.server.harmony.grammar import GRAMMAR_BACKENDS
from vllm_gptoss.server.harmony.tokens import CALL, ENDOFTEXT, RETURN
from vllm_gptoss.server.responses.errors import ApiError, EngineError
from vllm_gptoss.server.streaming.direct_send import Direct

logger = logging.getLogger(__name__)

ABORTED = "The engine aborted the generation, as it does when the server is stopped."
NOT_BEGUN = "The engine began no generation. It begins none once the server is stopped, not even after a tool's answer."
CHOICES_S = 5.0
"""Seconds that the web page waits for the engine, which answers between two steps."""
HAS_ENDED = "The engine has ended: the server was stopped, or the engine failed (see the server's log)."


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `options` holds vLLM `SamplingParams` fields that the request set; the rest are defaults."""

    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    structural_tag: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    session_id: str | None = None
    data_parallel_rank: int | None = None
    trace_headers: Mapping[str, str] | None = None
    lora: Any = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log probability (natural log) and its alternatives, as (token id, logprob), best first."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(slots=True)  # not frozen: one is made per token, and a frozen one takes four times as long to make
class Chunk:
    """Newly generated tokens. `finish` is set on the last chunk: `stop`, `length` or `abort`.

    `stopped_by`: the one of the request's `stop_token_ids` that ended it; None at the model's own end.
    """

    token_ids: Sequence[int]
    finish: str | None = None
    stopped_by: int | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    cached_tokens: int | None = None


class Engine(Protocol):
    """A model that continues prompts. Closing the generator (or cancelling its reader) aborts the request."""

    defaults: Mapping[str, Any]
    """Sampling defaults of the served model, e.g. `temperature`."""

    @property
    def max_model_len(self) -> int:
        """The context window in tokens, prompt and answer together."""

    @property
    def max_output_tokens(self) -> int | None:
        """The operator's limit of tokens that one response may generate; None without one."""

    @property
    def holds_grammars(self) -> bool:
        """Whether every generated token satisfies `Sampling.structural_tag`."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing is generated any more: the server stops, or the engine died."""

    async def choices(self) -> Mapping[str, str]:
        """What the start-up line names, by part; empty where the engine does not report it."""

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, request_id: str, direct: Direct | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The generated chunks, without those that `direct` took. Closes `direct`.

        Raises `EngineError` when generation fails, `ApiError` when the engine refuses the request.
        """


class VllmEngine(Engine):
    """`Engine` over vLLM's `EngineClient`. `is_direct`: whether a stream's text may go another way than vLLM's."""

    def __init__(self, client: Any, *, is_direct: bool = True) -> None:
        self._client = client
        self._is_direct = is_direct
        self._config = client.model_config
        self.defaults = dict(self._config.get_diff_sampling_param())
        self._choices: dict[str, str] = {}
        importlib.import_module("xgrammar")  # seconds that the first request would wait

    @property
    def max_model_len(self) -> int:
        return int(self._config.max_model_len)

    @property
    def max_output_tokens(self) -> int | None:
        # As vLLM's own handlers: `max_new_tokens` of a generation config that the operator chose, or of an override.
        if self._config.generation_config not in ("auto", "vllm"):
            limit = self.defaults.get("max_tokens")
        else:
            limit = self._config.override_generation_config.get("max_new_tokens")
        return None if limit is None else int(limit)

    @property
    def holds_grammars(self) -> bool:
        return self._client.vllm_config.structured_outputs_config.backend in GRAMMAR_BACKENDS

    @property
    def has_ended(self) -> bool:
        return bool(self._client.errored)

    async def choices(self) -> Mapping[str, str]:
        extension = self._client.vllm_config.parallel_config.worker_extension_cls
        if not self._choices and extension == startup_line.EXTENSION:
            try:
                async with asyncio.timeout(CHOICES_S):
                    self._choices = (await self._client.collective_rpc("gptoss_choices"))[0]
            except Exception as error:
                logger.warning("The engine did not report its choices: %r", error)
        return self._choices

    def _params(self, sampling: Sampling) -> Any:
        fields: dict[str, Any] = {**self.defaults, **sampling.options}
        fields["max_tokens"] = sampling.max_tokens
        fields["logprobs"] = sampling.logprobs
        fields["detokenize"] = False  # the parser reads token ids, and stop strings are looked for in the answer only
        fields["skip_special_tokens"] = False
        ends = () if fields.get("ignore_eos") else (RETURN, CALL)
        fields["stop_token_ids"] = sorted({*ends, *(fields.get("stop_token_ids") or ())})
        try:
            return _vllm.sampling_params(structural_tag=sampling.structural_tag, **fields)
        except (ValueError, TypeError) as error:
            raise ApiError(str(error), param=getattr(error, "parameter", None)) from error

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, request_id: str, direct: Direct | None = None
    ) -> AsyncGenerator[Chunk, None]:
        engine_input: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if sampling.cache_salt:
            engine_input["cache_salt"] = sampling.cache_salt
        try:
            stream = self._client.generate(
                engine_input,
                self._params(sampling),
                request_id,
                priority=sampling.priority,
                trace_headers=sampling.trace_headers,
                session_id=sampling.session_id,
                data_parallel_rank=sampling.data_parallel_rank,
                lora_request=sampling.lora,
                # The structural tag covers the whole turn, reasoning included, so it holds from the first token.
                reasoning_ended=True if sampling.structural_tag else None,
            )
            async with aclosing(stream):
                outputs = self._not_taken(stream, direct, request_id) if direct and self._is_direct else stream
                async for output in outputs:
                    yield _chunk(output)
        except (ApiError, EngineError):
            raise
        except Exception as error:
            if status := _vllm.client_error_status(error):
                raise ApiError(str(error), param=getattr(error, "parameter", None), status=status) from error
            if self.has_ended or _vllm.is_stopping(error):
                why = HAS_ENDED if self.has_ended else NOT_BEGUN
                logger.error("Generation of %s failed: %s", request_id, why)
                raise EngineError(why) from error
            logger.exception("Generation of %s failed", request_id)
            told = error if str(error) else error.__cause__ or error  # vLLM's EngineGenerateError has no message
            raise EngineError(f"{type(told).__name__}: {told}") from error

    async def _not_taken(self, stream: Any, direct: Direct, request_id: str) -> AsyncGenerator[Any, None]:
        try:
            while True:
                try:
                    output = await direct.next(stream)
                except StopAsyncIteration:
                    return
                direct.attach(self._client, request_id)
                yield output
        finally:
            direct.close()


def _chunk(output: Any) -> Chunk:
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        raise EngineError("The engine reported an internal error.")
    logprobs = completion.logprobs
    reason = completion.stop_reason
    return Chunk(
        completion.token_ids,
        completion.finish_reason,
        reason if reason not in (None, RETURN, CALL, ENDOFTEXT) else None,
        [_logprob(t, c) for t, c in zip(completion.token_ids, logprobs, strict=True)] if logprobs else None,
        output.num_cached_tokens,
    )


def _logprob(token: int, candidates: Mapping[int, Any]) -> TokenLogprob:
    ranked = sorted(((t, c.logprob) for t, c in candidates.items()), key=lambda pair: -pair[1])
    return TokenLogprob(token, candidates[token].logprob, ranked)
