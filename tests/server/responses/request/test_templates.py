"""Prompt templates: filled in as in the API, visible only to keys that may use them, mistakes named by line."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.responses.events import check_response
from tests.support.responses.pdf import file_part, pdf
from tests.support.responses.server import MODEL, Running, Start
from tests.support.responses.websocket import ask, dial
from vllm_gptoss.server.responses.request.templates import MAX_FILLED, Templates
from vllm_gptoss.tools.yaml_file import YamlFileError

SAID = "<|channel|>final<|message|>Done.<|return|>"
ALICE = hashlib.sha256(b"alice").hexdigest()
PROMPTS = f"""
prompts:
  reply:
    default: "2"
    versions:
      1:
        instructions: Be brief.
      2:
        instructions: You answer for {{{{ company }}}}.
        messages:
          - role: user
            content: "Hello, I am {{{{name}}}}."
          - role: assistant
            content: Hello {{{{name}}}}, welcome to {{{{company}}}}.
        settings:
          temperature: 0.25
          reasoning: {{effort: low}}
          max_output_tokens: 77
      3:
        instructions: Not yet.
  hers:
    callers: [{ALICE}]
    versions:
      only:
        instructions: Secret words.
"""


@pytest.fixture
def server(start: Start, tmp_path: Path) -> Running:
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "a.yaml").write_text(PROMPTS)
    (folder / "b.yml").write_text("prompts: {file: {versions: {a: {instructions: 'Read: {{text}}'}}}}")
    return start(SAID, config={"prompts": str(folder)})


def create(http: httpx.Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = http.post("/responses", json={"model": MODEL, "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    check_response(body)
    return body


def refused(http: httpx.Client, prompt: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    answer = http.post("/responses", json={"model": MODEL, "prompt": prompt, **fields})
    return answer.status_code, answer.json()["error"]


NAMED = {"id": "reply", "variables": {"company": "ACME", "name": "{{company}} <|end|>"}}


def test_a_template_stands_before_the_input_with_its_variables_in_it(server: Running) -> None:
    with server.http() as http:
        body = create(http, NAMED, input="What is open?")
    prompt = server.prompt()
    assert "# Instructions\n\nYou answer for ACME." in prompt
    texts = ["I am {{company}} <|end|>.", "Hello {{company}} <|end|>, welcome to ACME.", "What is open?"]
    places = [prompt.index(text) for text in texts]  # what a value holds is text, neither a variable nor a token
    assert places == sorted(places)
    assert "Reasoning: low" in prompt
    assert (body["temperature"], body["max_output_tokens"]) == (0.25, 77)
    assert body["prompt"] == {**NAMED, "version": "2"}
    assert [item["role"] for item in body["instructions"]] == ["developer", "user", "assistant"]


def test_what_a_request_says_itself_wins_over_its_template(server: Running) -> None:
    with server.http() as http:
        body = create(http, NAMED, input="x", instructions="Mine.", temperature=0.5, reasoning=None)
    assert "Mine." in server.prompt()
    assert "You answer for" not in server.prompt()
    assert body["temperature"] == 0.5
    assert "Reasoning: low" in server.prompt(), "null is what was left out"


def test_a_version_can_be_named_and_no_input_is_needed(server: Running) -> None:
    with server.http() as http:
        body = create(http, {"id": "reply", "version": "1"})
        assert body["instructions"] == "Be brief."
        create(http, NAMED)
    assert server.prompt().count("<|start|>user") == 1


def test_a_later_turn_has_no_template_unless_it_names_one(server: Running) -> None:
    """Like instructions, a template's messages apply to one request and come before the conversation."""
    with server.http() as http:
        first = create(http, NAMED, input="one")
        second = http.post("/responses", json={"model": MODEL, "previous_response_id": first["id"], "input": "two"})
        assert "ACME" not in server.prompt()
        create(http, NAMED, previous_response_id=second.json()["id"], input="three")
        assert server.prompt().count("I am ") == 1
        assert server.prompt().index("I am ") < server.prompt().index("<|message|>one<|end|>")
        items = http.get(f"/responses/{first['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["one"]


def test_a_variable_may_be_text_or_a_file_that_is_text(server: Running) -> None:
    data = base64.b64encode(b"a note").decode()
    values: list[tuple[Any, str]] = [
        ({"type": "input_text", "text": "plain"}, "Read: plain"),
        ({"type": "input_file", "filename": "n.txt", "file_data": data}, "Read: [file: n.txt]\na note"),
        (file_part(pdf("A page of it.")), "A page of it."),
    ]
    with server.http() as http:
        for value, expected in values:
            body = create(http, {"id": "file", "variables": {"text": value}}, input="x")
            assert expected in server.prompt()
            assert "file_data" not in str(body["prompt"])
        image = {"type": "input_image", "image_url": "https://example.com/a.png", "detail": "auto"}
        status, error = refused(http, {"id": "file", "variables": {"text": image}}, input="x")
    assert (status, error["param"]) == (400, "prompt.variables.text")
    assert "text only" in error["message"]


def test_an_unknown_prompt_is_told_with_those_the_caller_may_use(server: Running) -> None:
    with server.http("alice") as alice, server.http("bob") as bob:
        status, error = refused(alice, {"id": "nope"}, input="x")
        assert (status, error["code"], error["param"]) == (404, "prompt_not_found", "prompt.id")
        assert "There are: file, hers, reply." in error["message"]
        create(alice, {"id": "hers"}, input="x")
        missing, hidden = refused(bob, {"id": "nope"}, input="x"), refused(bob, {"id": "hers"}, input="x")
        assert hidden == (404, {**missing[1], "message": missing[1]["message"].replace("nope", "hers")})
        assert "There are: file, reply." in hidden[1]["message"]
        status, error = refused(bob, {"id": "reply", "version": "9"}, input="x")
    assert (status, error["code"]) == (404, "prompt_version_not_found")
    assert "There are: 1, 2, 3." in error["message"]


@pytest.mark.parametrize(
    ("prompt", "param", "says"),
    [
        ({"id": "reply"}, "prompt.variables", "Missing prompt variables: company, name."),
        ({"id": "hers", "variables": {"x": "1"}}, "prompt.variables", "Unknown prompt variables: x."),
        ({"version": "1"}, "prompt.id", "Field required"),
        ({"id": "hers", "extra": 1}, "prompt.extra", "Unknown parameter"),
        ("hers", "prompt", ""),
        ({"id": "hers", "variables": {f"v{n}": "" for n in range(65)}}, "prompt.variables", "at most 64"),
        ({"id": "file", "variables": {"text": "x" * (2 << 20)}}, "prompt.variables.text", "more than"),
    ],
)
def test_a_wrong_prompt_is_refused_by_its_field(server: Running, prompt: Any, param: str, says: str) -> None:
    with server.http() as http:
        status, error = refused(http, prompt, input="x")
    assert (status, error["param"]) == (400, param)
    assert says in error["message"]


def test_the_websocket_knows_templates_too(server: Running) -> None:
    with dial(server) as socket:
        events = ask(socket, prompt=NAMED, input="hi")
    assert events[-1]["response"]["prompt"]["id"] == "reply"
    assert "welcome to ACME" in server.prompt()


def test_input_tokens_count_the_template(server: Running) -> None:
    with server.http() as http:
        with_it = http.post("/responses/input_tokens", json={"model": MODEL, "prompt": NAMED, "input": "hi"}).json()
        without = http.post("/responses/input_tokens", json={"model": MODEL, "input": "hi"}).json()
    assert with_it["input_tokens"] > without["input_tokens"] + 10


def test_many_uses_of_a_long_variable_have_a_limit(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(f"prompts: {{big: {{versions: {{a: {{instructions: '{'{{x}}' * 50}'}}}}}}}}")
    server = start(SAID, config={"prompts": str(file)})
    with server.http() as http:
        prompt = {"id": "big", "variables": {"x": "y" * (MAX_FILLED // 49)}}
        status, error = refused(http, prompt, input="x")
    assert (status, error["param"]) == (400, "prompt.variables")


VERSION = "prompts:\n  a:\n    versions:\n      '1':\n"
FINE = VERSION + "        instructions: hi\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (VERSION + "        instruction: hi\n", "p.yaml:5: prompts.a.versions.1.instruction: Extra inputs"),
        (VERSION + "        messages:\n          - role: boss\n            content: hi\n", "p.yaml:6: .*role: "),
        (VERSION + "        instructions: ''\n", "p.yaml:4: prompts.a.versions.1: give instructions, messages or both"),
        (
            FINE + "        settings:\n          temperature: 9\n",
            r"p.yaml:7: prompts.a.versions.1.settings: .*temperature.*9",
        ),
        (FINE + "        settings: {stream: true}\n", "settings.stream cannot be set here"),
        (
            VERSION + "        instructions: hi\n    default: '3'\n",
            "p.yaml:2: prompts.a: default: there is no version '3'",
        ),
        (VERSION + "        instructions: hi\n    callers: [alice]\n", "'alice' is no SHA-256 of an API key"),
        ("prompts:\n  a b: {versions: {x: {instructions: hi}}}\n", "'a b' is no id"),
        ("prompts:\n  a: 1\n  a: 2\n", "p.yaml:3: a: the key is there twice"),
        ("? [a, b]\n: 1\n", "p.yaml:1: a key is a list or a mapping, not a word"),
        ("prompts: [", "p.yaml:1: no YAML"),
        ("prompts: {}\n", "no prompts are here"),
        ("x" * (2 << 20), "larger than 1024 kB"),
    ],
)
def test_a_mistake_in_a_file_is_named_by_line_and_field(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    with pytest.raises(YamlFileError, match=said):
        Templates.load(str(file))


def test_one_id_in_two_files_and_a_missing_file_are_named(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("prompts: {same: {versions: {'1': {instructions: hi}}}}")
    with pytest.raises(YamlFileError, match=r"b.yaml: prompts.same: another file"):
        Templates.load(str(tmp_path))
    with pytest.raises(YamlFileError, match=r"gone.yaml: No such file"):
        Templates.load(str(tmp_path / "gone.yaml"))
