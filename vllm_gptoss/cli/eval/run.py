"""Many samples at once: each the turns of a question, with results for its calls, a verdict, and a line for the record.

Memory holds the questions, one dialogue a worker, and nothing of the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm_gptoss.cli.eval.client import EvalClient, LostSampleError
from vllm_gptoss.cli.eval.judge import LOST, RIGHT, Answer, FunctionCall, expected_call, judge
from vllm_gptoss.cli.eval.questions import EvalError, ExpectedCall, Question, QuestionTurn
from vllm_gptoss.cli.eval.record import Key

MAX_REQUESTS = 16
"""Of one turn: a model that continues to call has not answered."""

MAX_KEPT = 65_536
"""Characters of an answer, and of its reasoning, that a line keeps."""


async def run(
    client: EvalClient, samples: Iterable[tuple[Key, Question]], at_once: int, told: Callable[[dict[str, Any]], None]
) -> None:
    """Runs all samples, `at_once` at a time; `told` gets the line of each.

    Raises:
        EvalError: two rounds of the workers, and 20 samples more, were lost in a row.
    """
    left, in_a_row = iter(samples), 0

    async def work() -> None:
        nonlocal in_a_row
        for key, question in left:
            line = await _sample(client, key, question)
            told(line)
            in_a_row = in_a_row + 1 if line["outcome"] in LOST else 0
            if in_a_row >= 2 * at_once + 20:
                raise EvalError(f"{in_a_row} samples in a row were lost, the last: {line['why']}")

    workers = [asyncio.create_task(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _sample(client: EvalClient, key: Key, question: Question) -> dict[str, Any]:
    """The line of one sample. tokens, seconds: of all its requests and tries."""
    history: list[Any] = []
    if question.instructions:
        history.append({"role": "developer", "content": question.instructions})
    answers: list[Answer] = []
    verdict, began = RIGHT, time.monotonic()
    try:
        for turn in question.turns:
            answers.append(Answer())
            await _turn(client, key[1], question, turn, history, answers[-1])
            verdict = judge(question, turn, answers[-1])
            if verdict is not RIGHT:
                break
    except LostSampleError as lost:
        verdict = lost.outcome, str(lost)
    return {
        "eval": key[0], "effort": key[1], "id": key[2], "repeat": key[3], "outcome": verdict[0], "why": verdict[1],
        "answer": [answer.text[-MAX_KEPT:] for answer in answers],
        "reasoning": [answer.reasoning[-MAX_KEPT:] for answer in answers],
        "calls": [[call.name, call.arguments[:4096]] for answer in answers for call in answer.calls],
        "tokens": sum(answer.tokens for answer in answers), "seconds": round(time.monotonic() - began, 3),
        "at": round(time.time(), 3),
    }  # fmt: skip


async def _turn(
    client: EvalClient, effort: str, question: Question, turn: QuestionTurn, history: list[Any], whole: Answer
) -> None:
    """Sends requests until the model makes no call, and adds their answers to `whole`."""
    expected = list(turn.calls)
    history.append({"role": "user", "content": turn.user})
    for _ in range(MAX_REQUESTS):
        answer = await client.ask(history, question.tools, turn.schema, effort, question.request)
        history += answer.items
        whole.text, whole.cut = answer.text, answer.cut
        whole.reasoning += answer.reasoning
        whole.calls += answer.calls
        whole.citations += answer.citations
        whole.tokens += answer.tokens
        waiting = [call for call in answer.calls if call.id]
        if answer.cut or not waiting or turn.ends_with_calls:
            break
        history += [client.api.result(call, _result(expected, call)) for call in waiting]


def _result(expected: list[ExpectedCall], call: FunctionCall) -> str:
    """The result of the expected call that this is, else an error."""
    with contextlib.suppress(ValueError, RecursionError):
        if match := expected_call(expected, call.name, call.values()):
            expected.remove(match)
            return match.result
    return "Error: there is no answer to this call."
