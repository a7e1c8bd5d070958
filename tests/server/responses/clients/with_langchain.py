"""ChatOpenAI on the Responses API: questions on stdin, what the user gets on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

given = json.load(sys.stdin)
ask = given["ask"]
PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}


class City(BaseModel):
    city: str
    country: str
    population: int


@tool
def get_weather(city: str) -> str:
    """Get the current weather for a location"""
    return given["weather"][city]


def model(**options: Any) -> ChatOpenAI:
    options = {"reasoning": {"summary": "auto"}, "output_version": "responses/v1", **options}
    include = ["code_interpreter_call.outputs", *options.pop("include", [])]
    return ChatOpenAI(
        model=given["model"], base_url=given["url"], api_key="alice", max_retries=0, include=include, **options
    )


def streamed(chat: Any, messages: Any) -> AIMessageChunk:
    whole = None
    for chunk in chat.stream(messages):
        whole = chunk if whole is None else whole + chunk
    return whole


def blocks(message: AIMessage, kind: str) -> list[dict[str, Any]]:
    return [block for block in message.content if block["type"] == kind]


def thought(message: AIMessage) -> str:
    return "".join(part["text"] for block in blocks(message, "reasoning") for part in block["summary"])


def read() -> dict[str, Any]:
    said = streamed(model(), ask["read"][0])
    usage = said.usage_metadata
    return {
        "id": said.response_metadata["id"],
        "texts": [said.text],
        "thoughts": [thought(said)],
        "usage": [usage["input_tokens"], usage["output_tokens"], usage["output_token_details"]["reasoning"]],
    }


def runs(message: AIMessage) -> list[list[str]]:
    ran = blocks(message, "code_interpreter_call")
    return [[call["code"], "".join(out["logs"] for out in call["outputs"])] for call in ran]


def function(question: str, *tools: Any, stream: bool = False, **options: Any) -> dict[str, Any]:
    chat = model(**options).bind_tools([get_weather, *tools])
    messages: list[BaseMessage] = [HumanMessage(question)]
    calls, thoughts, ran, sealed = [], [], [], 0
    while True:
        said = streamed(chat, messages) if stream else chat.invoke(messages)
        messages.append(said)
        thoughts.append(thought(said))
        ran += runs(said)
        sealed += sum("encrypted_content" in block for block in blocks(said, "reasoning"))
        if not said.tool_calls:
            return {"texts": [said.text], "calls": calls, "thoughts": thoughts, "sealed": sealed, "runs": [ran]}
        for call in said.tool_calls:
            calls.append([call["name"], call["args"]])
            messages.append(get_weather.invoke(call))


def shaped() -> dict[str, Any]:
    return model().with_structured_output(City).invoke(ask["shaped"][0]).model_dump()


def python(stream: bool) -> dict[str, Any]:
    """The second question comes after everything that the first turn showed."""
    chat = model().bind_tools([PYTHON])
    messages: list[BaseMessage] = []
    turns = []
    for question in ask["python"]:
        messages.append(HumanMessage(question))
        messages.append(streamed(chat, messages) if stream else chat.invoke(messages))
        turns.append(runs(messages[-1]))
    return {"texts": [said.text for said in messages[1::2]], "runs": turns}


def chained() -> dict[str, Any]:
    messages: list[BaseMessage] = []
    for question in ask["chained"]:
        messages.append(HumanMessage(question))
        messages.append(model(use_previous_response_id=True).invoke(messages))
    return {"texts": [said.text for said in messages[1::2]], "id": messages[-1].response_metadata["id"]}


def conversation() -> dict[str, Any]:
    client = openai.OpenAI(base_url=given["url"], api_key="alice", max_retries=0)
    made = client.conversations.create()
    said = [model().invoke(question, conversation={"id": made.id}).text for question in ask["conversation"]]
    kept = [item.type for item in client.conversations.items.list(made.id, order="asc")]
    return {"texts": said, "kept": kept}


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
print(json.dumps(scenes))
