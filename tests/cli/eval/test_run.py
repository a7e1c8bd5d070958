"""`vllm-gptoss eval` from the command line to its files: no duplicate requests, no lost or hidden samples."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.cli.eval.server import MODEL, SUM, Plan, Raw, Reply, Served, Words, asked, events, results, serving, sums
from vllm_gptoss.cli.eval.intervals import wilson
from vllm_gptoss.cli.main import app

OUTCOMES = ("right", "wrong", "cut", "empty", "unparsed", "refused", "failed", "timed_out", "broken")


def questions(folder: Path, count: int) -> Path:
    """`count` sums."""
    path = folder / "sums.jsonl"
    rows = [{"id": f"q{n}", "question": f"What is {n} + 1?", "answer": n + 1} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(api: str, data: Path, out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments(api, data, out), *more])


def arguments(api: str, data: Path, out: Path) -> list[str]:
    where = ["--base-url", api, "--eval", "gsm8k", "--data", f"gsm8k={data}", "--out", str(out)]
    return [*where, "--effort", "low", "--concurrency", "8", "--timeout", "9", "--idle-timeout", "3", "--tries", "2"]


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def which(body: dict[str, Any]) -> int:
    found = SUM.search(asked(body))
    assert found
    return int(found[1])


def mixed(body: dict[str, Any], before: int) -> Reply:
    """Every tenth question another end; 0, 10, 20 … are right, and so are 9, 19 …"""
    ends: list[Reply] = [
        sums(body, before), Words("It is \\boxed{-1}."), Words("It is", cut=True), Words(""), Words("I do not know."),
        Raw([b"no"], 400), Raw([b"oops"], 500), Raw([], end="hang"), Raw([b"{"]), sums(body, before),
    ]  # fmt: skip
    return ends[which(body) % 10]


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_every_outcome_is_counted_and_the_figures_follow_from_the_lines(tmp_path: Path, api: str) -> None:
    with serving(mixed) as served:
        done = evaluate(served.api, questions(tmp_path, 50), tmp_path / "run", "--api", api)
        assert served.app.busiest <= 8
    assert done.exit_code == 3, done.output
    counted = Counter(line["outcome"] for line in lines(tmp_path / "run"))
    assert counted == dict(zip(OUTCOMES, (10, 5, 5, 5, 5, 5, 5, 5, 5), strict=True))
    (row,) = summary(tmp_path / "run")["rows"]
    assert row["outcomes"] == counted
    assert (row["samples"], row["lost"]) == (50, 20)
    assert row["accuracy"] == pytest.approx(10 / 30)
    assert (row["low"], row["high"]) == pytest.approx(wilson(10, 30))
    assert (row["worst"], row["best"]) == (10 / 50, 30 / 50)
    answered = [line for line in lines(tmp_path / "run") if line["outcome"] in OUTCOMES[:5]]
    assert row["output_tokens"] == pytest.approx(sum(line["tokens"] for line in answered) / 30)
    assert sum(line["tokens"] for line in answered) == 10 * 400 + 20 * 20
    # Two tries for the five of 500; an answer that was no stream is lost at once.
    assert len(served.app.bodies) == 55
    assert "50 of 50: gsm8k low: 10 right, 20 not, 20 lost" in done.output
    for words in ("33.3", "5 wrong", "5 cut", "5 empty", "5 unparsed", "5 refused", "5 failed", "5 timed out"):
        assert words in re.sub(r"\s+", " ", done.output)


def test_the_same_command_asks_only_what_was_lost(tmp_path: Path) -> None:
    data, out = questions(tmp_path, 30), tmp_path / "run"
    with serving(mixed) as served:
        assert evaluate(served.api, data, out).exit_code == 3
        served.app.plan = sums
        served.app.bodies.clear()
        done = evaluate(served.api, data, out)
        assert {which(body) % 10 for body in served.app.bodies} == {5, 6, 7, 8}
        assert len(served.app.bodies) == 12
        assert done.exit_code == 0, done.output
        assert "18 of 30 samples are there already" in done.output
        (row,) = summary(out)["rows"]
        assert (row["samples"], row["lost"], row["outcomes"]["right"]) == (30, 0, 18)
        assert summary(out)["complete"]
        served.app.bodies.clear()
        assert evaluate(served.api, data, out).exit_code == 0
        assert not served.app.bodies


def test_other_settings_are_another_run(tmp_path: Path) -> None:
    data, out = questions(tmp_path, 3), tmp_path / "run"
    with serving(sums) as served:
        assert evaluate(served.api, data, out).exit_code == 0
        before = (out / "samples.jsonl").read_bytes()
        for more, word in ((["--effort", "high"], "efforts"), (["--seed", "1"], "seed"), (["--api", "chat"], "api")):
            done = evaluate(served.api, data, out, *more)
            assert done.exit_code == 2
            assert word in done.output
            assert "--out" in done.output
        questions(tmp_path, 4)
        done = evaluate(served.api, data, out)
        assert (done.exit_code, "sha256" in done.output) == (2, True)
        assert (out / "samples.jsonl").read_bytes() == before


def test_no_file_of_a_run_has_a_secret_of_the_extra_body(tmp_path: Path) -> None:
    """A changed secret is no other run: tokens expire."""
    data, out = questions(tmp_path, 3), tmp_path / "run"
    with serving(sums) as served:
        for number in range(2):
            mcp = {"type": "mcp", "authorization": f"sesame{number}", "headers": {"x-key": f"sesame{number}"}}
            body = {"tools": [mcp], "max_tokens": 1, "vendor": {"API_KEY": f"sesame{number}", "access_token": "sesame"}}
            done = evaluate(served.api, data, out, "--extra-body", json.dumps(body))
            assert done.exit_code == 0, done.output
        assert served.app.bodies[0]["tools"] == [mcp | {"authorization": "sesame0", "headers": {"x-key": "sesame0"}}]
        assert len(served.app.bodies) == 3
    assert {file.name for file in out.iterdir() if "sesame" in file.read_text()} == set()
    assert json.loads((out / "run.json").read_text())["extra_body"]["max_tokens"] == 1


def test_a_call_of_the_servers_own_tool_gets_no_result(tmp_path: Path) -> None:
    """A server refuses a result without a call's id, and the sample would be lost."""
    call = {"type": "mcp_call", "id": "mcp_1", "name": "python", "server_label": "python", "arguments": "1 + 1"}

    def called(body: dict[str, Any], before: int) -> Reply:
        last = json.loads(events(sums(body, before), False)[-1].partition(b"data: ")[2])
        last["response"]["output"].insert(0, call)
        return Raw([f"data: {json.dumps(last)}\n\n".encode()], headers={"content-type": "text/event-stream"})

    with serving(called) as served:
        done = evaluate(served.api, questions(tmp_path, 1), tmp_path / "run")
        assert len(served.app.bodies) == 1
    assert done.exit_code == 0, done.output
    assert lines(tmp_path / "run")[0]["why"] == "a call of 'python', which was not offered"


def start(api: str, data: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_gptoss.cli", "eval", *arguments(api, data, out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heard)


def heard() -> None:
    """A shell starts what runs in the background with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_goes_on_and_every_sample_counts_once(tmp_path: Path, how: signal.Signals) -> None:
    data, out = questions(tmp_path, 400), tmp_path / "run"
    answers = itertools.count()
    killed = False

    def stuck(body: dict[str, Any], before: int) -> Reply:
        """After 100 answers none more, until the run was killed."""
        pause = 0.0 if killed or next(answers) < 100 else 30.0
        return Raw(events(sums(body, before), False), headers={"content-type": "text/event-stream"}, pause_s=pause)

    with serving(stuck) as served:
        process = start(served.api, data, out)
        file = out / "samples.jsonl"
        until(lambda: file.exists() and file.read_bytes().count(b"\n") >= 20)
        process.send_signal(how)
        output, _ = process.communicate(timeout=60)
        killed = True
        kept = len(lines(out)) if how is signal.SIGINT else file.read_bytes().count(b"\n")
        assert 20 <= kept < 400
        if how is signal.SIGINT:
            assert process.returncode == 3, output
            assert "the same command continues" in output
            assert summary(out)["rows"][0]["samples"] == kept
        else:
            with file.open("ab") as end:  # a line that the kill cut in its middle
                end.write(b'{"eval": "gsm8k", "effort": "low", "id": "q119", "repe')
        done = evaluate(served.api, data, out)
        assert done.exit_code == 0, done.output
    keys = [(line["eval"], line["effort"], line["id"], line["repeat"]) for line in lines(out)]
    assert sorted(keys) == sorted(set(keys))
    assert len(keys) == 400
    assert summary(out)["rows"][0]["accuracy"] == 1


def until(what: Any, seconds: float = 60) -> None:
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.02)


def slowly(body: dict[str, Any], before: int) -> Reply:
    return Raw(events(sums(body, before), False), headers={"content-type": "text/event-stream"}, pause_s=0.01)


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    data, out = questions(tmp_path, 400), tmp_path / "run"
    with serving(slowly) as served:
        process = start(served.api, data, out)
        until(lambda: (out / "run.json").exists())
        done = evaluate(served.api, data, out)
        process.kill()
        process.communicate()
    assert done.exit_code == 2
    assert "another process" in done.output


def test_a_server_that_died_ends_the_run_soon_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with serving(lambda body, before: Raw(status=500)) as served:
        done = evaluate(served.api, questions(tmp_path, 2000), out)
        assert len(served.app.bodies) < 200
    assert done.exit_code == 3, done.output
    assert "in a row were lost" in done.output
    assert "samples are missing" in re.sub(r"\s+", " ", done.output)
    assert not summary(out)["complete"]


def test_no_server_no_model_and_no_address_are_clear(tmp_path: Path) -> None:
    data = questions(tmp_path, 3)
    for url, words in (("http://u:pw@127.0.0.1:1/v1", "error: http://127.0.0.1:1/v1/"), ("127.0.0.1:8000", "http://")):
        done = evaluate(url, data, tmp_path / "run")
        assert (done.exit_code, words in done.output) == (2, True), done.output
        assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


BAD = [
    (["--eval", "mmlu"], "no eval is named"),
    (["--eval", "gpqa"], "--data gpqa=FILE"),
    (["--eval", ","], "nothing is named"),
    (["--data", "gsm8k"], "NAME=FILE"),
    (["--data", "mmlu=x"], "NAME=FILE"),
    (["--api", "completions"], "one of responses, chat"),
    (["--extra-body", "[]"], "no JSON object"),
    (["--eval", "citations", "--api", "chat"], "no web_search"),
]


@pytest.mark.parametrize(("more", "words"), BAD, ids=[" ".join(more) for more, _ in BAD])
def test_a_wrong_command_line_is_told(tmp_path: Path, more: list[str], words: str) -> None:
    done = evaluate("http://127.0.0.1:1/v1", questions(tmp_path, 1), tmp_path / "run", *more)
    assert done.exit_code == 2
    assert words in re.sub(r"[\s│]+", " ", done.output)


def test_what_is_sent_is_what_was_said(tmp_path: Path) -> None:
    more = ["--temperature", "0.5", "--top-p", "-1", "--max-tokens", "77", "--extra-body", '{"x": 1, "seed": 9}']
    with serving(sums) as served:
        for api in ("responses", "chat"):
            out = tmp_path / api
            done = evaluate(served.api, questions(tmp_path, 1), out, *more, "--api", api)
            assert done.exit_code == 0, done.output
        first, second = served.app.bodies
    common = {"model": MODEL, "temperature": 0.5, "seed": 9, "stream": True, "x": 1}
    assert {**first, **common} == first
    assert (first["max_output_tokens"], first["reasoning"], "top_p" in first) == (77, {"effort": "low"}, False)
    assert {**second, **common} == second
    assert (second["max_completion_tokens"], second["reasoning_effort"], "top_p" in second) == (77, "low", False)


def test_efforts_and_repeats_are_rows_and_samples(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with serving(sums) as served:
        done = evaluate(served.api, questions(tmp_path, 5), out, "--effort", "high,low,none", "--repeats", "3")
    assert done.exit_code == 0
    assert [(row["effort"], row["samples"], row["questions"]) for row in summary(out)["rows"]] == [
        ("low", 15, 5), ("high", 15, 5), ("", 15, 5),
    ]  # fmt: skip


def test_the_panel_has_published_values_and_no_foreign_markup(tmp_path: Path) -> None:
    out, data = tmp_path / "run", tmp_path / "aime.jsonl"
    data.write_text('{"id": "<script>", "question": "What is 1 + 2?", "answer": 3}')
    with serving(lambda body, before: Words("<img src=x> \\boxed{3}")) as served:
        command = ["eval", "--base-url", served.api, "--eval", "aime25", "--data", f"aime25={data}", "--out", str(out)]
        done = CliRunner().invoke(app, [*command, "--model", "<script>-gpt-oss-20b", "--repeats", "1"])
    assert done.exit_code == 0, done.output
    page = (out / "panel.html").read_text()
    for words in ("38.8", "75.0", "85.8", "91.7", "arXiv:2508.10925", "100.0"):
        assert words in page
    assert "<img" not in page
    assert "<script" not in page
    assert "38.8" in done.output


def test_a_score_too_low_fails_and_lost_samples_count_against_it(tmp_path: Path) -> None:
    data = questions(tmp_path, 20)
    with serving(lambda body, before: Words("no") if which(body) == 0 else sums(body, before)) as served:
        assert evaluate(served.api, data, tmp_path / "a", "--fail-below", "95").exit_code == 0
        done = evaluate(served.api, data, tmp_path / "a", "--fail-below", "95.1")
        assert (done.exit_code, "95.0" in done.output) == (1, True)
    with serving(lambda body, before: Raw(status=400) if which(body) < 2 else sums(body, before)) as served:
        assert evaluate(served.api, data, tmp_path / "b").exit_code == 3
        assert evaluate(served.api, data, tmp_path / "b", "--fail-below", "95").exit_code == 1


@pytest.fixture
def caller() -> Iterator[Served]:
    """Makes the requested calls, one an answer, then returns their results."""

    def plan(body: dict[str, Any], before: int) -> Reply:
        done = results(body)
        wanted = WANTED[asked(body)]
        if len(done) < len(wanted):
            last = len(wanted) if body["model"] == "all" else len(done) + 1
            return Words(reasoning="I need a call.", calls=wanted[len(done) : last])
        return Words("I have " + " and ".join(done))

    with serving(plan) as served:
        yield served


WANTED = {
    "Both?": [("f", '{"a": 1}'), ("f", '{"a": 2}')],
    "And then?": [("g", "{}")],
    "Wrongly?": [("f", '{"a": "x"}')],
}
TOOLS = """
functions:
  f: {parameters: {type: object, properties: {a: {type: integer}}, required: [a]}}
  g: {description: nothing}
questions:
  - id: one
    tools: [f, g]
    turns:
      - user: Both?
        calls: [{name: f, arguments: {a: 1}, result: apples}, {name: f, arguments: {a: 2}, result: pears}]
        says: apples and pears
      - {user: "And then?", calls: [{name: g, result: plums}], says: plums}
  - {id: two, tools: [f], user: "Wrongly?", request: {vllm_xargs: {forced: "1 2"}},
     calls: [{name: f, arguments: {a: 1}}]}
"""


@pytest.mark.parametrize("model", ["one", "all"])
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_calls_are_answered_and_the_dialogue_goes_on(caller: Served, tmp_path: Path, api: str, model: str) -> None:
    data, out = tmp_path / "calls.yaml", tmp_path / "run"
    data.write_text(TOOLS)
    command = ["eval", "--base-url", caller.api, "--eval", "toolcalls", "--data", f"toolcalls={data}"]
    done = CliRunner().invoke(app, [*command, "--out", str(out), "--api", api, "--effort", "low", "--model", model])
    assert done.exit_code == 0, done.output
    one, two = sorted(lines(out), key=lambda line: str(line["id"]))
    assert (one["outcome"], one["answer"]) == ("right", ["I have apples and pears", "I have plums"])
    assert len([body for body in caller.app.bodies if asked(body) != "Wrongly?"]) == (5 if model == "one" else 4)
    assert (two["outcome"], two["why"]) == ("wrong", "f: $.a: 'x' is not of type 'integer'")
    assert all("tools" in body for body in caller.app.bodies)
    forced = [body.get("vllm_xargs") for body in caller.app.bodies]
    assert {"forced": "1 2"} in forced
    assert None in forced
    # The server gets its reasoning back with the results of the calls.
    assert sum("I need a call." in json.dumps(body) for body in caller.app.bodies) >= 3


def test_a_model_that_calls_for_ever_is_stopped(tmp_path: Path) -> None:
    data, out = tmp_path / "calls.yaml", tmp_path / "run"
    data.write_text(TOOLS)
    with serving(lambda body, before: Words(calls=[("f", '{"a": 1}')])) as served:
        command = ["eval", "--base-url", served.api, "--eval", "toolcalls", "--data", f"toolcalls={data}"]
        done = CliRunner().invoke(app, [*command, "--out", str(out), "--effort", "low"])
        assert len(served.app.bodies) == 32
    assert done.exit_code == 0
    assert {line["outcome"] for line in lines(out)} == {"wrong"}


def test_the_key_is_sent_and_kept_nowhere(tmp_path: Path) -> None:
    key = "sk-very-secret"
    with serving(sums) as served:
        url = served.api.replace("http://", "http://user:pass-word@")
        done = evaluate(url, questions(tmp_path, 2), tmp_path / "run", "--api-key", key)
    assert done.exit_code == 0, done.output
    kept = b"".join(path.read_bytes() for path in (tmp_path / "run").iterdir())
    for secret in (key, "pass-word"):
        assert secret.encode() not in kept
        assert secret not in done.output


def test_an_answer_keeps_its_end_and_its_reasoning(tmp_path: Path) -> None:
    long: Plan = lambda body, before: Words("x" * 70_000 + " \\boxed{1}", "because " * 3)  # noqa: E731
    with serving(long) as served:
        evaluate(served.api, questions(tmp_path, 1), tmp_path / "run", "--timeout", "60", "--idle-timeout", "30")
    (line,) = lines(tmp_path / "run")
    assert (line["outcome"], line["reasoning"]) == ("right", ["because " * 3])
    assert line["answer"][0].endswith("\\boxed{1}")
    assert len(line["answer"][0]) < 66_000


def test_half_a_character_from_a_server_is_kept_as_well_as_can_be(tmp_path: Path) -> None:
    with serving(lambda body, before: Words("\ud83d \\boxed{1}")) as served:
        done = evaluate(served.api, questions(tmp_path, 1), tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert lines(tmp_path / "run")[0]["outcome"] == "right"


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    data, file = questions(tmp_path, 5), tmp_path / "file"
    file.touch()
    with serving(sums) as served:
        done = evaluate(served.api, data, file)
        assert (done.exit_code, "File exists" in done.output) == (2, True), done.output
        assert not served.app.bodies


def test_a_full_disk_is_told_and_nothing_that_was_kept_is_lost(tmp_path: Path) -> None:
    """A limit on the size of files ends a write in the middle, as a full disk does."""
    data, out = questions(tmp_path, 60), tmp_path / "run"
    with serving(sums) as served:
        command = [sys.executable, "-m", "vllm_gptoss.cli", "eval", *arguments(served.api, data, out)]
        limited = ["bash", "-c", 'ulimit -f 32; exec "$@"', "bash", *command]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        assert "File too large" in done.stderr
        assert "Traceback" not in done.stderr
        before = len(served.app.bodies)
        assert evaluate(served.api, data, out).exit_code == 0
        assert len(served.app.bodies) - before < 55
    assert summary(out)["rows"][0]["outcomes"]["right"] == 60


@pytest.mark.parametrize("module", ["openai", "numpy"])
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from vllm_gptoss.cli.main import app; app(['eval', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install 'vllm-gptoss[eval]'" in done.stderr
    assert "Traceback" not in done.stderr
