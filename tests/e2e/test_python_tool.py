"""The python tool on the real server and model: what it computes, and everything that a program can do to it."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from openai.types.containers import FileListResponse

from demo.server import Server
from tests.e2e.asking import ONE_WAY, PYTHON, Asker, calls, logs, said, tokens_of_results
from tests.e2e.process import held
from tests.support.places import PYTHON as OPTIONS
from tests.support.responses.events import check

pytestmark = [pytest.mark.namespaces, pytest.mark.vllm, pytest.mark.serve, pytest.mark.timeout(600)]

WARM = 2  # the default
PNG = b"\x89PNG\r\n\x1a\n"


def read_in_full(ask: Asker, question: str, response: dict[str, Any]) -> None:
    """The prompts of this response grew by exactly the texts that its items show: the model has read them."""
    grown = response["usage"]["input_tokens"] - ask.prompt_tokens(question, PYTHON)
    assert grown == tokens_of_results("python", [logs(call) for call in calls(response)])


def test_state_lasts_over_calls_and_over_responses(ask: Asker) -> None:
    first = ask("Set x to 20 in Python, then double it.", PYTHON)
    assert [logs(call) for call in calls(first)] == ["(no output)", "40\n"]
    assert said(first) == "x is now 40."
    second = ask("Add one to it.", PYTHON, previous_response_id=first["id"])
    (call,) = calls(second)
    assert logs(call).strip() == "41"
    assert {call["container_id"] for call in calls(first)} == {call["container_id"]}
    (stranger,) = calls(ask("Is x still defined in Python?", PYTHON))
    assert "NameError: name 'x' is not defined" in logs(stranger)
    assert stranger["container_id"] != call["container_id"]


def test_a_plot_is_an_image_and_a_file(ask: Asker) -> None:
    response = ask("Plot the square numbers.", PYTHON)
    (call,) = calls(response)
    assert call["status"] == "completed", call["outputs"]
    (image,) = [output for output in call["outputs"] if output["type"] == "image"]
    head, data = image["url"].split(",", 1)
    assert head == "data:image/png;base64"
    assert base64.b64decode(data).startswith(PNG)
    (note,) = response["output"][-1]["content"][0]["annotations"]
    assert (note["type"], note["filename"]) == ("container_file_citation", "squares.png")
    assert said(response)[note["start_index"] : note["end_index"]] == "squares.png"
    files = f"/containers/{call['container_id']}/files"
    (listed,) = ask.http.get(files).raise_for_status().json()["data"]
    check(FileListResponse, listed)
    assert (listed["id"], listed["path"]) == (note["file_id"], "/mnt/data/squares.png")
    assert ask.http.get(f"{files}/{listed['id']}").json() == listed
    saved = ask.http.get(f"{files}/{note['file_id']}/content").raise_for_status().content
    assert saved.startswith(PNG)
    assert len(saved) == listed["bytes"]
    for path in (files, f"{files}/{listed['id']}", f"{files}/{listed['id']}/content"):
        assert ask.http.get(path, headers={"Authorization": "Bearer somebody-else"}).status_code == 404


def test_a_traceback_reaches_the_model_which_tries_again(ask: Asker) -> None:
    question = "Compute the square root of 1764."
    response = ask(question, PYTHON)
    wrong, right = calls(response)
    assert (wrong["status"], right["status"]) == ("failed", "completed")
    assert "Traceback" in logs(wrong)
    assert "NameError: name 'sqrt' is not defined" in logs(wrong)
    assert logs(right) == "42.0\n"
    assert said(response) == "The square root of 1764 is 42."
    if ask.streamed:
        steps = [event["type"].removeprefix("response.code_interpreter_call") for event in ask.events]
        steps = [step for step in steps if step.startswith((".", "_code.done"))]
        assert steps == [".in_progress", "_code.done", ".interpreting", ".completed"] * 2
    read_in_full(ask, question, response)


@ONE_WAY
@pytest.mark.parametrize(
    ("question", "error", "answer"),
    [
        (
            "Run an infinite loop in Python.",
            f"timed out after {OPTIONS['timeout_s']} seconds",
            "Sorry, the loop never ends and was stopped.",
        ),
        ("Fill the memory in Python.", "MemoryError", "The memory limit stopped it."),
    ],
)
def test_a_loop_ends_at_the_wall_clock_and_a_memory_bomb_at_its_limit(
    ask: Asker, question: str, error: str, answer: str
) -> None:
    """The bomb allocates 4 GiB with a limit of 512 MiB; a single process gets an error and is not killed."""
    response = ask(question, PYTHON)
    (call,) = calls(response)
    assert call["status"] == "failed"
    assert error in logs(call)
    assert said(response) == answer


@ONE_WAY
def test_a_fork_bomb_meets_its_limit_and_nothing_of_it_is_left(ask: Asker, served: Server) -> None:
    """Its 500 processes would sleep for 20 s; the limit is 64, and all kernels together are fewer than 40."""
    response = ask("Start as many processes as you can.", PYTHON)
    (call,) = calls(response)
    assert call["status"] == "failed"
    # refused by the kernel, or killed by the supervisor where the kernel does not count by namespace
    assert re.search("Resource temporarily unavailable|processes", logs(call))
    assert said(response) == "The process limit stopped it."
    kernels = 2 * (OPTIONS["max_conversations"] + WARM)
    assert 2 < len(held(served.process.pid).sandboxed) <= 2 + kernels < 40


def test_a_flood_is_cut_and_the_answer_follows(ask: Asker) -> None:
    """20 MB are printed; the model reads 64,000 characters of them, some 9,000 tokens."""
    question = "Print too many lines."
    response = ask(question, PYTHON)
    (call,) = calls(response)
    assert "characters omitted" in logs(call)
    assert 64_000 < len(logs(call)) < 64_200
    assert said(response) == "The output was cut."
    read_in_full(ask, question, response)


@ONE_WAY
def test_a_killed_kernel_is_reported_and_replaced(ask: Asker) -> None:
    first = ask("Set x to 20 in Python, then double it.", PYTHON)
    question = "Kill the Python kernel."
    killed = ask(question, PYTHON, previous_response_id=first["id"])
    dead, alive = calls(killed)
    assert dead["status"] == "failed"
    assert "died of signal 9. All variables are lost; files in /mnt/data are kept." in logs(dead)
    assert (alive["status"], logs(alive)) == ("completed", "alive\n")
    assert said(killed) == "The kernel died and was started again."
    after = ask("Is x still defined in Python?", PYTHON, previous_response_id=killed["id"])
    assert "NameError: name 'x' is not defined" in logs(calls(after)[0])


@ONE_WAY
def test_files_survive_where_the_kernel_does_not(ask: Asker) -> None:
    first = ask("Write a file with the text hello.", PYTHON)
    killed = ask("Kill the Python kernel.", PYTHON, previous_response_id=first["id"])
    after = ask("Which files are in /mnt/data?", PYTHON, previous_response_id=killed["id"])
    assert logs(calls(after)[0]) == "['hello.txt']\n"
