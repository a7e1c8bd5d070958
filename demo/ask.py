"""Sends two questions to a running server through the `openai` client: `python -m demo.ask [BASE_URL]`.

For the first, the model calls a function tool that runs in this process. For the second, it calls the server's python
tool, if available.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import APIStatusError, OpenAI
from rich.console import Console
from rich.markup import escape

from demo.conversation import function

WEATHER_QUESTION = "Should I take an umbrella in Hamburg today? Think first, then check the weather."
PYTHON_QUESTION = "How many prime numbers are below 1000? Use Python."
PYTHON_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}


def get_weather(city: str) -> str:
    """The tool behind the first question, as an application would have it."""
    return json.dumps({"city": city, "conditions": "rain", "temperature": 12})


def _text(parts: Any) -> str:
    return "".join(part.text for part in parts or ())


def show(console: Console, item: Any) -> None:
    """Prints one output item."""
    if item.type == "reasoning":
        console.print(f"  [dim]reasoning[/]  {escape(_text(item.content) or _text(item.summary))}")
    elif item.type == "function_call":
        console.print(f"  [cyan]tool call[/]  {escape(f'{item.name}({item.arguments})')}")
    elif item.type == "code_interpreter_call":
        for line in (item.code or "").splitlines():
            console.print(f"  [cyan]python   [/]  {escape(line)}")
        for output in item.outputs or ():
            shown = output.logs if output.type == "logs" else output.url
            console.print(f"  [cyan]result   [/]  {escape(shown.strip())}")
    elif item.type == "message":
        console.print(f"  [bold green]answer[/]     {escape(_text(item.content))}")


def usage(console: Console, responses: list[Any]) -> None:
    """One line over all requests of a question."""
    spent = [r.usage for r in responses if r.usage]
    read, written = sum(u.input_tokens for u in spent), sum(u.output_tokens for u in spent)
    thought = sum(u.output_tokens_details.reasoning_tokens for u in spent)
    console.print(f"  [dim]usage      {read} tokens in, {written} out, {thought} of them reasoning[/]\n")


def ask_function(console: Console, client: OpenAI, model: str) -> None:
    """The tool loop of an application: the model calls, we run, the model answers."""
    console.print(f"[bold]{WEATHER_QUESTION}[/]")
    items: list[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
    responses: list[Any] = []
    for _ in range(4):
        tools: Any = [function("get_weather")]
        response = client.responses.create(model=model, input=items, tools=tools, temperature=0)
        responses.append(response)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        for item in response.output:
            show(console, item)
        for call in calls:
            result = get_weather(**json.loads(call.arguments))
            console.print(f"  [cyan]result   [/]  {escape(result)}")
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not calls:
            break
    usage(console, responses)


def ask_python(console: Console, client: OpenAI, model: str) -> None:
    """One request: the server runs the python tool itself."""
    console.print(f"[bold]{PYTHON_QUESTION}[/]")
    tools: Any = [PYTHON_TOOL]
    try:
        response = client.responses.create(
            model=model,
            input=PYTHON_QUESTION,
            tools=tools,
            temperature=0,
            include=["code_interpreter_call.outputs"],
        )
    except APIStatusError as error:
        console.print(f"  [yellow]The server has no python tool: {escape(error.message)}[/]\n")
        return
    for item in response.output:
        show(console, item)
    usage(console, [response])


def main(base_url: str, model: str, console: Console | None = None) -> None:
    """Sends both questions and prints the next commands."""
    console = console or Console()
    client = OpenAI(base_url=base_url, api_key="none", timeout=180)
    ask_function(console, client, model)
    ask_python(console, client, model)
    console.print("This model knows a few conversations by heart (demo/conversations) and nothing else.")
    console.print("Keep it running:       [bold]make serve[/]")
    console.print("The real one, on a GPU: [bold]pip install vllm-gptoss[/] next to vLLM, then")
    console.print("                        [bold]vllm serve openai/gpt-oss-20b --tool-server demo[/]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="gpt-oss")
    options = parser.parse_args()
    main(options.base_url, options.model)
