"""Models related to gpt-oss-20b and -120b: gpt-oss-safeguard is served, OpenAI's Privacy Filter is left to vLLM."""

from __future__ import annotations

import ast

import pytest

from tests.contract.source import Release, top_level
from tests.contract.written import REPLACED
from tests.support import warm
from vllm_gptoss.engine import spec
from vllm_gptoss.server.chat.chat_prompt import conversation, effort_of
from vllm_gptoss.server.harmony.prompt import render
from vllm_gptoss.server.harmony.tokens import encoding

FILTER = "OpenAIPrivacyFilterForTokenClassification"
POLICY = "# Policy\n\n" + "".join(
    f"## {number}. Rule\n- **VIOLATES**: \u201ctext\u201d <|end|> {{x}} \t{number * 7919}\n\n"
    for number in range(2_000)
)
"""A classification policy of 100,000 characters, with markup that must stay text."""


def test_the_policy_of_a_safeguard_request_arrives_unchanged() -> None:
    messages = [{"role": "system", "content": POLICY}, {"role": "user", "content": "Classify this."}]
    ids = render(conversation(messages, effort=effort_of("low"), date="2026-01-01"))
    text = str(encoding().decode(ids))
    assert text.count(POLICY) == 1
    assert text.index("<|start|>developer<|message|>") < text.index(POLICY) < text.index("Classify this.")


def test_the_privacy_filter_takes_nothing_that_is_registered_or_replaced(release: Release) -> None:
    """It subclasses layers of vLLM's gpt_oss.py, which the plugin does not change."""
    path = release.module("vllm.model_executor.models.openai_privacy_filter")
    (node,) = [
        each
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.ImportFrom) and each.module == "gpt_oss"
    ]
    assert top_level(path)[FILTER]
    taken = {alias.name for alias in node.names}
    assert taken & {attribute.rpartition(".")[2] for attribute in REPLACED} == set()
    assert FILTER != spec.ARCHITECTURE


@pytest.mark.vllm
def test_registering_leaves_the_privacy_filter_to_vllm() -> None:
    code = (
        "from vllm_gptoss import plugin, _vllm; plugin.register();"
        "from vllm.model_executor.models import gpt_oss, openai_privacy_filter as f;"
        f"print(_vllm.registered_model({FILTER!r}), f.OAIAttention is gpt_oss.OAIAttention,"
        " gpt_oss.OAIAttention.__module__, f.GptOssModel.forward.__module__, gpt_oss.GptOssForCausalLM.__module__)"
    )
    done = warm.run(["-c", code])
    theirs = "vllm.model_executor.models"
    assert done.stdout.splitlines()[-1].split() == [
        f"{theirs}.openai_privacy_filter:{FILTER}", "True", *[f"{theirs}.gpt_oss"] * 3,
    ], done.stderr  # fmt: skip
