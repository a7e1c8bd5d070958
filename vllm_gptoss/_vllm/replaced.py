"""Replaces attributes of vLLM for which vLLM offers no hook; the table of docs/harmony.md lists all of them.

Everything else is registered (model class, quantisation, endpoint plugin, routes of the app) or subclassed. Nothing
is replaced in a server of another model. `tests/contract/test_door.py` compares the source with the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


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


def use_renderer(state: Any, ours: type) -> bool:
    """Replaces the renderer in the app's `state`, and the handlers there that hold it, as `use_handler` does.

    False if the renderer has no Harmony prompt method.
    """
    theirs = getattr(state, "online_renderer", None)
    if not hasattr(theirs, "_make_request_with_harmony"):
        return False
    holders = [name for name, each in _table(state).items() if getattr(each, "online_renderer", None) is theirs]
    use_handler(state, "online_renderer", ours)
    for name in holders:
        use_handler(state, name, online_renderer=state.online_renderer)
    return True


CHAT_HANDLERS = ("openai_serving_chat", "openai_serving_chat_batch", "anthropic_serving_messages")
"""vLLM's handlers that read a model's output as chat does, by their names in the app's state."""
CHANGED = ("structured_outputs_config",)
"""Objects in the arguments, with attributes that the plugin sets."""


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


def use_handler(state: Any, name: str, *ours: type, **fields: Any) -> None:
    """Replaces the handler `name` in the app's `state`, if it exists, by a copy with these `fields`.

    The copy's class inherits from `ours` and from the class of the handler.
    """
    if (handler := getattr(state, name, None)) is not None:
        theirs = type(handler)
        copy = object.__new__(type(theirs.__name__, (*ours, theirs), {"__module__": __name__}))
        vars(copy).update(vars(handler), **fields)
        setattr(state, name, copy)
