"""Where questions come from: the sets bundled in `sets/`, and files in the forms their publishers use.

GPQA and AIME may not be bundled; docs/eval.md has their sources.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from vllm_gptoss.cli.eval.questions import LETTERS, Expected, Question, QuestionSet, Turn

BUNDLED = Path(__file__).with_name("sets")
MAX_FILE = 256 << 20
MAX_QUESTIONS = 1_000_000
MAX_NUMBER = 100
"""Characters of a number that is compared."""


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
        found.append(Question(name, (Turn(text),), options=(right, *options)))
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
        found.append(Question(str(row.get("id") or _named(text)), (Turn(f"{text}\n\n{BOXED}", number=value),)))
    return found


def number(text: str) -> Fraction | None:
    """`1,024`, `-3.50`, `7/2`; nothing where it is none, or too long to be one."""
    text = re.sub(r"[,\s_]", "", text).strip("$.")
    if len(text) > MAX_NUMBER or not re.fullmatch(r"[+-]?(\d+/\d+|\d+(\.\d*)?|\.\d+)", text, re.ASCII):
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None


_TURN = {"user", "says", "equals", "number", "schema", "reasons", "citations", "calls", "ends_with_calls"}
_QUESTION = {"id", "turns", "instructions", "tools", "request", *_TURN}


def _own(path: Path, data: bytes) -> list[Question]:
    """Our own form, as in `sets/`: `{functions: {name: {description, parameters}}, questions: […]}`, or JSON Lines."""
    if path.suffix.lower() in (".yaml", ".yml"):
        content = yaml.safe_load(data)
        if not isinstance(content, dict) or not isinstance(content.get("questions"), list):
            raise DataError(f"{path}: no list of questions")
        functions = content.get("functions") or {}
        rows = ((f"{path}, question {number}", row) for number, row in enumerate(content["questions"], 1))
    else:
        functions, rows = {}, _rows(path, data)  # type: ignore[assignment]
    return [_question(where, row, functions) for where, row in rows]


def _question(where: str, row: Mapping[str, Any], functions: Mapping[str, Any]) -> Question:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: no object with an id and a question")
    if unknown := set(row) - _QUESTION:
        raise DataError(f"{where}: unknown fields {sorted(unknown)}")
    turns = row.get("turns") or [{key: row[key] for key in _TURN & set(row)}]
    tools = tuple(_tool(where, tool, functions) for tool in row.get("tools") or ())
    made = tuple(_turn(where, turn) for turn in turns)
    request = row.get("request") or {}
    return Question(_field(where, row, "id"), made, str(row.get("instructions") or ""), tools, request=request)


def _turn(where: str, row: Mapping[str, Any]) -> Turn:
    if unknown := set(row) - _TURN:
        raise DataError(f"{where}: unknown fields {sorted(unknown)}")
    says, wanted = row.get("says") or (), row.get("number")
    value = None if wanted is None else number(str(wanted))
    if wanted is not None and value is None:
        raise DataError(f"{where}: {wanted!r} is no number")
    try:
        calls = tuple(Expected(call["name"], call.get("arguments") or {}, str(call.get("result", "")))
                      for call in row.get("calls") or ())  # fmt: skip
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{where}: calls are objects with name, arguments and result") from None
    return Turn(
        _field(where, row, "user"),
        (says,) if isinstance(says, str) else tuple(str(part) for part in says),
        row.get("equals"),
        value,
        schema=_schema(where, row.get("schema")),
        reasons=bool(row.get("reasons")),
        citations=int(row.get("citations") or 0),
        calls=calls,
        ends_with_calls=bool(row.get("ends_with_calls")),
    )


def _schema(where: str, schema: Any) -> Any:
    if schema is not None:
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise DataError(f"{where}: {error.message}") from None
    return schema


def _tool(where: str, tool: Any, functions: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function by its name in the file, or a tool as the Responses API has it."""
    if isinstance(tool, str):
        if tool not in functions:
            raise DataError(f"{where}: no function {tool!r} in the file")
        tool = {"type": "function", "name": tool, **functions[tool]}
    if not isinstance(tool, dict) or "type" not in tool:
        raise DataError(f"{where}: a tool needs a type")
    if tool["type"] == "function":
        tool = {"parameters": {"type": "object", "properties": {}}, **tool}
        _schema(where, tool["parameters"])
        _field(where, tool, "name")
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
