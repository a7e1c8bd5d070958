"""Chat completions for gpt-oss, a part of the API server's endpoint plugin; see `server/parts.py`."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import replaced
from vllm_gptoss.server.chat import chat_route, messages_route, small_routes
from vllm_gptoss.server.chat.chat_logprobs import AnswerLogprobs
from vllm_gptoss.server.chat.chat_prompt import ChatInputError
from vllm_gptoss.server.chat.chat_request import conversation_of, is_decode_side
from vllm_gptoss.server.chat.chat_stream import ChatStream
from vllm_gptoss.server.chat.early import ONLY_COUNTED, tokens_of
from vllm_gptoss.server.chat.vllm_constraint import RESPONSE_FORMAT
from vllm_gptoss.server.chat.vllm_parser import install
from vllm_gptoss.server.chat.vllm_stops import AnswerStops
from vllm_gptoss.server.harmony.grammar import GRAMMAR_BACKENDS
from vllm_gptoss.server.http.error_format import overflow

logger = logging.getLogger(__name__)

TOOL_PARSER = "openai"
REASONING_PARSER = "openai_gptoss"
ERROR_FORMAT = "vllm_gptoss.server.http.error_format.ErrorFormat"


class ChatCompletions:
    """Our parser, prompt and constraints for `/v1/chat/completions` and the other users of vLLM's renderer."""

    def __init__(self) -> None:
        self._is_on = False
        self._streams = False

    def attach(self, app: Any, args: Namespace, settings: Any) -> None:
        """Installs the parser and sets the arguments without which vLLM would drop tool calls."""
        self._is_on = bool(settings.parser and install())
        self._streams = settings.host != "stock"
        if not self._is_on:
            return
        args.middleware = [*args.middleware, ERROR_FORMAT]  # vLLM adds these last, around its authentication
        if not chat_route.replace_route(app):
            logger.warning("Chat completions refuse tool_choice allowed_tools: vLLM has no such route to replace.")
        if not messages_route.replace_route(app):
            logger.warning("/v1/messages refuses thinking budgets: vLLM has no such route to replace.")
        if not small_routes.add_routes(app):
            logger.warning("/tokenize renders vLLM's chat template: vLLM has no such route to replace.")
        if not args.enable_auto_tool_choice or not args.tool_call_parser:
            logger.info("Tool calls are read without --enable-auto-tool-choice --tool-call-parser %s.", TOOL_PARSER)
            args.enable_auto_tool_choice = True
            args.tool_call_parser = args.tool_call_parser or TOOL_PARSER
        structured = args.structured_outputs_config
        structured.reasoning_parser = structured.reasoning_parser or REASONING_PARSER
        if settings.strict_tools and args.tool_strict_level in (None, "auto"):
            self._constrain_calls(args, structured.backend)

    @staticmethod
    def _constrain_calls(args: Namespace, backend: str) -> None:
        if backend in GRAMMAR_BACKENDS:
            args.tool_strict_level = "function"
        else:
            logger.warning(
                "Tool calls are not constrained: structured output backend %r has no token-level tags; use xgrammar.",
                backend,
            )

    async def start(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Installs our prompt in vLLM's renderer, and copies of its handlers with our stop strings and streams."""
        if not self._is_on:
            return
        makes_text = not self._streams or getattr(args, "enable_log_outputs", False)
        client = AnswerStops(engine_client, makes_text=makes_text)
        chat = (ChatStream, AnswerLogprobs) if self._streams else (AnswerLogprobs,)
        for name, classes in zip(replaced.CHAT_HANDLERS, (chat, (AnswerLogprobs,), ()), strict=True):
            replaced.use_handler(state, name, *classes, engine_client=client)
        if _vllm.variable("VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS"):
            logger.warning("vLLM's chat prompt is used, because VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS is set.")
            return
        if not replaced.use_renderer(state, ChatPrompt):
            logger.warning("vLLM's chat prompt is used: this vLLM's renderer has no step to replace.")


class ChatPrompt:
    """Overrides the step of vLLM's renderer from a chat request to prompt tokens."""

    model_config: Any

    def _make_request_with_harmony(self, request: Any, should_include_tools: bool = True) -> Any:
        if is_decode_side(request):
            return super()._make_request_with_harmony(request, should_include_tools)  # type: ignore[misc]
        try:
            prompt = conversation_of(self, request, should_include_tools, getattr(request, RESPONSE_FORMAT, None))
        except ChatInputError as error:
            raise _vllm.harmony().ValidationError(str(error), parameter=error.param) from None
        tokens = tokens_of(prompt)
        if len(tokens) >= self.model_config.max_model_len and not ONLY_COUNTED.get():
            why = overflow(self.model_config.max_model_len, len(tokens), "messages")
            raise _vllm.harmony().ValidationError(why, parameter="messages")
        return [], [_vllm.tokens_input(tokens, request.cache_salt)]
