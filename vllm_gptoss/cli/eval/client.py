"""Sends one request and returns one whole answer, or the reason of its loss.

Every wait, every size and every number of tries has a bound.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from vllm_gptoss.cli.eval.apis import LAST_EVENTS, Chat, Fate, LostSampleError, ModelAnswer, Responses

MAX_EVENT = 4 << 20
"""Bytes of one event, or of an answer that is not streamed. 131,072 tokens of text are below 1 MiB."""

MAX_STREAM = 512 << 20
"""Bytes of one stream. 131,072 tokens, one an event, are about 40 MiB."""

MAX_WAIT_S = 60.0
"""The longest pause before another try, also with a longer Retry-After."""


@dataclass(frozen=True, slots=True)
class AskLimits:
    """Seconds for one request, seconds without a byte once the answer has begun, and tries of one request."""

    timeout_s: float = 3600.0
    idle_s: float = 300.0
    tries: int = 5


class EvalClient:
    """A connection pool to one server: `async with EvalClient(...) as client`."""

    def __init__(
        self, base_url: str, api: Responses | Chat, limits: AskLimits, *, at_once: int, api_key: str | None = None
    ) -> None:
        self.api = api
        self._limits = limits
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/"),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=httpx.Timeout(None, connect=30.0),  # the answer's limits are enforced below
            limits=httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once),
        )

    async def __aenter__(self) -> EvalClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """The names that the server answers to.

        Raises:
            LostSampleError: there is no such list.
        """
        async with self._sent("GET", "/models", 60) as (response, _):
            body = await _body(response, lambda: None)
        with _shape("list of models"):
            return [str(model["id"]) for model in _json(body)["data"]]

    async def ask(self, body: Mapping[str, Any]) -> ModelAnswer:
        """One whole answer.

        Raises:
            LostSampleError: none came; `tries` is the number of requests.
        """
        for number in range(1, self._limits.tries + 1):
            try:
                answer = await self._once(body)
            except LostSampleError as error:
                error.tries = number
                if not error.again or number == self._limits.tries:
                    raise
                spread = 0.5 * 2**number * random.uniform(0.5, 1.0)  # noqa: S311  hides nothing
                await asyncio.sleep(min(MAX_WAIT_S, spread if error.wait_s is None else error.wait_s))
            else:
                answer.tries = number
                return answer
        raise AssertionError("tries is at least 1")

    async def _once(self, body: Mapping[str, Any]) -> ModelAnswer:
        loop, began = asyncio.get_running_loop(), time.monotonic()
        last, first = loop.time() + self._limits.timeout_s, 0.0

        async with self._sent("POST", self.api.path, self._limits.timeout_s, json=body) as (response, limit):

            def heard() -> None:
                """Moves the end of the request's time: `idle_s` after every byte, not beyond its limit."""
                nonlocal first
                first = first or time.monotonic()
                limit.reschedule(min(last, loop.time() + self._limits.idle_s))

            if response.headers.get("content-type", "").startswith("text/event-stream"):
                whole = await self._streamed(response, heard)
            else:
                whole = _json(await _body(response, heard))
        with _shape(self.api.form):
            answer = self.api.whole(whole)
        answer.seconds, answer.first_s = time.monotonic() - began, first - began if first else None
        return answer

    async def _streamed(self, response: httpx.Response, heard: Callable[[], None]) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        async for name, data in _events(response, heard):
            if data == b"[DONE]":
                break
            if not name.startswith("response.") or name in LAST_EVENTS:
                with _shape(f"event of a {self.api.form}"):
                    self.api.add(whole, _json(data))
            if name in LAST_EVENTS:
                break  # nothing follows; a server that goes on is not listened to
        if not whole:
            raise LostSampleError(Fate.BROKEN, "the stream ended before its answer", again=True)
        return whole

    @asynccontextmanager
    async def _sent(
        self, method: str, path: str, seconds: float, **options: Any
    ) -> AsyncIterator[tuple[httpx.Response, asyncio.Timeout]]:
        """The response to a request, if its status is 200, and the timeout of all that is done with it."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds) as limit, self._http.stream(method, path, **options) as response:
                if response.status_code != 200:
                    raise _status(response, await _body(response, lambda: None))
                yield response, limit
        except TimeoutError:
            # Not tried again in this run: it would cost as long once more.
            raise LostSampleError(Fate.TIMED_OUT, f"no answer after {time.monotonic() - began:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            again = not isinstance(error, httpx.UnsupportedProtocol)
            raise LostSampleError(Fate.BROKEN, what, again=again) from None


async def _bytes(response: httpx.Response, heard: Callable[[], None]) -> AsyncIterator[bytes]:
    """The parts of a body, which must not be compressed: its received bytes are counted."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise LostSampleError(Fate.BROKEN, f"the answer is compressed ({encoding}), which no request accepts")
    async for part in response.aiter_raw():
        heard()
        yield part


async def _body(response: httpx.Response, heard: Callable[[], None]) -> bytes:
    body = bytearray()
    async for part in _bytes(response, heard):
        body += part
        if len(body) > MAX_EVENT:
            raise _too_large(MAX_EVENT)
    return bytes(body)


async def _events(response: httpx.Response, heard: Callable[[], None]) -> AsyncIterator[tuple[str, bytes]]:
    """(name or "", data) of every event of a stream, line by line as the standard has them.

    Own code, because the libraries that read event streams put no bound on a line.
    """
    rest, size, name, data = b"", 0, "", bytearray()
    async for part in _bytes(response, heard):
        size += len(part)
        if size > MAX_STREAM:
            raise _too_large(MAX_STREAM)
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if data:
                    yield name, bytes(data)
                name, data = "", bytearray()
            elif line.startswith(b"event:"):
                name = line[6:200].strip().decode(errors="replace")
            elif line.startswith(b"data:"):
                data += (b"\n" if data else b"") + line[5:].removeprefix(b" ")
        if len(rest) + len(data) > MAX_EVENT:
            raise _too_large(MAX_EVENT)
    if data:
        yield name, bytes(data)


def _too_large(limit: int) -> LostSampleError:
    return LostSampleError(Fate.BROKEN, f"the answer is larger than {limit >> 20} MiB")


@contextmanager
def _shape(form: str) -> Iterator[None]:
    """Loses the sample where JSON has another form than the API defines."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError):
        raise LostSampleError(Fate.BROKEN, f"the answer is JSON, but no {form}") from None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        detail = f"the answer is no JSON ({str(error)[:100]}): {data[:200].decode(errors='replace')!r}"
        raise LostSampleError(Fate.BROKEN, detail, again=True) from None


def _status(response: httpx.Response, body: bytes) -> LostSampleError:
    """What a status other than 200 means."""
    status = response.status_code
    again = status in (408, 409, 425, 429) or status >= 500
    detail = f"HTTP {status}: {body[:500].decode(errors='replace')}"
    fate = Fate.FAILED if status >= 500 else Fate.REFUSED
    return LostSampleError(fate, detail, again=again, wait_s=_retry_after(response))


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds, of a number or a date (RFC 9110, 10.2.3)."""
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
