"""The built-in tools inside `/v1/responses`: the model calls, the real tool answers, the model continues."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from demo.server import NAME, Server
from tests.e2e.asking import PYTHON, SEARCH, Asker, calls, logs, mcp, said
from tests.e2e.process import Held, settled
from tests.support.places import PYTHON as OPTIONS

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.timeout(600)]

DOCUMENTS = Path(__file__).resolve().parents[2] / "demo" / "documents"


def page(name: str) -> list[str]:
    """A document's lines as the browser numbers them, from L0."""
    return (DOCUMENTS / name).read_text().split("---\n", 2)[2].splitlines()


def annotations(response: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = response["output"][-1]["content"][0]["annotations"]
    return found


def test_search_open_find_ends_in_a_citation_of_the_right_lines(ask: Asker) -> None:
    response = ask("How high is the Velmora dam?", SEARCH)
    search, opened, found = (call["action"] for call in calls(response))
    url = "https://docs.example.org/velmora-dam"
    assert search["type"] == "search"
    assert search["sources"][0] == {"type": "url", "url": url}
    assert opened == {"type": "open_page", "url": url}
    assert found == {"type": "find_in_page", "url": url, "pattern": "metres high"}
    assert all(call["status"] == "completed" for call in calls(response))
    text = said(response)
    assert text.startswith("The Velmora dam is 87 metres high")
    (note,) = annotations(response)
    assert (note["type"], note["url"], note["title"]) == ("url_citation", url, "The Velmora dam")
    assert text[note["start_index"] : note["end_index"]] == f"([docs.example.org]({url}))"
    assert "【" not in text
    first, last = note["lines"]
    assert page("velmora-dam.md")[first : last + 1] == ["It is 87 metres high and 412 metres long."]
    if ask.streamed:
        steps = [e["type"].removeprefix("response.web_search_call.") for e in ask.events if "web_search" in e["type"]]
        assert steps == ["in_progress", "searching", "completed"] * 3
        added = [e["annotation"] for e in ask.events if e["type"] == "response.output_text.annotation.added"]
        assert added == [note]


def test_two_citations_in_one_sentence_name_their_own_lines(ask: Asker) -> None:
    response = ask("Who built the Skarholm lighthouse and when?", SEARCH)
    text, notes = said(response), annotations(response)
    assert [note["lines"] for note in notes] == [[2, 2], [4, 4]]
    link = "([docs.example.org](https://docs.example.org/skarholm-lighthouse))"
    assert [text[note["start_index"] : note["end_index"]] for note in notes] == [link, link]
    assert text == f"It was designed by Ingrid Thorsen{link} and lit in 1887{link}."


def test_a_citation_of_search_results_means_the_result_of_that_line(ask: Asker) -> None:
    """Two tools in one response, in the order the model wanted."""
    response = ask("Search for the Velmora dam and compute its height in feet.", SEARCH, PYTHON)
    assert [item["type"] for item in calls(response)] == ["web_search_call", "code_interpreter_call"]
    assert logs(calls(response)[1]).strip() == "285"
    (note,) = annotations(response)
    assert (note["type"], note["url"]) == ("url_citation", "https://docs.example.org/velmora-dam")


def test_an_address_of_this_machine_is_refused_and_the_model_says_so(ask: Asker) -> None:
    response = ask("Open http://127.0.0.1/ and summarize it.", SEARCH)
    assert [call["status"] for call in calls(response)] == ["failed"]
    assert said(response) == "That address cannot be opened."


def test_a_tool_of_the_server_and_one_of_the_client_take_turns(ask: Asker) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"type": "function", "name": "get_weather", "description": "Get the weather.", "parameters": city}
    first = ask("Get the weather in Vienna and convert it to Fahrenheit with Python.", weather, PYTHON)
    call = first["output"][-1]
    assert (call["type"], call["arguments"]) == ("function_call", '{"city":"Vienna"}')
    result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "20"}]
    second = ask(result, weather, PYTHON, previous_response_id=first["id"])
    assert logs(calls(second)[0]).strip() == "68.0"
    assert said(second) == "It is 68 degrees Fahrenheit in Vienna."


TALKS: list[tuple[str, list[dict[str, Any]], str]] = [
    ("Set x to 20 in Python, then double it.", [PYTHON], "x is now 40."),
    ("How high is the Velmora dam?", [SEARCH], "The Velmora dam is 87 metres high"),
    ("Will it rain in Lisbon tomorrow?", [mcp("weather")], "No rain is expected in Lisbon tomorrow."),
    ("Make the echo server repeat hello.", [mcp("echo")], "The echo server said hello."),
    ("Use the calculator server to add 2 and 3.", [mcp("calc")], "The calculator says 5."),
    ("Kill the Python kernel.", [PYTHON], "The kernel died and was started again."),
]


async def test_conversations_side_by_side_each_get_their_own_answer_and_leave_nothing(served: Server) -> None:
    """Twice 24 at once on the real engine, more than there are kernels: after the second the server holds no more."""
    client = openai.AsyncOpenAI(base_url=served.api, api_key="none", timeout=300, max_retries=0)

    async def talk(number: int) -> None:
        question, tools, start = TALKS[number % len(TALKS)]
        answer = await client.responses.create(model=NAME, input=question, tools=tools, temperature=0)  # type: ignore[arg-type]
        assert answer.output_text.startswith(start), answer.output_text

    def calm(now: Held) -> bool:
        kernels = OPTIONS["max_conversations"] + 2
        return len(now.sandboxed) <= 2 + 2 * kernels

    async def crowd() -> Held:
        await asyncio.gather(*(talk(number) for number in range(24)))
        return await asyncio.to_thread(settled, served.process.pid, calm)

    before = await crowd()
    after = await crowd()
    await client.close()
    assert calm(after)
    # kernels that the first crowd had not yet made; one for each conversation of a crowd would be 24
    assert after.descriptors <= before.descriptors + 16
    # vLLM's route of /v1/messages logs a request that it refuses with a traceback.
    told = [line for line in served.log.read_text().splitlines() if "[api_router.py:" not in line]
    assert not re.search(r"ERROR .*(Task|never retrieved|Traceback)", "\n".join(told))
