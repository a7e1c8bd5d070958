"""How the engine samples for one request."""

from __future__ import annotations

from typing import Any

from vllm_gptoss.server.responses.request.create import CreateRequest
from vllm_gptoss.server.responses.run.engine import Sampling
from vllm_gptoss.server.responses.state.caller import Caller

PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "seed",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)
"""Fields of a request that vLLM's `SamplingParams` has under the same name."""


def sampling_of(request: CreateRequest, caller: Caller, lora: Any, structural_tag: str | None = None) -> Sampling:
    """The request's sampling, without the token budget, which each turn sets. `structural_tag` is vLLM's, as JSON."""
    options = {name: value for name in PASSED_ON if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        options["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    if request.vllm_xargs:
        options["extra_args"] = request.vllm_xargs
    # As vLLM: the client's session counts before the router's.
    session = request.session_id or caller.session_id or (request.vllm_xargs or {}).get("session_id")
    wants_logprobs = "message.output_text.logprobs" in request.includes
    return Sampling(
        max_tokens=0,
        options=options,
        logprobs=(request.top_logprobs or 0) if wants_logprobs else None,
        structural_tag=structural_tag,
        # As vLLM: a router's priority counts before the client's.
        priority=request.priority if caller.priority is None else caller.priority,
        cache_salt=request.cache_salt,
        session_id=session if isinstance(session, str) and session else None,
        data_parallel_rank=caller.data_parallel_rank,
        trace_headers=caller.trace_headers,
        lora=lora,
    )
