"""One response, from prompt to its last event: generate, read Harmony, run tools, feed their answers back, again.

The whole loop has one `max_output_tokens`. What was cut is `incomplete` and a cut call never runs. A later turn's
prompt is the earlier one, the generated tokens, and the tool's answer: the prefix stays cached and the model sees its
own text. Only messages that the parser had to repair are rendered again, in the trained form.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from vllm_gptoss.server.harmony import messages as harmony
from vllm_gptoss.server.harmony.events import Channel
from vllm_gptoss.server.harmony.messages import Message
from vllm_gptoss.server.harmony.prompt import render, render_message
from vllm_gptoss.server.harmony.tokens import CALL, END, START, encode
from vllm_gptoss.server.responses import ids
from vllm_gptoss.server.responses.errors import ApiError, EngineError, id_taken
from vllm_gptoss.server.responses.metrics import RESPONSES
from vllm_gptoss.server.responses.prompt.conversation import characters_of, rendered
from vllm_gptoss.server.responses.prompt.toolset import Kind, Route
from vllm_gptoss.server.responses.request.items import Item
from vllm_gptoss.server.responses.run.engine import ABORTED, NOT_BEGUN
from vllm_gptoss.server.responses.run.events import Event, Live, Output
from vllm_gptoss.server.responses.run.job import Compaction, Job
from vllm_gptoss.server.responses.run.listener import Listener, Turn
from vllm_gptoss.server.responses.run.response_object import Usage
from vllm_gptoss.server.responses.run.tool_writers import McpCallWriter, ToolWriter, list_tools
from vllm_gptoss.server.responses.state.conversation_hold import ConversationHold
from vllm_gptoss.server.responses.state.stored import StoreError, TakenError
from vllm_gptoss.server.streaming.direct_send import Direct
from vllm_gptoss.tools.protocol import File, ToolCall, ToolResult, call_within

logger = logging.getLogger(__name__)

IGNORED_CALLS = 2
"""How often a model is reminded that `max_tool_calls` is spent before the response ends."""


class Loop:
    """Runs a job once. `run()` yields its events; `body` is the response so far.

    refused: an error of the request that was found while it ran
    is_ending: its end is being stored, or was; is_kept: that has succeeded
    live: if it is set before `run`, gets text inside messages directly, not through the generator
    """

    def __init__(self, job: Job, hold: ConversationHold | None = None) -> None:
        self._job = job
        self._hold = hold
        self._out = Output()
        self._listener = Listener(job, self._out)
        self._ignored = 0
        self._compaction_tokens = 0
        self._turn: Turn | None = None
        self.body = job.body
        self.refused: ApiError | None = None
        self.is_ending = False
        self.is_kept = False
        self.live: Live | None = None

    async def run(self) -> AsyncGenerator[list[Event], None]:
        """Events of the whole response in batches that belong together; the last event is terminal.

        Closing the generator stops generation and tools.
        """
        if self._hold:
            self._hold.renew()
        try:
            kinds = ("created", "queued")[: 1 + self._job.queued]
            first = [self._out.event(f"response.{kind}", response=dict(self.body)) for kind in kinds]
            if self._job.queued:
                yield first  # it waits here for its turn
                first = []
            yield first + self._begin()
            async with aclosing(self._rounds()) as batches:
                async for batch in batches:
                    yield batch
            events_at_end = await self._finish()
        except EngineError as error:
            events_at_end = await self._fail(str(error))
        except ApiError as error:  # a fault that only the engine finds, for example in a grammar
            self.refused = error
            events_at_end = await self._fail(error.message, "invalid_prompt")
        except Exception as error:
            logger.exception("Response %s failed", self._job.id)
            events_at_end = await self._fail(f"{type(error).__name__}: {error}")
        finally:
            await self.close()
        yield events_at_end

    async def cancel(self) -> list[Event]:
        """The last events of a response that was stopped from outside."""
        await self.close()
        return await self._end("cancelled", "response.incomplete")

    async def fail(self, message: str) -> list[Event]:
        """The last events of a response that its server fails with `message`."""
        await self.close()
        return await self._fail(message)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._listener.usage

    @property
    def prompt_tokens(self) -> int:
        """Length of the first prompt."""
        return len(self._job.prompt)

    async def close(self) -> None:
        """Closes tools and unlocks the conversation; for a loop that does not run (any more)."""
        await self._job.toolset.close()
        if self._hold:
            await self._hold.release()

    # Beginning and end

    def _begin(self) -> list[Event]:
        self.body["status"] = "in_progress"
        events = [self._out.event("response.in_progress", response=dict(self.body))]
        for namespace, names in self._job.toolset.servers:
            if namespace.name not in self._job.listed:
                events += list_tools(self._out, namespace, names)
        return events

    async def _finish(self) -> list[Event]:
        if self.body["incomplete_details"]:
            return await self._end("incomplete", "response.incomplete")
        self.body["completed_at"] = int(time.time())
        return await self._end("completed", "response.completed")

    async def _fail(self, message: str, code: str = "server_error") -> list[Event]:
        self.body["error"] = {"code": code, "message": message}
        return await self._end("failed", "response.failed")

    async def _end(self, status: str, kind: str) -> list[Event]:
        events: list[Event] = []
        if self._turn:  # stopped in the middle: the text so far stays
            events += self._listener.finish(self._turn)
        events += self._out.give_up()
        self.body |= {"status": status, "output": self._out.items, "usage": self._listener.usage.fields()}
        self.is_ending = True
        try:
            await self._job.hooks.commit(self.body, self._listener.hidden)
            self.is_kept = True
        except Exception as error:
            known = isinstance(error, StoreError)
            logger.error("Response %s could not be stored: %s", self._job.id, error, exc_info=not known)
            if isinstance(error, TakenError):  # another request has stored this id first
                self.refused = id_taken(self._job.id)
            self.body |= {"status": "failed", "completed_at": None}
            self.body["error"] = {"code": "server_error", "message": f"The response could not be stored: {error}"}
            kind = "response.failed"
        RESPONSES.labels(self.body["status"]).inc()
        return [*events, self._out.event(kind, response=dict(self.body))]

    # Rounds

    async def _rounds(self) -> AsyncGenerator[list[Event], None]:
        async with aclosing(self._prepare()) as batches:
            async for batch in batches:
                yield batch
        prompt = self._job.prompt
        self._listener.usage.input += len(prompt)
        sampling = self._job.sampling
        for number in range(self._job.limits.rounds + 1):
            room = self._room(len(prompt))
            if room <= 0 or self._job.compaction is Compaction.ONLY:
                self._incomplete() if room <= 0 else None
                return
            turn = self._turn = self._listener.begin(sampling.structural_tag)
            sampling = replace(sampling, max_tokens=room)
            chunks = self._job.engine.generate(prompt, sampling, f"{self._job.id}_{number}", self._direct(turn))
            async with aclosing(chunks):
                async for chunk in chunks:
                    if batch := self._listener.hear(turn, chunk):
                        yield batch
                    if turn.finish is not None and chunk.finish is None:
                        break  # the turn is over, although the engine would continue
            yield self._listener.finish(turn)
            self._turn = None
            if not self._goes_on(turn):
                return
            answers: list[Message] = []
            async with aclosing(self._run_calls(turn, answers)) as batches:
                async for batch in batches:
                    yield batch
            if len(answers) < len(turn.calls) or self._ignored > IGNORED_CALLS:
                return  # some calls are the client's to answer
            characters = characters_of((*turn.messages, *answers))
            prompt = await rendered(functools.partial(self._next_prompt, prompt, turn, answers), characters)
            sampling = replace(sampling, structural_tag=self._job.tag_after_call)
        logger.warning("Response %s ended after %d rounds of tools", self._job.id, self._job.limits.rounds)
        self._incomplete()

    def _direct(self, turn: Turn) -> Direct | None:
        """Sends text of this turn directly; None where stop strings or logprobs need the tokens."""
        live = self.live
        if live is None or self._job.limits.stops or self._job.sampling.logprobs is not None:
            return None
        return Direct(live.outlet, lambda token_ids, _: self._listener.tell(turn, live, token_ids))

    async def _prepare(self) -> AsyncGenerator[list[Event], None]:
        """Work before the first generation: compaction, and calls that the client has just approved."""
        if self._job.compaction is not Compaction.NONE:
            async for batch in self._compact():
                yield batch
        added: list[Message] = []
        async for batch in self._answer_approvals(added):
            yield batch
        if self._job.compaction is not Compaction.NONE or added:
            conversation = self._job.conversation
            conversation = replace(conversation, messages=(*conversation.messages, *added))
            characters = characters_of(conversation.messages)
            self._job.prompt = await rendered(lambda: render(conversation), characters)

    async def _compact(self) -> AsyncGenerator[list[Event], None]:
        item: Item = {"id": ids.new("cmp"), "type": "compaction", "encrypted_content": ""}
        index, added = self._out.add(item)
        where = {"item_id": item["id"], "output_index": index}
        yield [added, self._out.event("response.compaction.compacting", **where)]
        compacted = await self._job.hooks.compact()
        self._job.conversation = compacted.conversation
        self._listener.usage = compacted.usage
        self._compaction_tokens = compacted.usage.output  # paid for, but not part of the answer
        yield [self._out.done(index, encrypted_content=compacted.item["encrypted_content"])]

    def _goes_on(self, turn: Turn) -> bool:
        """Whether there are calls of this server's tools to run."""
        if turn.finish == "abort":
            raise EngineError(ABORTED if turn.tokens else NOT_BEGUN)
        if turn.finish == "length":
            self._incomplete()
            return False
        return turn.stopped_by is None and any(call.route.is_ours for call in turn.calls)

    def _incomplete(self) -> None:
        # The API has no reason for a full context window or too many rounds: this is the nearest.
        self.body["incomplete_details"] = {"reason": "max_output_tokens"}

    def _room(self, used: int) -> int:
        """Tokens that the next generation may have."""
        room = self._job.engine.max_model_len - used
        limit = self._job.limits.output_tokens
        own = self._listener.usage.output - self._compaction_tokens
        return room if limit is None else min(room, limit - own)

    def _next_prompt(self, prompt: list[int], turn: Turn, answers: Sequence[Message]) -> list[int]:
        own = turn.tokens
        if turn.repaired or not own or own[-1] not in (CALL, END):
            own = [token for message in turn.messages for token in render_message(message)][1 + len(_ASSISTANT) :]
        added = [token for message in answers for token in render_message(message)] + [START, *_ASSISTANT]
        self._listener.usage.input += len(added)
        return [*prompt, *own, *added]

    # Tools

    async def _run_calls(self, turn: Turn, answers: list[Message]) -> AsyncGenerator[list[Event], None]:
        for call in turn.calls:
            route = call.route
            if route.waits:
                continue
            if call.ignored:
                self._ignored += 1
                logger.info("Response %s: a call beyond max_tool_calls was ignored", self._job.id)
                answers.append(_answer(route, "No tool calls are left. Answer with what you have."))
                continue
            writer: ToolWriter = call.writer  # type: ignore[assignment]
            yield writer.running()
            result = await self._run(route, call.text, writer.item_id)
            yield writer.result(result)
            answers.append(_answer(route, _for_model(result)))

    async def _run(self, route: Route, arguments: str, item_id: str) -> ToolResult:
        tool = None if route.kind is Kind.PYTHON else route.name
        namespace = route.recipient if tool is None else route.recipient.removesuffix(f".{tool}")
        call = ToolCall(item_id, namespace, tool, arguments)
        assert route.session is not None
        result = await call_within(route.session, call, self._job.limits.tool_timeout)
        self._listener.files += [content for content in result.content if isinstance(content, File)]
        await self._job.hooks.tool_ended(route.recipient, result)
        entry = self._listener.hidden.setdefault(item_id, {})
        entry |= {"recipient": route.recipient, "arguments": arguments, "output": _for_model(result)}
        if result.recall:
            entry["recall"] = dict(result.recall)
        return result

    async def _answer_approvals(self, added: list[Message]) -> AsyncGenerator[list[Event], None]:
        for request, answer in self._job.approvals:
            recipient = f"{request['server_label']}.{request['name']}"
            added.append(harmony.call(recipient, request["arguments"]))
            route = self._job.toolset.routes.get(recipient)
            if not answer["approve"] or route is None:
                reason = answer.get("reason") or "no reason given"
                why = f"The user denied this call: {reason}" if route else "The tool is not offered any more."
                added.append(harmony.tool_result(recipient, why))
                continue
            writer = McpCallWriter(self._out, request["server_label"], request["name"], request["id"])
            steps = [*writer.delta(request["arguments"]), *writer.end(request["arguments"], cut=False)]
            yield [*steps, *writer.running()]
            result = await self._run(route, request["arguments"], writer.item_id)
            yield writer.result(result)
            added.append(_answer(route, _for_model(result)))


_ASSISTANT = encode("assistant")


def _answer(route: Route, text: str) -> Message:
    channel = Channel.ANALYSIS if route.kind in (Kind.PYTHON, Kind.BROWSER) else Channel.COMMENTARY
    return harmony.tool_result(route.recipient, text, channel=channel)


def _for_model(result: ToolResult) -> str:
    return result.text or (f"Error: {result.error.message}" if result.error else "")
