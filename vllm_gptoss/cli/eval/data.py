"""Where questions come from: the sets bundled in `sets/`, and files in the forms their publishers use.

GPQA and AIME may not be bundled; docs/eval.md has their sources.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from vllm_gptoss.cli.eval.questions import LETTERS, EvalError, Question, QuestionTurn, checked_schema, number

BUNDLED = Path(__file__).with_name("sets")
BOXED = "Put the final answer, a single number, in \\boxed{}."
Row = Mapping[str, Any]


class QuestionSet(NamedTuple):
    """The questions of one eval; `digest` is the SHA-256 of the files that they came from."""

    name: str
    questions: Sequence[Question]
    digest: str
    repeats: int


def load(name: str, files: Sequence[Path] = (), limit: int | None = None, seed: int = 0) -> QuestionSet:
    """The set `name`, from `files` or bundled; of `limit` questions, drawn with the seed.

    Raises:
        EvalError: no such set, no file where one is needed, or a file that cannot be read as that set, with the place.
    """
    if name not in READERS:
        raise EvalError(f"no eval is named {name!r}: there are {', '.join(READERS)}")
    read, repeats = READERS[name]
    if not files and not (BUNDLED / f"{name}.yaml").exists():
        raise EvalError(f"{name} is not bundled: --data {name}=FILE; docs/eval.md has its source")
    digest = hashlib.sha256()
    found: dict[str, Question] = {}
    for path in files or [BUNDLED / f"{name}.yaml"]:
        before, place = len(found), str(path)
        try:
            data = path.read_bytes()
            digest.update(hashlib.sha256(data).digest())
            rows, functions = _rows(path, data)
            for at, row in enumerate(rows, 1):
                place = f"{path}, question {at}"
                question = read(_with_tools(row, functions))
                if found.setdefault(question.id, question) is not question:
                    raise EvalError(f"two questions have the id {question.id!r}")
            if len(found) == before:
                raise EvalError("no questions")
        except ValidationError as error:
            first = error.errors()[0]
            raise EvalError(f"{place}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except (ValueError, RecursionError, yaml.YAMLError, csv.Error) as error:
            raise EvalError(f"{place}: {error}") from None
        except OSError as error:
            raise EvalError(f"{path}: {error.strerror}") from None
    questions = list(found.values())
    if limit is not None and limit < len(questions):
        questions = random.Random(f"{seed}/{name}").sample(questions, limit)  # noqa: S311
    return QuestionSet(name, questions, digest.hexdigest(), repeats)


def _rows(path: Path, data: bytes) -> tuple[Iterable[Any], Row]:
    """The rows of CSV with a header, of YAML `{functions: {name: …}, questions: […]}`, or of JSON Lines; functions."""
    kind, text = path.suffix.lower(), data.decode("utf-8-sig")
    if kind == ".csv":
        return csv.DictReader(io.StringIO(text, newline="")), {}
    if kind not in (".yaml", ".yml"):
        return [_json(line, at) for at, line in enumerate(text.splitlines(), 1) if line.strip()], {}
    content = yaml.safe_load(text)
    if not isinstance(content, dict) or not isinstance(content.get("questions"), list):
        raise EvalError("no list of questions")
    return content["questions"], content.get("functions") or {}


def _with_tools(row: Any, functions: Row) -> Row:
    if not isinstance(row, Mapping):
        raise EvalError("no object")
    return {**row, "tools": [_tool(tool, functions) for tool in row["tools"]]} if row.get("tools") else row


def _json(line: str, at: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise EvalError(f"line {at}: no JSON (one object a line is expected)") from None


def _tool(tool: Any, functions: Row) -> Row:
    """A function by its name in the file, or a tool as the Responses API has it."""
    if isinstance(tool, str) and tool in functions:
        tool = {"type": "function", "name": tool, **functions[tool]}
    if not isinstance(tool, dict) or "type" not in tool or (tool["type"] == "function" and not tool.get("name")):
        raise EvalError(f"no function {tool!r} in the file, and no tool")
    if tool["type"] == "function":
        tool = {"parameters": {"type": "object", "properties": {}}, **tool}
        checked_schema(tool["parameters"])
    return dict(tool)


def _field(row: Row, *names: str) -> str:
    for name in names:
        if row.get(name) not in (None, ""):
            return str(row[name]).strip()
    raise EvalError(f"no {' or '.join(names)}")


def _id(row: Row, text: str) -> str:
    """Without an id it is a hash of the text: adding questions does not change it."""
    return str(row.get("Record ID") or row.get("id") or hashlib.sha256(text.encode()).hexdigest()[:12])


def _choice(row: Row) -> Question:
    """The columns of gpqa_diamond.csv, or `question`, `options` and `answer` (a letter)."""
    text = _field(row, "Question", "question")
    if "options" in row:
        options, letter = [str(option) for option in row["options"]], _field(row, "answer")
        if letter not in list(LETTERS[: len(options)]) or not 2 <= len(options) <= len(LETTERS):
            raise EvalError(f"answer must be the letter of one of 2 to {len(LETTERS)} options")
        options.insert(0, options.pop(LETTERS.index(letter)))
    else:
        options = [_field(row, name) for name in ("Correct Answer", *(f"Incorrect Answer {at}" for at in (1, 2, 3)))]
    return Question(_id(row, text), (QuestionTurn(text),), options=tuple(options))


def _number(row: Row) -> Question:
    """`question` or `problem`, and `answer`: a number, or GSM8K's solution that ends with `#### 42`."""
    text, answer = _field(row, "question", "problem"), _field(row, "answer").rpartition("####")[2]
    value = number(re.sub(r"[^\d./,+-].*", "", answer.strip(), flags=re.DOTALL))
    if value is None:
        raise EvalError(f"answer is no number: {answer[:50]!r}")
    return Question(_id(row, text), (QuestionTurn(f"{text}\n\n{BOXED}", number=value),))


_TURN = {each.name for each in dataclasses.fields(QuestionTurn)} - {"choice", "among"}
_question_of = TypeAdapter(Question).validate_python


def _own(row: Row) -> Question:
    """The form of `sets/`. A question of one turn has the turn's fields itself."""
    turn = {key: row[key] for key in row.keys() & _TURN}
    rest = {key: value for key, value in row.items() if value is not None and (key not in _TURN or "turns" in row)}
    return _question_of({"turns": [turn], **rest})


READERS: Mapping[str, tuple[Callable[[Row], Question], int]] = {
    "gpqa": (_choice, 8),
    "aime25": (_number, 4),
    "gsm8k": (_number, 1),
    **dict.fromkeys(("smoke", "toolcalls", "harmony", "citations"), (_own, 1)),
}
"""The reader of an eval's rows, and its repeats of a question: for GPQA and AIME as in gpt_oss.evals."""
