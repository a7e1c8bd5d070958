"""The prompts that the model is trained on must contain those that servers write."""

from __future__ import annotations

import random

import pytest

from demo import prompts
from demo.conversation import Step, by_id
from demo.dataset import sample
from demo.render import Prompt, encode, encoding, past_step, target

CALLS = [("two-tools", 0, 2), ("preamble", 0, 1), ("py-exception", 0, 1), ("br-dam", 0, 2), ("mcp-missing-file", 0, 1)]


def messages(text: str) -> list[str]:
    return ["<|start|>" + part for part in text.split("<|start|>") if part]


def trained_forms(step: Step) -> set[str]:
    """Every way in which training writes the messages of a past step, the tool's answer left out."""
    forms: set[str] = set()
    for seed in range(300):
        prompt = Prompt()
        past_step(prompt, step, random.Random(seed), analysis=True)
        for message in messages(prompt.text):
            forms.add(message.split("<|message|>")[0] if step.call and f"<|start|>{step.call}" in message else message)
    return forms


@pytest.mark.vllm
@pytest.mark.parametrize("renderer", [prompts.ours, prompts.upstream])
@pytest.mark.parametrize(("name", "turn", "step"), CALLS)
def test_training_knows_every_message_form_of_a_renderer(renderer, name: str, turn: int, step: int) -> None:  # type: ignore[no-untyped-def]
    conversation = by_id(name)
    written = messages(encoding().decode(renderer(conversation, turn, step)))
    start = next(i for i, m in enumerate(written) if m.startswith("<|start|>user"))
    known: set[str] = set()
    for past in conversation.turns[turn].steps[:step]:
        known |= trained_forms(past)
    for message in written[start + 1 : -1]:
        assert known & {message, message.split("<|message|>")[0]}, message


def test_a_prompt_is_encoded_like_the_library_would() -> None:
    """Training encodes the whole text at once; the library encodes header and content apart."""
    for name, turn, step in CALLS:
        ids = prompts.ours(by_id(name), turn, step)
        assert encode(encoding().decode(ids)) == ids


def test_noise_never_covers_what_the_user_said() -> None:
    conversation = by_id("weather-paris")
    for seed in range(50):
        prompt, _ = sample(conversation, 1, 1, random.Random(seed))
        ids, marks = prompt.tokens()
        fixed = encoding().decode([t for t, noise in zip(ids, marks, strict=True) if not noise])
        assert "<|start|>user<|message|>And in London?<|end|>" in fixed
        assert "functions.get_weather" in fixed


def test_a_target_is_what_the_library_reads_back() -> None:
    from openai_harmony import Role

    step = by_id("preamble").turns[0].steps[0]
    parsed = encoding().parse_messages_from_completion_tokens(encode(target(step)), Role.ASSISTANT)
    assert [(m.channel, m.recipient, m.content[0].text) for m in parsed] == [
        ("analysis", None, step.analysis),
        ("commentary", None, step.preamble),
        ("commentary", step.call, step.text),
    ]
