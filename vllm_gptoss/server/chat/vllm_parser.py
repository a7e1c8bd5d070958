"""Adapts our parser to the class that vLLM composes for gpt-oss.

`ParserManager` imports `vllm.parser.harmony.HarmonyParser` and has no registry for it (0.32 and 0.33), so `install`
replaces that class. Only gpt-oss models use it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import replaced
from vllm_gptoss.server.chat.chat import CallDelta, ChatDelta, ChatReader
from vllm_gptoss.server.chat.vllm_constraint import HELD, constrain, offered_tools
from vllm_gptoss.server.harmony.held import NOTHING
from vllm_gptoss.server.harmony.offered import NO_TOOLS, OfferedTools
from vllm_gptoss.server.harmony.prompt import FINAL_HEADER
from vllm_gptoss.server.harmony.tokens import CALL

logger = logging.getLogger(__name__)

NEEDS_OBJECTS: ContextVar[bool] = ContextVar("needs_objects", default=False)
"""Whether calls of a whole answer must have JSON objects: `/v1/messages` decodes them and fails otherwise."""


class ReadTokens(list[int]):
    """Token ids that `reader` has read; only the text of `untold` was not sent yet. See `chat_stream.py`."""

    def __init__(self, reader: ChatReader) -> None:
        super().__init__()
        self.reader = reader
        self.untold = ChatDelta()


HIDES_REASONING = "gptoss_hides_reasoning"
"""Request attribute for hidden reasoning if `include_reasoning` is set only to make vLLM return logprobs."""


def hides_reasoning(request: Any) -> bool:
    """Whether the client requested an answer without reasoning."""
    return not request.include_reasoning or getattr(request, HIDES_REASONING, False)


def chat_reader(request: Any, offered: OfferedTools, *, marks: bool = False) -> ChatReader:
    """A reader for one choice of a chat request with the tools `offered`. `marks`: for `take_answer`."""
    stop = getattr(request, "stop", None) or ()
    return ChatReader(
        NO_TOOLS if getattr(request, "tool_choice", None) == "none" else offered,
        (stop,) if isinstance(stop, str) else stop,
        keeps_stop=bool(getattr(request, "include_stop_str_in_output", False)),
        min_tokens=getattr(request, "min_tokens", 0) or 0,
        held=getattr(request, HELD, NOTHING),
        reads_on=bool(getattr(request, "ignore_eos", False)),
        counts=not marks,
        marks=marks,
        prefix=FINAL_HEADER if getattr(request, "continue_final_message", False) else (),
    )


class GptOssParser:
    """Overrides upstream's `HarmonyParser`. vLLM makes one per choice for output, and one to adjust a request.

    Reasoning and tool calls are parsed even without `--reasoning-parser` and `--tool-call-parser`. vLLM's Responses
    handler, which runs if our endpoint is switched off, reads with upstream's methods.
    """

    _num_counted_tokens: int
    _num_reasoning_tokens: int
    tool_strict_level: Any = None

    def __init__(self, tokenizer: Any, tools: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, tools, *args, **kwargs)  # type: ignore[call-arg]  # upstream's, see parser_class
        self._offered = offered_tools(tools)
        self._chat: ChatReader | None = None

    # Chat completions

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[Any] | None]:
        """Reasoning, content and calls of a whole output. `model_output` lacks control tokens and is ignored."""
        reader = chat_reader(request, self._offered)
        delta, end = reader.feed(model_output_token_ids), reader.finish()
        self._count(reader, len(model_output_token_ids))
        calls: list[Any] = []
        for call in (*delta.calls, *end.calls):
            if call.name is None:
                calls[-1].arguments += call.arguments
            else:
                calls.append(_vllm.harmony().FunctionCall(name=call.name, arguments=call.arguments))
        if NEEDS_OBJECTS.get():
            calls = _with_objects(calls, is_cut=CALL not in model_output_token_ids[-1:])
        reasoning = "" if hides_reasoning(request) else delta.reasoning + end.reasoning
        return reasoning or None, delta.content + end.content or None, calls or None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        """The `DeltaMessage` of the next tokens, or None if they add nothing."""
        if isinstance(delta_token_ids, ReadTokens):
            reader = self._chat = delta_token_ids.reader
            deltas = [delta_token_ids.untold]
        else:
            reader = self._chat = self._chat or chat_reader(request, self._offered)
            deltas = [reader.feed(delta_token_ids)]
        if finished:
            deltas.append(reader.finish())
            self._chat = None
        self._count(reader, self._num_counted_tokens + len(delta_token_ids))
        return _delta_message(deltas, not hides_reasoning(request))

    def _count(self, reader: ChatReader, tokens: int) -> None:
        self._num_counted_tokens, self._num_reasoning_tokens = tokens, reader.reasoning_tokens

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens of analysis. Upstream also counts the arguments of calls."""
        if len(token_ids) == self._num_counted_tokens:
            return self._num_reasoning_tokens
        reader = ChatReader(self._offered, reads_on=True)
        reader.feed(token_ids)
        reader.finish()
        return reader.reasoning_tokens

    # Requests

    def adjust_request(self, request: Any) -> Any:
        return constrain(request, self.tool_strict_level)


def _with_objects(calls: list[Any], *, is_cut: bool) -> list[Any]:
    """Drops a last call that was cut, and wraps arguments that are not objects in `INVALID_JSON`.

    Anthropic's documentation uses that key for invalid calls.
    """
    if is_cut and calls and not _is_object(calls[-1].arguments):
        calls = calls[:-1]
    make = _vllm.harmony().FunctionCall
    return [
        call
        if _is_object(call.arguments)
        else make(name=call.name, arguments=json.dumps({"INVALID_JSON": call.arguments}))
        for call in calls
    ]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _delta_message(deltas: Sequence[ChatDelta], include_reasoning: bool) -> Any:
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas) if include_reasoning else ""
    calls = [_delta_tool_call(call) for delta in deltas for call in delta.calls]
    if not (content or reasoning or calls):
        return None
    # vLLM omits unset fields when it serialises.
    message = _vllm.harmony().DeltaMessage()
    if content:
        message.content = content
    if reasoning:
        message.reasoning = reasoning
    if calls:
        message.tool_calls = calls
    return message


def _delta_tool_call(call: CallDelta) -> Any:
    vllm = _vllm.harmony()
    if call.name is None:
        function = vllm.DeltaFunctionCall(arguments=call.arguments)
        return vllm.DeltaToolCall(index=call.index, function=function)
    function = vllm.DeltaFunctionCall(name=call.name, arguments=call.arguments)
    return vllm.DeltaToolCall(id=vllm.make_tool_call_id(), type="function", index=call.index, function=function)


@cache
def parser_class() -> type:
    """Our subclass of upstream's `HarmonyParser`, made on first use because the base class imports vLLM."""
    return type("HarmonyParser", (GptOssParser, _vllm.harmony().Parser), {"__module__": __name__})


def install() -> bool:
    """Makes vLLM use our parser for gpt-oss; False, with a warning, if this vLLM has no such class.

    Idempotent. docs/harmony.md lists what is replaced and why.
    """
    try:
        ours = parser_class()
    except (ImportError, AttributeError) as error:
        logger.warning("vLLM's Harmony parser is used: %s. Chat completions may lose malformed output.", error)
        return False
    replaced.use_parser(ours)
    return True
