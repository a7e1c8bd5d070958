"""Sends one request and returns one whole answer, or the reason of its loss.

Every wait, every size and every number of tries has a bound.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from vllm_gptoss.cli.eval.answer import Answer, Fate, LostError
from vllm_gptoss.cli.eval.apis import Api, Reader

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


class Client:
    """A connection pool to one server: `async with Client(...) as client`."""

    def __init__(
        self, base_url: str, api: Api, limits: AskLimits, *, at_once: int, api_key: str | None = None, seed: int = 0
    ) -> None:
        self._api = api
        self._limits = limits
        self._jitter = random.Random(seed)  # noqa: S311  spreads retries, hides nothing
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/"),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=httpx.Timeout(None, connect=30.0),  # the answer's limits are enforced below
            limits=httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """The names that the server answers to.

        Raises:
            LostError: there is no such list.
        """
        try:
            async with asyncio.timeout(60), _lost_as_errors(), self._http.stream("GET", "/models") as response:
                body = await self._body(response)
        except TimeoutError:
            raise LostError(Fate.TIMED_OUT, "/models does not answer within 60 s", again=False) from None
        if response.status_code != 200:
            raise _status(response, body)
        try:
            return [str(model["id"]) for model in _json(body)["data"]]
        except (KeyError, TypeError):
            raise LostError(Fate.BROKEN, "/models holds no list of models", again=False) from None

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """One whole answer.

        Raises:
            LostError: none came; `tries` is the number of requests.
        """
        for number in range(1, self._limits.tries + 1):
            try:
                answer = await self._once(body)
            except LostError as error:
                error.tries = number
                if not error.again or number == self._limits.tries:
                    raise
                await asyncio.sleep(self._pause(number, error.wait_s))
            else:
                answer.tries = number
                return answer
        raise AssertionError("tries is at least 1")

    def _pause(self, number: int, asked: float | None) -> float:
        wait = asked if asked is not None else 0.5 * 2**number * self._jitter.uniform(0.5, 1.0)
        return min(wait, MAX_WAIT_S)

    async def _once(self, body: Mapping[str, Any]) -> Answer:
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(self._limits.timeout_s) as limit,
                _lost_as_errors(),
                self._http.stream("POST", self._api.path, json=body) as response,
            ):
                watch = _Watch(limit, self._limits.idle_s)
                answer = await self._answer(response, watch)
        except TimeoutError:
            # Not tried again in this run: it would cost as long once more.
            raise LostError(Fate.TIMED_OUT, f"no answer after {time.monotonic() - began:.0f} s", again=False) from None
        answer.seconds = time.monotonic() - began
        answer.first_s = watch.first - began if watch.first else None
        return answer

    async def _answer(self, response: httpx.Response, watch: _Watch) -> Answer:
        if response.status_code != 200:
            raise _status(response, await self._body(response, watch))
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return await self._streamed(response, watch)
        return self._api.whole(_json(await self._body(response, watch)))

    async def _streamed(self, response: httpx.Response, watch: _Watch) -> Answer:
        reader = self._api.reader()
        async for event, data in _events(response, watch):
            if data == b"[DONE]":
                break
            if reader.wants(event):
                reader.feed(_json(data))
            if event.startswith("response.") and reader.answer is not None:
                break  # nothing follows; a server that goes on is not listened to
        return _finished(reader)

    async def _body(self, response: httpx.Response, watch: _Watch | None = None) -> bytes:
        body = bytearray()
        async for part in _plain(response):
            body += part
            if watch:
                watch.heard()
            if len(body) > MAX_EVENT:
                raise _too_large(MAX_EVENT)
        return bytes(body)


def _finished(reader: Reader) -> Answer:
    answer = reader.answer
    if answer is None:
        raise LostError(Fate.BROKEN, "the stream ended before its answer", again=True)
    return answer


class _Watch:
    """Moves the end of a request's time: not beyond its limit, and `idle_s` after every byte."""

    def __init__(self, limit: asyncio.Timeout, idle_s: float) -> None:
        self._limit = limit
        self._last = limit.when()
        self._idle_s = idle_s
        self.first: float | None = None

    def heard(self) -> None:
        if self.first is None:
            self.first = time.monotonic()
        soon = asyncio.get_running_loop().time() + self._idle_s
        self._limit.reschedule(soon if self._last is None else min(self._last, soon))


async def _events(response: httpx.Response, watch: _Watch) -> AsyncIterator[tuple[str, bytes]]:
    """(name or "", data) of every event of a stream, line by line as the standard has them.

    Own code, because the libraries that read event streams put no bound on a line.
    """
    rest, size, name, data = b"", 0, "", bytearray()
    async for part in _plain(response):
        watch.heard()
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


def _plain(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body, which must not be compressed: its received bytes are counted."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise LostError(Fate.BROKEN, f"the answer is compressed ({encoding}), which no request accepts", again=False)
    return response.aiter_raw()


class _lost_as_errors:  # noqa: N801  used as a context manager
    """Turns what httpx raises into a LostError."""

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.HTTPError | httpx.InvalidURL):
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise LostError(Fate.BROKEN, what, again=not isinstance(error, httpx.UnsupportedProtocol)) from None


def _too_large(limit: int) -> LostError:
    return LostError(Fate.BROKEN, f"the answer is larger than {limit >> 20} MiB", again=False)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        detail = f"the answer is no JSON ({str(error)[:100]}): {data[:200].decode(errors='replace')!r}"
        raise LostError(Fate.BROKEN, detail, again=True) from None


def _status(response: httpx.Response, body: bytes) -> LostError:
    """What a status other than 200 means."""
    status = response.status_code
    detail = f"HTTP {status}: {body[:500].decode(errors='replace')}"
    if status in (408, 409, 425, 429):
        return LostError(Fate.REFUSED, detail, again=True, wait_s=_retry_after(response))
    if status >= 500:
        return LostError(Fate.FAILED, detail, again=True, wait_s=_retry_after(response))
    return LostError(Fate.REFUSED, detail, again=False)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds, of a number or a date (RFC 9110, 10.2.3)."""
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
