"""LiteLLM on the Responses API and on chat completions: questions on stdin, what the user gets on stdout."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import litellm
import openai
from pydantic import BaseModel

litellm.suppress_debug_info = True  # it would print advice
given = json.load(sys.stdin)
ask = given["ask"]
SERVER = {"model": f"openai/{given['model']}", "api_base": given["url"], "api_key": "alice", "max_retries": 0}
PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the current weather for a location", "parameters": PARAMETERS}


class City(BaseModel):
    city: str
    country: str
    population: int


def respond(items: Any, stream: bool = False, **fields: Any) -> Any:
    include = ["code_interpreter_call.outputs", *fields.pop("include", [])]
    reasoning = {"summary": "auto"}
    made = litellm.responses(input=items, stream=stream, include=include, reasoning=reasoning, **SERVER, **fields)
    if not stream:
        return made
    events = list(made)
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert said == text(final), "the deltas are the answer"
    return final


def items_of(response: Any) -> list[dict[str, Any]]:
    return [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in response.output]


def text(response: Any) -> str:
    messages = [item for item in items_of(response) if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


def thought(response: Any) -> str:
    kept = [item for item in items_of(response) if item["type"] == "reasoning"]
    return "".join(part["text"] for item in kept for part in item["summary"])


def own(identifier: str) -> str:
    """LiteLLM gives its users ids that hold the server's."""
    held = base64.b64decode(identifier.removeprefix("resp_")).decode()
    return held.rpartition("response_id:")[2]


def read() -> dict[str, Any]:
    made = respond(ask["read"][0], stream=True)
    usage = made.usage
    used = [usage.input_tokens, usage.output_tokens, usage.output_tokens_details.reasoning_tokens]
    return {"id": made.id, "texts": [text(made)], "thoughts": [thought(made)], "usage": used}


def runs(response: Any) -> list[list[str]]:
    ran = [item for item in items_of(response) if item["type"] == "code_interpreter_call"]
    return [[call["code"], "".join(out["logs"] for out in call["outputs"])] for call in ran]


def function(question: str, *tools: Any, stream: bool = False, **fields: Any) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": question}]
    calls, thoughts, ran, sealed = [], [], [], 0
    while True:
        made = respond(items, stream, tools=[{"type": "function", **WEATHER}, *tools], **fields)
        items += items_of(made)
        thoughts.append(thought(made))
        ran += runs(made)
        sealed += sum("encrypted_content" in item for item in items_of(made))
        wanted = [item for item in items_of(made) if item["type"] == "function_call"]
        if not wanted:
            return {"texts": [text(made)], "calls": calls, "thoughts": thoughts, "sealed": sealed, "runs": [ran]}
        for call in wanted:
            arguments = json.loads(call["arguments"])
            calls.append([call["name"], arguments])
            output = given["weather"][arguments["city"]]
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})


def shaped() -> dict[str, Any]:
    return City.model_validate_json(text(respond(ask["shaped"][0], text_format=City))).model_dump()


def python(stream: bool) -> dict[str, Any]:
    """The second question comes after everything that the first turn showed."""
    items: list[dict[str, Any]] = []
    texts, ran = [], []
    for question in ask["python"]:
        items.append({"role": "user", "content": question})
        made = respond(items, stream, tools=[PYTHON])
        items += items_of(made)
        texts.append(text(made))
        ran.append(runs(made))
    return {"texts": texts, "runs": ran}


def chained() -> dict[str, Any]:
    first = respond(ask["chained"][0])
    second = respond(ask["chained"][1], previous_response_id=first.id)
    return {"texts": [text(first), text(second)], "id": own(second.id)}


def conversation() -> dict[str, Any]:
    client = openai.OpenAI(base_url=given["url"], api_key="alice", max_retries=0)
    made = client.conversations.create()
    said = [text(respond(question, extra_body={"conversation": made.id})) for question in ask["conversation"]]
    kept = [item.type for item in client.conversations.items.list(made.id, order="asc")]
    return {"texts": said, "kept": kept}


def chat(question: str, stream: bool) -> dict[str, Any]:
    """`litellm.completion`: chat completions of the same server."""
    messages: list[Any] = [{"role": "user", "content": question}]
    calls, thoughts = [], []
    while True:
        made = litellm.completion(
            messages=messages, tools=[{"type": "function", "function": WEATHER}], stream=stream, **SERVER
        )
        made = litellm.stream_chunk_builder(list(made)) if stream else made
        said = made.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        thoughts.append(said.reasoning_content)
        if not said.tool_calls:
            return {"texts": [said.content], "calls": calls, "thoughts": thoughts}
        for call in said.tool_calls:
            arguments = json.loads(call.function.arguments)
            calls.append([call.function.name, arguments])
            output = given["weather"][arguments["city"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


def overflow() -> dict[str, str]:
    """The error that LiteLLM raises if the prompt exceeds the context window, by API. It starts LiteLLM's fallbacks."""
    text = " hello" * 20_000
    said: list[Any] = [{"role": "user", "content": text}]
    anthropic = {**SERVER, "model": f"anthropic/{given['model']}", "api_base": given["url"].removesuffix("/v1")}
    calls = {
        "chat": lambda: litellm.completion(messages=said, **SERVER),
        "streamed": lambda: list(litellm.completion(messages=said, stream=True, **SERVER)),
        "completions": lambda: litellm.text_completion(
            prompt=text, **{**SERVER, "model": f"text-completion-{SERVER['model']}"}
        ),
        "responses": lambda: litellm.responses(input=text, **SERVER),
        "messages": lambda: litellm.completion(messages=said, max_tokens=9, **anthropic),
    }
    return {name: raised(call) for name, call in calls.items()}


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


stateless = {"store": False, "include": ["reasoning.encrypted_content"]}
scenes = {
    "read": read(),
    "function": function(ask["function"][0]),
    "function_streamed": function(ask["function_streamed"][0], stream=True),
    "sealed": function(ask["sealed"][0], **stateless),
    "mixed": function(ask["mixed"][0], PYTHON, **stateless),
    "shaped": shaped(),
    "python": python(stream=False),
    "python_streamed": python(stream=True),
    "chained": chained(),
    "conversation": conversation(),
}
if given["chat"]:
    scenes |= {
        "chat": chat(ask["function"][0], stream=False),
        "chat_streamed": chat(ask["function"][0], stream=True),
        "overflow": overflow(),
    }
print(json.dumps(scenes))
