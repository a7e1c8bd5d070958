"""Pydantic AI on the Responses API: questions on stdin, what the user gets on stdout."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.messages import ModelResponse, NativeToolCallPart, NativeToolReturnPart, ThinkingPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.native_tools import CodeExecutionTool
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider

given = json.load(sys.stdin)
ask = given["ask"]
client = openai.AsyncOpenAI(base_url=given["url"], api_key="alice", max_retries=0)
PROFILE = OpenAIModelProfile(openai_supports_reasoning=True, openai_supports_encrypted_reasoning_content=True)
"""Without it Pydantic AI takes a model of another name for one that does not reason, and sends no ids back."""


class City(BaseModel):
    city: str
    country: str
    population: int


def agent(output: Any = str, *, runs_code: bool = False, **settings: Any) -> Agent[None, Any]:
    model = OpenAIResponsesModel(given["model"], provider=OpenAIProvider(openai_client=client), profile=PROFILE)
    chosen = OpenAIResponsesModelSettings(
        openai_reasoning_summary="auto", openai_include_code_execution_outputs=True, **settings
    )
    tools = [NativeTool(CodeExecutionTool())] if runs_code else []
    return Agent(model, output_type=output, model_settings=chosen, capabilities=tools)


def get_weather(city: str) -> str:
    """Get the current weather for a location"""
    return given["weather"][city]


def parts(messages: Any, kind: type) -> list[Any]:
    return [part for one in messages if isinstance(one, ModelResponse) for part in one.parts if isinstance(part, kind)]


def thoughts(messages: Any) -> list[str]:
    return [part.content for part in parts(messages, ThinkingPart)]


async def streamed(asked: Agent[None, Any], question: str, **options: Any) -> Any:
    async with asked.run_stream(question, **options) as result:
        said = "".join([delta async for delta in result.stream_text(delta=True, debounce_by=None)])
        assert said == await result.get_output(), "the deltas are the answer"
    return result


async def run(asked: Agent[None, Any], question: str, **options: Any) -> Any:
    return await asked.run(question, **options)


async def output(result: Any) -> str:
    return await result.get_output() if hasattr(result, "get_output") else result.output


async def read() -> dict[str, Any]:
    result = await streamed(agent(), ask["read"][0])
    messages, usage = result.all_messages(), result.usage
    return {
        "id": messages[-1].provider_response_id,
        "texts": [await result.get_output()],
        "thoughts": thoughts(messages),
        "usage": [usage.input_tokens, usage.output_tokens, usage.details["reasoning_tokens"]],
    }


def runs(messages: Any) -> list[list[str]]:
    pairs = zip(parts(messages, NativeToolCallPart), parts(messages, NativeToolReturnPart), strict=True)
    return [[call.args_as_dict()["code"], "".join(back.content["logs"])] for call, back in pairs]


async def function(question: str, *, stream: bool = False, **settings: Any) -> dict[str, Any]:
    asked = agent(**settings)
    asked.tool_plain(get_weather)
    result = await (streamed if stream else run)(asked, question)
    messages = result.all_messages()
    return {
        "texts": [await output(result)],
        "calls": [[call.tool_name, call.args_as_dict()] for call in parts(messages, ToolCallPart)],
        "thoughts": thoughts(messages),
        "sealed": sum(part.signature is not None for part in parts(messages, ThinkingPart)),
        "runs": [runs(messages)],
    }


async def shaped() -> dict[str, Any]:
    return (await agent(NativeOutput(City)).run(ask["shaped"][0])).output.model_dump()


async def python(*, stream: bool) -> dict[str, Any]:
    """The second question comes after everything that the first turn showed."""
    history: list[Any] = []
    texts, ran = [], []
    for question in ask["python"]:
        asked = agent(runs_code=True)
        result = await (streamed if stream else run)(asked, question, message_history=history)
        history = result.all_messages()
        texts.append(await output(result))
        ran.append(runs(result.new_messages()))
    return {"texts": texts, "runs": ran}


async def chained() -> dict[str, Any]:
    history: list[Any] = []
    texts = []
    for question in ask["chained"]:
        result = await agent(openai_previous_response_id="auto").run(question, message_history=history)
        history = result.all_messages()
        texts.append(result.output)
    return {"texts": texts, "id": history[-1].provider_response_id}


async def conversation() -> dict[str, Any]:
    made = await client.conversations.create()
    texts = [(await agent(openai_conversation_id=made.id).run(question)).output for question in ask["conversation"]]
    kept = [item.type async for item in client.conversations.items.list(made.id, order="asc")]
    return {"texts": texts, "kept": kept}


async def main() -> dict[str, Any]:
    return {
        "read": await read(),
        "function": await function(ask["function"][0]),
        "function_streamed": await function(ask["function_streamed"][0], stream=True),
        "sealed": await function(ask["sealed"][0], openai_store=False),
        "mixed": await function(ask["mixed"][0], runs_code=True),  # what it echoes of a python call has no outputs
        "shaped": await shaped(),
        "python": await python(stream=False),
        "python_streamed": await python(stream=True),
        "chained": await chained(),
        "conversation": await conversation(),
    }


print(json.dumps(asyncio.run(main())))
