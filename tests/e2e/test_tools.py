"""The built-in tools inside `/v1/responses`: the model asks, the real tool answers, the model goes on."""

from __future__ import annotations

import openai
import pytest

from demo.server import NAME, Server

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.timeout(600)]


@pytest.fixture
def client(served: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.api, api_key="none", timeout=120, max_retries=0)


def test_search_open_find_ends_in_a_citation_of_the_right_lines(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=NAME,
        input="How high is the Velmora dam?",
        tools=[{"type": "web_search"}],
        include=["web_search_call.action.sources"],
        temperature=0,
    )
    calls = [item for item in response.output if item.type == "web_search_call"]
    assert [call.action.type for call in calls] == ["search", "open_page", "find_in_page"]
    assert all(call.status == "completed" for call in calls)
    assert response.output_text.startswith("The Velmora dam is 87 metres high")
    (annotation,) = response.output[-1].content[0].annotations  # type: ignore[union-attr]
    assert annotation.type == "url_citation"
    assert "velmora-dam" in annotation.url
    cited = response.output_text[annotation.start_index : annotation.end_index]
    assert annotation.url in cited
    assert (annotation.model_extra or {})["lines"] == [4, 4]


def test_a_citation_of_search_results_means_the_result_of_that_line(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=NAME,
        input="Search for the Velmora dam and compute its height in feet.",
        tools=[{"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}],
        temperature=0,
    )
    assert [item.type for item in response.output if item.type.endswith("_call")] == [
        "web_search_call",
        "code_interpreter_call",
    ]
    (annotation,) = response.output[-1].content[0].annotations  # type: ignore[union-attr]
    assert annotation.type == "url_citation"
    assert "velmora" in annotation.url


def test_streamed_tool_events_come_around_the_real_execution(client: openai.OpenAI) -> None:
    seen = []
    with client.responses.stream(
        model=NAME, input="How high is the Velmora dam?", tools=[{"type": "web_search"}], temperature=0
    ) as stream:
        for event in stream:
            seen.append(event.type)
        final = stream.get_final_response()
    assert seen.count("response.web_search_call.completed") == 3
    assert seen.count("response.output_text.annotation.added") == 1
    assert seen.index("response.web_search_call.searching") < seen.index("response.web_search_call.completed")
    assert seen[-1] == "response.completed"
    assert final.status == "completed"
