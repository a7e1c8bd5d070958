"""The small model's conversations on the replay engine: its clients send both engines the same requests."""

from __future__ import annotations

from collections.abc import Sequence

from demo.conversation import Step, conversations
from demo.render import target
from tests.support.responses.fakes import PYTHON, FakeProvider
from tests.support.responses.server import harmony, text_of_prompt
from vllm_gptoss.tools.protocol import Text, ToolCall, ToolResult

MIXED = "Find a number in Python, then look the weather up."
"""Not known to the small model: a python call, then a client's function, in one turn."""

OWN = {
    MIXED: (
        Step("6 * 7", analysis="First the number.", call="python"),
        Step('{"city":"Rome"}', analysis="It is 42. Now Rome.", call="functions.get_weather", json=True),
        Step("42, and 28 degrees.", analysis="Both are known."),
    )
}

USER = "<|start|>user<|message|>"
RESULT = "to=assistant<|channel|>"


def by_heart(prompt: Sequence[int]) -> list[int]:
    """The small model's memorised answers."""
    question, _, since = text_of_prompt(prompt).rpartition(USER)[2].partition("<|end|>")
    return harmony(target(_steps(question)[since.count(RESULT)]))


def _steps(question: str) -> Sequence[Step]:
    """Of a conversation that needs no instructions, and has its tools."""
    if question in OWN:
        return OWN[question]
    known = [one for one in conversations() if one.instructions is None and one.tools is not None]
    return next(turn.steps for one in known for turn in one.turns if turn.user == question)


def python() -> FakeProvider:
    """A python tool that knows what the real one prints of conversation `py-state`, in one container."""
    printed = {"x = 20": "", "x = x * 2\nprint(x)": "40\n", "x + 1": "41", "6 * 7": "42"}

    async def run(call: ToolCall) -> ToolResult:
        shown = Text(printed[call.arguments] or "(no output)")
        return ToolResult([shown], container_id="cntr_1", recall={"container": "cntr_1"})

    provider = FakeProvider(PYTHON, run)
    provider.container_id = "cntr_1"
    return provider
