"""One sample: its turns, the calls of each turn answered with the question's results, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_gptoss.cli.eval.answer import Answer, Call, Fate, LostError, Said, Usage
from vllm_gptoss.cli.eval.apis import Api, Sampling
from vllm_gptoss.cli.eval.client import Client
from vllm_gptoss.cli.eval.judge import Verdict, judge, same_call
from vllm_gptoss.cli.eval.questions import Expected, Question, Turn

MAX_REQUESTS = 16
"""Of one turn: a model that goes on calling has not answered."""


@dataclass(slots=True)
class Sample:
    """What one question came to. `seconds` are those of its requests, without pauses before another try."""

    verdict: Verdict
    said: list[Said] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    requests: int = 0
    tries: int = 0
    seconds: float = 0.0
    first_s: float | None = None


class Dialogue:
    """Runs one question, already in the form of its repeat."""

    def __init__(self, client: Client, api: Api, sampling: Sampling, effort: str | None, question: Question) -> None:
        self._client = client
        self._api = api
        self._sampling = replace(sampling, extra={**sampling.extra, **question.request})
        self._effort = effort
        self._question = question
        self._history: list[Mapping[str, Any]] = []
        self._sample = Sample(Verdict(Fate.RIGHT))

    async def run(self) -> Sample:
        """Never raises for what the server does: that is the sample's fate."""
        sample, question = self._sample, self._question
        if question.instructions:
            self._history.append({"role": "developer", "content": question.instructions})
        try:
            for turn in question.turns:
                said = await self._turn(turn)
                sample.said.append(said)
                if said.cut or judge(question, sample.said).fate is not Fate.RIGHT:
                    break
        except LostError as lost:
            sample.tries += lost.tries
            sample.verdict = Verdict(lost.fate, lost.detail)
            return sample
        sample.verdict = judge(question, sample.said)
        return sample

    async def _turn(self, turn: Turn) -> Said:
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
                return said
            self._history += [self._api.result(call, _result(open_calls, call)) for call in answer.calls]
        return said

    async def _ask(self, turn: Turn) -> Answer:
        question, sample = self._question, self._sample
        body = self._api.body(self._history, question.tools, turn.schema, self._effort, self._sampling)
        answer = await self._client.ask(body)
        self._history += answer.items
        if sample.first_s is None:
            sample.first_s = answer.first_s
        sample.usage += answer.usage
        sample.requests += 1
        sample.tries += answer.tries
        sample.seconds += answer.seconds
        return answer


def _result(expected: list[Expected], call: Call) -> str:
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
