"""One sample: its turns, the calls of each turn answered with the question's results, the verdict, and its line."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_gptoss.cli.eval.apis import Fate, FunctionCall, LostSampleError, ModelAnswer, RequestSettings
from vllm_gptoss.cli.eval.client import EvalClient
from vllm_gptoss.cli.eval.judge import Judgement, Said, judge, same_call
from vllm_gptoss.cli.eval.questions import ExpectedCall, Question, QuestionTurn

MAX_REQUESTS = 16
"""Of one turn: a model that goes on calling has not answered."""

MAX_TEXT = 65_536
"""Characters of an answer, and of its reasoning, that a line keeps."""


@dataclass(slots=True)
class Sample:
    """What one question came to. seconds: of its requests, without waits for another try. tokens: as ModelAnswer."""

    question: Question
    verdict: Judgement = field(default_factory=lambda: Judgement(Fate.RIGHT))
    said: list[Said] = field(default_factory=list)
    tokens: tuple[int, ...] = (0, 0, 0)
    requests: int = 0
    tries: int = 0
    seconds: float = 0.0
    first_s: float | None = None

    def line(self, keep_reasoning: bool) -> dict[str, Any]:
        """What the record stores."""
        calls = [[call.name[:200], call.arguments[:4096]] for said in self.said for _, call in said.calls]
        row: dict[str, Any] = {
            "fate": self.verdict.fate.value, "why": self.verdict.why[:1000], "found": self.verdict.found[:1000],
            "expected": [turn.expected() for turn in self.question.turns],
            "answer": [_clipped(said.text) for said in self.said], "calls": calls[:100],
            "usage": dict(zip(("input", "output", "reasoning"), self.tokens, strict=True)),
            "requests": self.requests, "tries": self.tries, "parts": self.verdict.parts,
            "seconds": round(self.seconds, 4),
            "first_s": None if self.first_s is None else round(self.first_s, 4), "at": round(time.time(), 3),
        }  # fmt: skip
        return row | ({"thought": [_clipped(said.reasoning) for said in self.said]} if keep_reasoning else {})


async def run(client: EvalClient, settings: RequestSettings, effort: str | None, question: Question) -> Sample:
    """The sample of a question, already in the form of its repeat. A failure of the server is the sample's fate."""
    dialogue = _Dialogue(client, replace(settings, extra={**settings.extra, **question.request}), effort, question)
    sample = dialogue.sample
    try:
        for turn in question.turns:
            sample.said.append(await dialogue.turn(turn))
            sample.verdict = judge(question, sample.said)
            if sample.verdict.fate is not Fate.RIGHT:
                break
    except LostSampleError as lost:
        sample.tries += lost.tries
        sample.verdict = Judgement(lost.fate, lost.detail)
    return sample


class _Dialogue:
    def __init__(self, client: EvalClient, settings: RequestSettings, effort: str | None, question: Question) -> None:
        self._client, self._settings, self._effort = client, settings, effort
        self._history: list[Mapping[str, Any]] = []
        if question.instructions:
            self._history.append({"role": "developer", "content": question.instructions})
        self.sample = Sample(question)

    async def turn(self, turn: QuestionTurn) -> Said:
        said, open_calls = Said(), list(turn.calls)
        self._history.append({"role": "user", "content": turn.user})
        for number in range(MAX_REQUESTS):
            answer = await self._ask(turn)
            said.text = answer.text
            said.reasoning += answer.reasoning
            said.citations += answer.citations
            said.cut = answer.cut
            said.calls += [(number, call) for call in answer.calls]
            if answer.cut or not answer.calls or turn.ends_with_calls:
                break
            self._history += [self._client.api.result(call, _result(open_calls, call)) for call in answer.calls]
        return said

    async def _ask(self, turn: QuestionTurn) -> ModelAnswer:
        sample = self.sample
        tools, api = sample.question.tools, self._client.api
        answer = await self._client.ask(api.body(self._history, tools, turn.schema, self._effort, self._settings))
        self._history += answer.items
        if not sample.requests:
            sample.first_s = answer.first_s
        sample.tokens = tuple(map(sum, zip(sample.tokens, answer.tokens, strict=True)))
        sample.requests += 1
        sample.tries += answer.tries
        sample.seconds += answer.seconds
        return answer


def _result(expected: list[ExpectedCall], call: FunctionCall) -> str:
    """What the function answers: of the expected call that this is, else an error."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return "Error: the arguments are no JSON."
    for one in expected:
        if same_call(one, call.name, arguments):
            expected.remove(one)
            return one.result
    return "Error: there is no answer to this call."


def _clipped(text: str) -> str:
    """The end of a text holds its answer."""
    if len(text) <= MAX_TEXT:
        return text
    return f"[{len(text) - MAX_TEXT} characters left out]{text[-MAX_TEXT:]}"
