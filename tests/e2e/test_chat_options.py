"""Options of chat requests on a real server: honoured, or refused by name; and the prompt that other routes return."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from demo.server import NAME, Server
from vllm_gptoss.server.harmony.tokens import encoding

pytestmark = [pytest.mark.vllm, pytest.mark.serve]

X = [{"role": "user", "content": "x"}]
ONCE = [*X, {"role": "assistant", "content": "Once upon"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def post(server: Server, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": NAME, **fields}, timeout=120)


def prompt(server: Server, **fields: Any) -> str:
    """The prompt of a chat request, as its answer's token ids have it; /tokenize and a batch have the same."""
    answer = post(server, "/v1/chat/completions", max_completion_tokens=1, return_token_ids=True, **fields)
    assert answer.status_code == 200, answer.text
    ids = answer.json()["prompt_token_ids"]
    told = post(server, "/tokenize", return_token_strs=True, **fields).json()
    assert "tokens" in told, told
    assert (told["tokens"], told["count"], len(told["token_strs"])) == (ids, len(ids), len(ids))
    return str(encoding().decode(ids))


def test_the_template_options_that_mean_something_are_honoured(served: Server) -> None:
    plain = prompt(served, messages=X, tools=[TOOL])
    assert "Reasoning: medium" in plain
    assert "type f = () => any;" in plain
    assert "Reasoning: high" in prompt(served, messages=X, chat_template_kwargs={"reasoning_effort": "high"})
    assert "Reasoning: low" in prompt(served, messages=X, chat_template_kwargs={"enable_thinking": False})
    named = prompt(served, messages=X, chat_template_kwargs={"model_identity": "You are Bob."})
    assert named.startswith("<|start|>system<|message|>You are Bob.\n")


@pytest.mark.parametrize(
    "thought",
    [
        {"thinking": "Hm."},
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "Hm."},
                {"type": "reasoning.encrypted", "data": "x"},
            ]
        },
    ],
)
def test_thoughts_are_shown_whatever_the_client_calls_them(served: Server, thought: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    said = {"role": "assistant", "tool_calls": [call], **thought}
    answer = {"role": "tool", "tool_call_id": "c", "content": "1"}
    shown = [*X, said, answer]
    body = {"messages": shown, "max_completion_tokens": 1, "return_token_ids": True}
    ids = post(served, "/v1/chat/completions", **body).json()["prompt_token_ids"]
    text = encoding().decode(ids)
    assert "<|channel|>analysis<|message|>Hm.<|end|>" in text
    assert "<|channel|>commentary json<|message|>{}<|call|>" in text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_gone_on_with(forced: Server, stream: bool) -> None:
    goes_on = {"messages": ONCE, "continue_final_message": True, "add_generation_prompt": False}
    assert prompt(forced, **goes_on).endswith("<|start|>assistant<|channel|>final<|message|>Once upon")
    ids = " ".join(map(str, encoding().encode(" a time.<|return|>", allowed_special="all")))
    answer = post(forced, "/v1/chat/completions", stream=stream, vllm_xargs={"forced": ids}, **goes_on)
    assert '"content":" a' in answer.text
    assert '"reasoning":"' not in answer.text
    with_tools = post(forced, "/v1/chat/completions", vllm_xargs={"forced": ids}, tools=[TOOL], **goes_on)
    message = with_tools.json()["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", " a time.")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": ONCE, "tool_choice": "required", "tools": [TOOL]},
         "continue_final_message"),
        ({"continue_final_message": True, "messages": ONCE, "response_format": {"type": "json_object"}},
         "continue_final_message"),
        ({"chat_template_kwargs": {"depth": 3}}, "chat_template_kwargs.depth"),
        ({"chat_template_kwargs": {"reasoning_effort": "heroic"}}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"echo": True}, "echo"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": []}, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(served: Server, fields: dict[str, Any], name: str) -> None:
    body = {"messages": X, "max_completion_tokens": 1, **fields}
    refused = post(served, "/v1/chat/completions", **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    if "tools" not in fields:
        batch = post(served, "/v1/chat/completions/batch", **{**body, "messages": [body["messages"]]})
        assert batch.status_code == 400, batch.text


def test_a_model_is_shown_by_its_name(served: Server) -> None:
    listed = httpx.get(f"{served.api}/models").json()["data"][0]
    found = httpx.get(f"{served.api}/models/{NAME}").json()
    assert {key: found[key] for key in ("id", "object", "max_model_len")} == {
        key: listed[key] for key in ("id", "object", "max_model_len")
    }
    missing = httpx.get(f"{served.api}/models/openai/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
