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
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from vllm_gptoss.cli.eval.questions import LETTERS, Question, QuestionSet, QuestionTurn, checked_schema, number

BUNDLED = Path(__file__).with_name("sets")
MAX_FILE = 256 << 20
MAX_QUESTIONS = 1_000_000


class DataError(ValueError):
    """A file that holds no questions; the message names file, place and what is missing."""


def load(name: str, files: Sequence[Path] = (), limit: int | None = None, seed: int = 0) -> QuestionSet:
    """The set `name`, from `files` or from what is bundled; of `limit` questions, drawn with the seed.

    Raises:
        DataError: no such set, no file where one is needed, or a file that cannot be read as that set.
    """
    if name not in READERS:
        raise DataError(f"no eval is named {name!r}: there are {', '.join(READERS)}")
    read, repeats = READERS[name]
    files = files or _bundled(name)
    digest = hashlib.sha256()
    questions: list[Question] = []
    for path in files:
        data = _bytes(path)
        digest.update(hashlib.sha256(data).digest())
        try:
            questions += read(path, data)
        except (UnicodeDecodeError, yaml.YAMLError, csv.Error) as error:
            raise DataError(f"{path}: {error}") from None
    _check(questions, files)
    if limit is not None and limit < len(questions):
        questions = random.Random(f"{seed}/{name}").sample(questions, limit)  # noqa: S311
    return QuestionSet(name, tuple(questions), digest.hexdigest(), repeats)


def _bundled(name: str) -> Sequence[Path]:
    path = BUNDLED / f"{name}.yaml"
    if not path.exists():
        raise DataError(f"{name} is not bundled: --data {name}=FILE; docs/eval.md has its source")
    return [path]


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE:
            raise DataError(f"{path} is larger than {MAX_FILE >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _check(questions: Sequence[Question], files: Sequence[Path]) -> None:
    where = ", ".join(str(path) for path in files)
    if not questions:
        raise DataError(f"{where}: no questions")
    if len(questions) > MAX_QUESTIONS:
        raise DataError(f"{where}: more than {MAX_QUESTIONS:,} questions")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise DataError(f"{where}: two questions have the id {question.id!r}")
        seen.add(question.id)


def _rows(path: Path, data: bytes) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """(place, row) of a CSV file with a header, or of JSON Lines."""
    text = data.decode("utf-8-sig")
    if path.suffix.lower() == ".csv":
        for number, row in enumerate(csv.DictReader(io.StringIO(text, newline="")), 1):
            yield f"{path}, row {number}", row
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise DataError(f"{path}, line {number}: no JSON (one object a line is expected)") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: no JSON object")
            yield f"{path}, line {number}", row


def _field(where: str, row: Mapping[str, Any], *names: str) -> str:
    for name in names:
        if row.get(name) not in (None, ""):
            return str(row[name]).strip()
    raise DataError(f"{where}: no {' or '.join(names)}")


def _named(text: str) -> str:
    """An id for a question without one; adding questions does not change it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _gpqa(path: Path, data: bytes) -> list[Question]:
    """The columns of gpqa_diamond.csv, or `question`, `options` and `answer` (a letter)."""
    found = []
    for where, row in _rows(path, data):
        text = _field(where, row, "Question", "question")
        if "options" in row:
            options, letter = [str(option) for option in row["options"]], _field(where, row, "answer")
            if letter not in LETTERS[: len(options)] or len(letter) != 1 or not 2 <= len(options) <= len(LETTERS):
                raise DataError(f"{where}: answer must be the letter of one of 2 to {len(LETTERS)} options")
            right = options.pop(LETTERS.index(letter))
        else:
            right = _field(where, row, "Correct Answer")
            options = [_field(where, row, f"Incorrect Answer {number}") for number in (1, 2, 3)]
        name = str(row.get("Record ID") or row.get("id") or _named(text))
        found.append(Question(name, (QuestionTurn(text),), options=(right, *options)))
    return found


BOXED = "Put the final answer, a single number, in \\boxed{}."


def _numbers(path: Path, data: bytes) -> list[Question]:
    """`question` or `problem`, and `answer`: a number, or GSM8K's solution that ends with `#### 42`."""
    found = []
    for where, row in _rows(path, data):
        text = _field(where, row, "question", "problem")
        answer = _field(where, row, "answer").rpartition("####")[2]
        value = number(re.sub(r"[^\d./,+-].*", "", answer.strip(), flags=re.DOTALL))
        if value is None:
            raise DataError(f"{where}: answer is no number: {answer[:50]!r}")
        found.append(Question(str(row.get("id") or _named(text)), (QuestionTurn(f"{text}\n\n{BOXED}", number=value),)))
    return found


def _own(path: Path, data: bytes) -> list[Question]:
    """Our own form, as in `sets/`: `{functions: {name: {description, parameters}}, questions: […]}`, or JSON Lines."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        return [_question(where, row, {}) for where, row in _rows(path, data)]
    content = yaml.safe_load(data)
    if not isinstance(content, dict) or not isinstance(content.get("questions"), list):
        raise DataError(f"{path}: no list of questions")
    rows = enumerate(content["questions"], 1)
    return [_question(f"{path}, question {at}", row, content.get("functions") or {}) for at, row in rows]


_TURN = {each.name for each in dataclasses.fields(QuestionTurn)} - {"choice", "among"}
_question_of = TypeAdapter(Question).validate_python


def _question(where: str, row: Any, functions: Mapping[str, Any]) -> Question:
    """A question of one turn has the turn's fields itself."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: no object with an id and a question")
    whole = {"turns": [{key: row[key] for key in row.keys() & _TURN}]}
    whole |= {key: value for key, value in row.items() if value is not None and ("turns" in row or key not in _TURN)}
    try:
        whole["tools"] = [_tool(tool, functions) for tool in row.get("tools") or ()]
        return _question_of(whole)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def _tool(tool: Any, functions: Mapping[str, Any]) -> dict[str, Any]:
    """A function by its name in the file, or a tool as the Responses API has it."""
    if isinstance(tool, str):
        if tool not in functions:
            raise ValueError(f"no function {tool!r} in the file")
        tool = {"type": "function", "name": tool, **functions[tool]}
    if not isinstance(tool, dict) or "type" not in tool:
        raise ValueError("a tool needs a type")
    if tool["type"] == "function":
        tool = {"parameters": {"type": "object", "properties": {}}, **tool}
        checked_schema(tool["parameters"])
        if not tool.get("name"):
            raise ValueError("no name")
    return dict(tool)


READERS: Mapping[str, tuple[Callable[[Path, bytes], list[Question]], int]] = {
    "gpqa": (_gpqa, 8),
    "aime25": (_numbers, 4),
    "gsm8k": (_numbers, 1),
    "smoke": (_own, 1),
    "toolcalls": (_own, 1),
    "harmony": (_own, 1),
    "citations": (_own, 1),
}
"""The reader of an eval's files, and its repeats of a question: for GPQA and AIME as in gpt_oss.evals."""
