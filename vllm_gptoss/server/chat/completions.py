"""/v1/completions of a gpt-oss model, with less work per streamed token than vLLM's handler.

The text is vLLM's raw text; Harmony is not parsed here. vLLM builds three models per token and wakes the request's
task. `Ahead` writes the text of a single prompt instead, with the same bytes.
"""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import replaced
from vllm_gptoss.server.http import routes
from vllm_gptoss.server.http.error_format import overflow
from vllm_gptoss.server.streaming.direct_send import Direct, NextText
from vllm_gptoss.server.streaming.fast_frames import Ahead, Frames, TextStream, go_straight

logger = logging.getLogger(__name__)

PATH = "/v1/completions"

_encode = msgspec.json.Encoder().encode
_TEXT = '"text":'


class Completions:
    """A part of the endpoint plugin: `attach` before vLLM builds its handlers, `start` after."""

    def __init__(self) -> None:
        self._streams = False

    def attach(self, app: FastAPI, args: Namespace, settings: Any) -> None:
        """Adds our route, unless `GPTOSS_HOST=stock`."""
        self._streams = settings.host != "stock"
        if self._streams and not replace_route(app):
            self._streams = False
            logger.warning("Completions are streamed by vLLM's handler: vLLM has no such route to replace.")

    async def start(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Puts `CompletionStream` over vLLM's handler."""
        if self._streams:
            replaced.use_handler(state, "openai_serving_completion", CompletionStream)


def replace_route(app: FastAPI) -> bool:
    """Adds our route; vLLM then removes its own of the same path. False if vLLM has no such route."""
    core = routes.posts(app).get(PATH)
    if core is None:
        return False

    async def create_completion(request: Any, raw_request: Request) -> Any:
        invalid: type[Any] = _vllm.harmony().ValidationError
        try:
            return go_straight(await core.endpoint(request, raw_request))
        except invalid as error:
            if error.parameter != "max_tokens" or error.value != 0 or request.max_tokens == 0:
                raise
            # vLLM reports `max_tokens` for a prompt that fills the context window to the last token.
            window = raw_request.app.state.openai_serving_models.model_config.max_model_len
            raise invalid(overflow(window, window, "prompt"), parameter="prompt") from None

    routes.add_beside(app, core, create_completion)
    return True


class CompletionStream(TextStream):
    """Subclass part for vLLM's completions handler."""

    def completion_stream_generator(
        self,
        request: Any,
        engine_inputs: Sequence[Any],
        result_generator: AsyncGenerator[tuple[int, Any], None],
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[str | bytes]:
        """Overrides vLLM's method: server-sent events of one request."""
        theirs = super().completion_stream_generator  # type: ignore[misc]  # vLLM's
        if len(engine_inputs) != 1 or not self._is_plain(request):
            return theirs(request, engine_inputs, result_generator, request_id, *args, **kwargs)  # type: ignore[no-any-return]

        def attach(direct: Direct) -> None:
            direct.attach(self.engine_client, f"{request_id}-0")  # type: ignore[attr-defined]  # vLLM's

        ahead = Ahead(_of_the_prompt(result_generator), attach)
        frames = theirs(request, engine_inputs, _Numbered(ahead), request_id, *args, **kwargs)
        return Frames(frames, ahead, _teller)


async def _of_the_prompt(numbered: AsyncGenerator[tuple[int, Any], None]) -> AsyncGenerator[Any, None]:
    """Removes the prompt index of a request with one prompt."""
    async with aclosing(numbered):
        async for _, result in numbered:
            yield result


class _Numbered:
    """Adds index 0 of the prompt again."""

    def __init__(self, results: Ahead) -> None:
        self._results = results

    def __aiter__(self) -> _Numbered:
        return self

    async def __anext__(self) -> tuple[int, Any]:
        return 0, await anext(self._results)


class _Told:
    """Writes the text of a stream (a `Teller`). vLLM's generator writes the first result and counts the tokens."""

    def __init__(self, before: str, after: str) -> None:
        self._before = before.encode()
        self._after = after.encode()
        self._uncounted: list[int] = []

    def begin(self, choice: Any) -> bytes:
        return b""

    def read(self, choice: Any) -> bytes:
        self._uncounted += choice.token_ids
        return self._frame(choice.text)

    def take(self, token_ids: Sequence[int], text: NextText) -> bytes:
        """Also writes a frame, with empty text, for a partial character or the possible beginning of a stop string."""
        self._uncounted += token_ids
        return self._frame(text())

    def _frame(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _encode(text), self._after)

    def hand_on(self, choice: Any) -> None:
        choice.token_ids = [*self._uncounted, *choice.token_ids]


def _teller(head: str) -> _Told | None:
    """The writer after vLLM's first frame `head`; None if that is an error."""
    at = head.find(_TEXT) + len(_TEXT)
    if at < len(_TEXT):
        return None
    _, end = json.JSONDecoder().raw_decode(head, at)
    return _Told(head[:at], head[end:])
