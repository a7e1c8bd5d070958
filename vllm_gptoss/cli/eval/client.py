"""Sends one request with OpenAI's client, and returns one whole answer or the reason of its loss. Answers are streamed,
and the next request of a dialogue repeats them exactly as they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from vllm_gptoss.cli.eval.judge import Answer, FunctionCall, Outcome


class LostSampleError(Exception):
    """No whole answer came."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail[:500])
        self.outcome = outcome


class Responses:
    """`/v1/responses`. A stream's deltas are not read: its last event holds the whole response."""

    path = "/responses"

    def body(self, history: Sequence[Any], tools: Sequence[Any], schema: Any, effort: str, most: int) -> dict[str, Any]:
        """A request that continues `history`, of at most `most` tokens."""
        strict = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
        return {
            "input": history,
            "max_output_tokens": most,
            "store": False,
            "reasoning": {"effort": effort} if effort else None,
            "tools": [{"strict": False, **tool} if tool["type"] == "function" else tool for tool in tools] or None,
            "text": None if schema is None else {"format": strict},
        }

    def result(self, call: FunctionCall, text: str) -> dict[str, Any]:
        """The history item of a function's result."""
        return {"type": "function_call_output", "call_id": call.id, "output": text}

    async def read(self, events: AsyncIterator[Any]) -> Answer:
        """Reads a stream to its last event."""
        async for event in events:
            if event["type"] in ("error", "response.failed"):
                error = event.get("response", event).get("error") or event
                refused = error.get("code") == "invalid_prompt"
                raise LostSampleError(Outcome.REFUSED if refused else Outcome.FAILED, f"the server reports {error}")
            if event["type"] in ("response.completed", "response.incomplete"):
                return self._whole(event["response"])
        raise LostSampleError(Outcome.BROKEN, "the stream ended before its answer")

    def _whole(self, response: Mapping[str, Any]) -> Answer:
        items = response["output"]
        spoken, thought = (
            [
                part
                for item in items
                if item["type"] == kind
                for part in item.get("content") or item.get("summary") or ()
            ]
            for kind in ("message", "reasoning")
        )
        text, reasoning = ("".join(part.get("text") or "" for part in parts) for parts in (spoken, thought))
        calls = [item for item in items if item["type"] in ("function_call", "mcp_call")]
        made = [FunctionCall(item.get("call_id") or "", item["name"], item["arguments"] or "") for item in calls]
        cut = (response.get("incomplete_details") or {}).get("reason") not in (None, "content_filter")
        citations = sum(len(part.get("annotations") or ()) for part in spoken)
        tokens = (response.get("usage") or {}).get("output_tokens") or 0
        return Answer(text, reasoning, made, cut, tokens, items, citations)


class Chat:
    """`/v1/chat/completions`."""

    path = "/chat/completions"

    def body(self, history: Sequence[Any], tools: Sequence[Any], schema: Any, effort: str, most: int) -> dict[str, Any]:
        """A request that continues `history`, of at most `most` tokens."""
        functions = [{key: value for key, value in tool.items() if key != "type"} for tool in tools]
        strict = {"name": "answer", "schema": schema, "strict": True}
        return {
            "messages": history,
            "max_completion_tokens": most,
            "stream_options": {"include_usage": True},
            "reasoning_effort": effort or None,
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            "response_format": None if schema is None else {"type": "json_schema", "json_schema": strict},
        }

    def result(self, call: FunctionCall, text: str) -> dict[str, Any]:
        """The history item of a function's result."""
        return {"role": "tool", "tool_call_id": call.id, "content": text}

    async def read(self, chunks: AsyncIterator[Any]) -> Answer:
        """Sums up the chunks of a stream."""
        content: list[str] = []
        thought: list[str] = []
        made: list[tuple[str, list[str], list[str]]] = []
        last: dict[str, Any] = {}
        async for chunk in chunks:
            last["usage"] = chunk.get("usage") or last.get("usage")
            for choice in chunk["choices"]:
                last["finish"] = choice.get("finish_reason") or last.get("finish")
                delta = choice.get("delta") or {}
                content.append(delta.get("content") or "")
                thought.append(delta.get("reasoning") or delta.get("reasoning_content") or "")
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(made):
                        made.append((call.get("id") or "", [], []))
                    for pieces, name in zip(made[call["index"]][1:], ("name", "arguments"), strict=True):
                        pieces.append(call["function"].get(name) or "")
        if not last.get("finish"):
            raise LostSampleError(Outcome.BROKEN, "the stream ended before its answer")
        text, reasoning = "".join(content), "".join(thought)
        calls = [FunctionCall(call, "".join(name), "".join(arguments)) for call, name, arguments in made]
        functions = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        item: dict[str, Any] = {"role": "assistant", "content": text or None}
        item |= {"reasoning": reasoning} if reasoning else {}
        item |= {"tool_calls": functions} if functions else {}
        tokens = (last["usage"] or {}).get("completion_tokens") or 0
        return Answer(text, reasoning, calls, last["finish"] == "length", tokens, [item])


APIS: Mapping[str, Responses | Chat] = {"responses": Responses(), "chat": Chat()}


@dataclass(frozen=True, slots=True)
class EvalClient:
    """One model of one server. fields: of every request. most: tokens of one answer. timeout_s: seconds for one answer
    with all tries."""

    http: openai.AsyncOpenAI
    api: Responses | Chat
    fields: Mapping[str, Any]
    most: int
    timeout_s: float

    async def ask(
        self, history: Sequence[Any], tools: Sequence[Any], schema: Any, effort: str, request: Mapping[str, Any]
    ) -> Answer:
        """The answer to one request, with the further fields `request`.

        Raises:
            LostSampleError: none came.
        """
        body = {"stream": True, **self.api.body(history, tools, schema, effort, self.most), **self.fields, **request}
        body = {key: value for key, value in body.items() if value is not None}
        try:
            async with asyncio.timeout(self.timeout_s):
                stream = await self.http.post(
                    self.api.path, body=body, cast_to=object, stream=True, stream_cls=openai.AsyncStream[Any]
                )
                async with stream:
                    return await self.api.read(stream)
        except LostSampleError:
            raise
        except (TimeoutError, openai.APITimeoutError, httpx.TimeoutException) as error:  # httpx's: openai 2.25
            why = f"no answer after {self.timeout_s:g} s" if isinstance(error, TimeoutError) else "timed out"
            raise LostSampleError(Outcome.TIMED_OUT, str(error) or why) from None
        except openai.APIStatusError as error:
            refused = error.status_code < 500
            raise LostSampleError(Outcome.REFUSED if refused else Outcome.FAILED, error.message) from None
        except openai.APIConnectionError as error:
            raise LostSampleError(Outcome.BROKEN, f"{error} {error.__cause__ or ''}".strip()) from None
        except openai.APIError as error:
            raise LostSampleError(Outcome.FAILED, f"the server reports {error.body}") from None
        except Exception as error:
            raise LostSampleError(Outcome.BROKEN, f"not a stream of {self.api.path}: {error!r}") from None
