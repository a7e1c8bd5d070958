"""vLLM's engine client with an engine that a test is: real queues, real output processing, real `generate`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from demo.tokenizer import alphabet
from tests.support.servers import running
from vllm_gptoss.server.harmony.tokens import FIRST_CONTROL, VOCABULARY, control_name, token_bytes


def client() -> Any:
    """An `AsyncLLM` fed by the test: `.say` sends tokens to all requests; `.queued` counts outputs in their queues."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.metrics.stats import IterationStats

    class HandFed(AsyncLLM):
        errored = False  # type: ignore[assignment]

        def __init__(self) -> None:
            self.output_processor = OutputProcessor(_tokenizer(), log_stats=True)
            self.engine_core: Any = SimpleNamespace(abort_requests_async=self._aborted)
            self.log_requests = False
            self.model_config: Any = SimpleNamespace(
                get_diff_sampling_param=dict,
                max_model_len=1 << 20,
                generation_config="vllm",
                override_generation_config={},
            )
            self.vllm_config: Any = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend="xgrammar"))
            self.aborted: list[str] = []
            self.queued = 0

        def shutdown(self, timeout: float | None = None) -> None:
            """There is nothing to end."""

        async def _aborted(self, identifiers: Sequence[str]) -> None:
            self.aborted += identifiers

        async def add_request(self, request_id: str, prompt: Any, params: Any, **_: Any) -> Any:
            del prompt
            inner = f"{request_id}-inner"
            request = EngineCoreRequest(
                inner, [1, 2, 3], None, params, None, time.time(), None, None, None, external_req_id=request_id
            )
            fed = self

            class Counted(RequestOutputCollector):
                def put(self, output: Any) -> None:
                    fed.queued += 1
                    super().put(output)

            queue = Counted(params.output_kind, inner)
            self.output_processor.add_request(request, "hi", None, 0, queue)
            return queue

        def say(self, *token_ids: int, finish: str | None = None, **fields: Any) -> None:
            reason = FinishReason[finish.upper()] if finish else None
            outputs = [
                EngineCoreOutput(name, list(token_ids), finish_reason=reason, **fields)
                for name in self.output_processor.request_states
            ]
            self.output_processor.process_outputs(outputs, time.monotonic(), IterationStats())

        async def asked(self, requests: int = 1) -> None:
            """Returns once so many requests wait for tokens."""
            while len(self.output_processor.request_states) < requests:
                await asyncio.sleep(0.001)

        async def tell(self, token_ids: Sequence[int], finish: str | None = "stop", pause: float = 0) -> None:
            """Sends one token a step, each after the previous one has been read."""
            for number, token in enumerate(token_ids, 1):
                self.say(token, finish=finish if number == len(token_ids) else None)
                for _ in range(8):
                    await asyncio.sleep(pause)

    return HandFed()


@cache
def _tokenizer() -> Any:
    """Decodes gpt-oss's tokens, and encodes nothing: that needs the merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    letters = alphabet()
    spelled = {"".join([letters[byte] for byte in token_bytes(i)]): i for i in range(FIRST_CONTROL)}
    decoding = Tokenizer(models.BPE(spelled, []))
    decoding.decoder = decoders.ByteLevel()
    decoding.pre_tokenizer = ByteLevel(add_prefix_space=False)
    decoding.add_special_tokens([AddedToken(control_name(i), special=True) for i in range(FIRST_CONTROL, VOCABULARY)])
    return PreTrainedTokenizerFast(tokenizer_object=decoding)


@asynccontextmanager
async def asking(app: Any, engine: Any, path: str, body: bytes, *, buffer: int | None = None) -> AsyncIterator[Client]:
    """A client of `app`, behind vLLM's web server, after its request has reached `engine`."""
    async with running(app, lifespan="off") as url:
        reader = Client(int(url.rpartition(":")[2]), path, body, buffer=buffer)
        await reader.ask()
        await engine.asked()
        yield reader


class Client:
    """A bare socket that has requested `path` and reads at any pace."""

    def __init__(self, port: int, path: str, body: bytes, *, buffer: int | None = None) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._socket = socket.socket()
        if buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._socket.setblocking(False)
        self._port = port

    async def ask(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        await loop.sock_sendall(self._socket, self._request)

    async def read(self, size: int = 1 << 16) -> bytes:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._socket, size), 30)

    async def rest(self) -> bytes:
        """The rest of the answer's body, its chunks joined."""
        raw = b""
        while part := await self.read():
            raw += part
        return unchunked(raw.partition(b"\r\n\r\n")[2])

    def leave(self) -> None:
        self._socket.close()


def unchunked(raw: bytes) -> bytes:
    """The body of a chunked message (RFC 9112, section 7.1)."""
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        body, raw = body + raw[:length], raw[length + 2 :]
        if not length:
            break
    return body
