"""All attributes of vLLM that the plugin replaces because vLLM offers no hook.

Everything else is registered (model class, quantisation, endpoint plugin, routes of the app) or subclassed. Nothing
is replaced in a server of another model. `tests/contract/test_door.py` counts both against the package's source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Replaced:
    """One attribute of vLLM that the plugin replaces."""

    attribute: str
    """As `tests/contract` finds it assigned: the expression's end, `object.attribute`."""
    file: str
    """Where, relative to the package."""
    what: str
    scope: str
    why: str


REPLACED: tuple[Replaced, ...] = (
    Replaced(
        "module.HarmonyParser",
        "_vllm/replaced.py",
        "the class `vllm.parser.harmony.HarmonyParser`, by a subclass of it",
        "the API server of a gpt-oss model, and `vllm run-batch`",
        "`ParserManager` imports it by name at each use and has no registry for it",
    ),
    Replaced(
        "renderer._make_request_with_harmony",
        "_vllm/replaced.py",
        "the step from a chat request to prompt tokens, on the server's one `OnlineRenderer`",
        "the API server of a gpt-oss model",
        "a private method of an object that vLLM creates, and no hook for another renderer",
    ),
    Replaced(
        "handler.engine_client",
        "_vllm/replaced.py",
        "the engine client, by a wrapper of it, on the three handlers that read output as chat does",
        "the API server of a gpt-oss model",
        "vLLM looks for stop strings in reasoning too, and offers no hook between engine and handler",
    ),
    Replaced(
        "state[name]",
        "_vllm/replaced.py",
        "three handlers in the app's state (chats, batches, completions), by copies with subclasses of their classes",
        "the API server of a gpt-oss model",
        "vLLM makes the handlers, builds three models for each streamed token, and gives logprobs of all channels",
    ),
    Replaced(
        "request.make_request_output",
        "_vllm/replaced.py",
        "what the state of one streamed request makes of its tokens, until the request ends",
        "the API server of a gpt-oss model",
        "vLLM makes two objects of each token and wakes the request's task, and offers no hook before that",
    ),
    Replaced(
        "layer.attn_backend",
        "engine/attention/sm90.py",
        "FlashAttention 3's backend, by a subclass of it, on the attention layers of the model",
        "the workers of a gpt-oss model on sm90",
        "the metadata builder plans once a step only where all layers have one window",
    ),
    Replaced(
        "module.MODELS_CONFIG_MAP[architecture]",
        "_vllm/runner.py",
        "gpt-oss's entry of `MODELS_CONFIG_MAP`, by a subclass of it that also names our worker and scheduler",
        "processes that read the configuration of a gpt-oss model for one CUDA GPU",
        "vLLM reads the table before it selects worker and scheduler, and has no call that extends it",
    ),
    Replaced(
        "layer.impl",
        "engine/attention/sm90.py",
        "FlashAttention 3's part of an attention layer, by a subclass of it made of the same arguments",
        "the workers of a gpt-oss model on sm90",
        "vLLM creates it with the layer, before the model can name a backend",
    ),
)

FILLED: Mapping[str, frozenset[str]] = {
    "_vllm/__init__.py": frozenset(
        {"streamed.stop", "streamed.output_text_buffer_length", "streamed.output_kind", "params.detokenize"}
    ),
    "_vllm/worker.py": frozenset({"target[name]"}),
    "server/chat/endpoint.py": frozenset(
        {
            "args.enable_auto_tool_choice",
            "args.tool_call_parser",
            "args.tool_strict_level",
            "args.middleware",
            "structured.reasoning_parser",
        }
    ),
    "server/chat/chat_logprobs.py": frozenset({"choice.token_ids", "copy[HIDES_REASONING]"}),
    "server/chat/messages_content.py": frozenset({"block.text", "block.source", "block.content"}),
    "server/chat/vllm_constraint.py": frozenset(
        {
            "request.structured_outputs",
            "request.response_format",
            "request.text",
            "request[RESPONSE_FORMAT]",
            "request[HELD]",
        }
    ),
    "server/streaming/fast_frames.py": frozenset({"response.stream_response"}),
    "server/chat/completions.py": frozenset({"choice.token_ids"}),
    "server/chat/chat_stream.py": frozenset({"choice.token_ids"}),
    "server/chat/custom_tools.py": frozenset({"response.body_iterator"}),
    "server/chat/vllm_parser.py": frozenset({"message.content", "message.reasoning", "message.tool_calls"}),
    "server/chat/vllm_stops.py": frozenset(
        {
            "output.outputs",
            "output.finished",
            "whole.metrics",
            "choice.token_ids",
            "choice.logprobs",
            "choice.finish_reason",
            "choice.stop_reason",
        }
    ),
    "server/responses/endpoint.py": frozenset({"args.tool_server"}),
    "_vllm/replaced.py": frozenset({"theirs[name]", "args.tool_server", "handler.tool_server"}),
    "_vllm/runner.py": frozenset({"parallel.worker_cls", "scheduling.scheduler_cls"}),
    "engine/runner/scheduler.py": frozenset(
        {
            "step.num_scheduled_tokens",
            "step.total_num_scheduled_tokens",
            "known.req_ids",
            "known.new_block_ids",
            "known.num_computed_tokens",
            "known.num_output_tokens",
            "step.has_structured_output_requests",
            "step.pending_structured_output_tokens",
            "request.num_computed_tokens",
            "request.num_in_flight_tokens",
            "request.num_output_placeholders",
            "request.spec_token_ids",
            "request.next_decode_eligible_step",
            "request.last_sched_seq",
            "message.outputs",
            "message.scheduler_stats",
            "first.scheduler_stats",
        }
    ),
    "engine/runner/model_runner.py": frozenset({"states.num_computed_tokens_np[batch.rows]"}),
    "engine/experts/config.py": frozenset({"moe.moe_backend"}),
    "engine/experts/dequantize.py": frozenset({"layer[f'{name}_scale']"}),
    "engine/experts/method.py": frozenset({"moe.moe_backend"}),
}
"""Values that vLLM hands us and we fill in or change: arguments, one request, one output, one layer's configuration."""

SUBCLASSES: Mapping[str, frozenset[str]] = {
    "engine/model/gpt_oss.py": frozenset({"GptOssForCausalLM"}),
    "engine/attention/sm90.py": frozenset(
        {"FlashAttentionBackend", "FlashAttentionImpl", "FlashAttentionMetadataBuilder"}
    ),
    "engine/experts/config.py": frozenset({"GptOssMxfp4Config"}),
    "engine/experts/dequantize.py": frozenset({"UnquantizedFusedMoEMethod", "GptOssMxfp4MoEMethod"}),
    "engine/experts/method.py": frozenset({"GptOssMxfp4MoEMethod"}),
    "engine/runner/worker.py": frozenset({"Worker"}),
    "engine/runner/model_runner.py": frozenset({"GPUModelRunner"}),
    "engine/runner/output.py": frozenset({"AsyncModelRunnerOutput"}),
    "engine/runner/scheduler.py": frozenset({"AsyncScheduler", "KVCacheManager"}),
}
"""Files outside this package that import from vLLM, and the bases of their classes. vLLM's processes import these
files only when they build a gpt-oss model."""


def use_parser(ours: type) -> None:
    """Makes vLLM use the parser class `ours` for every gpt-oss model in this process. Idempotent."""
    from vllm.parser import harmony as module

    module.HarmonyParser = ours


def use_own_parser(state: Any) -> None:
    """Undoes `use_parser`: in vLLM's module, and in the handlers in the app's `state` that were made meanwhile."""
    from vllm.parser import harmony as module

    ours = module.HarmonyParser
    theirs = next(base for base in ours.__mro__ if base.__module__ == module.__name__)
    for name in ("reasoning_parser_cls", "tool_parser_cls", "tool_strict_level"):  # set as handlers are made
        setattr(theirs, name, getattr(ours, name))
    module.HarmonyParser = theirs
    for handler in _table(state).values():
        fields = getattr(handler, "__dict__", {})
        fields.update({name: theirs for name, value in fields.items() if value is ours})


async def use_tool_server(state: Any, args: Any, spec: str) -> None:
    """Starts vLLM's own tool server `spec` for vLLM's own Responses handler. Raises vLLM's errors for `spec`."""
    from vllm.entrypoints.mcp.tool_server import init_tool_server

    args.tool_server = spec
    if (handler := getattr(state, "openai_serving_responses", None)) is not None:
        handler.tool_server = await init_tool_server(args)


def remember(*objects: Any) -> Callable[[], None]:
    """Returns a function that restores the current attributes of `objects`, and of the values in an app's state."""
    tables = [_table(each) for each in objects]
    tables += [vars(value) for table in tables for name, value in table.items() if name in CHANGED and value]
    kept = [(table, dict(table)) for table in tables]

    def restore() -> None:
        for table, values in kept:
            for name in table.keys() - values.keys():
                del table[name]
            table.update(values)

    return restore


def _table(each: Any) -> dict[str, Any]:
    """The attributes of an object; Starlette's `State` keeps its own in a dictionary."""
    found: dict[str, Any] = vars(each)
    return found.get("_state", found)


def use_chat_prompt(renderer: Any, wrap: Callable[[Any], Any]) -> bool:
    """Replaces the Harmony prompt method of `renderer` by `wrap` of it. False if `renderer` has no such method."""
    upstream = getattr(renderer, "_make_request_with_harmony", None)
    if upstream is None:
        return False
    renderer._make_request_with_harmony = wrap(upstream)
    return True


CHAT_HANDLERS = ("openai_serving_chat", "openai_serving_chat_batch", "anthropic_serving_messages")
"""vLLM's handlers that read a model's output as chat does, by their names in the app's state."""
CHANGED = (*CHAT_HANDLERS, "openai_serving_completion", "online_renderer", "structured_outputs_config")
"""Objects in the app's state and in the arguments, with attributes that the plugin sets."""


def watch_generation(state: Any, wrap: Callable[[Any], Any]) -> None:
    """Puts `wrap` around the engine client of the chat handlers that are in the app's `state`."""
    for name in CHAT_HANDLERS:
        handler = getattr(state, name, None)
        if handler is not None:
            handler.engine_client = wrap(handler.engine_client)


def use_request_output(
    client: Any, request_id: str, wrap: Callable[[Any, Any, Any, Any], Callable[..., Any]]
) -> Callable[[], None] | None:
    """Puts what `wrap` makes of (the method, the queue, masks that wait, a call for new text) before a request's
    `make_request_output`.

    Returns what takes it out again; None where the request has no tokens to stream one by one: several choices or
    states, coarser steps, input that still comes, logprobs. Raises AttributeError where vLLM has moved something.
    """
    processor = client.output_processor
    identifiers = processor.external_req_ids.get(request_id, ())
    request = processor.request_states.get(identifiers[0]) if len(identifiers) == 1 else None
    if request is None or request.parent_req is not None or request.streaming_input or request.stream_interval != 1:
        return None
    logprobs = request.logprobs_processor
    if logprobs is None or logprobs.logprobs is not None or logprobs.prompt_logprobs is not None:
        return None
    if request.queue is None or not request.queue.aggregate:  # the client requested cumulative outputs
        return None
    text = functools.partial(request.detokenizer.get_next_output_text, finished=False, delta=True)
    request.make_request_output = wrap(request.make_request_output, request.queue, request.sampling_mask_chunks, text)

    def restore() -> None:
        vars(request).pop("make_request_output", None)

    return restore


def use_handler(state: Any, name: str, ours: type) -> None:
    """Makes the handler `name` in the app's `state`, if it exists, an instance of a subclass of `ours`."""
    if (handler := getattr(state, name, None)) is not None:
        setattr(state, name, _under(ours, handler))


def _under(ours: type, handler: Any) -> Any:
    """A copy of `handler` with a class that inherits from `ours` and from the class of `handler`."""
    theirs = type(handler)
    streaming = object.__new__(type(theirs.__name__, (ours, theirs), {"__module__": ours.__module__}))
    vars(streaming).update(vars(handler))
    return streaming
