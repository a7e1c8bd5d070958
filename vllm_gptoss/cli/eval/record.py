"""A run's folder: `run.json` (settings), `samples.jsonl` (one line a sample, when it ends), `summary.json`. The same
command sends missing and lost samples. Of two lines of one sample the later counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_gptoss.cli.eval.judge import Outcome
from vllm_gptoss.cli.eval.questions import EvalError

log = logging.getLogger(__name__)

FREE = ("base_url", "date", "published", "version")
"""Settings that may differ from one command to the next."""

SECRET = re.compile(r"^(authorization|headers|cookies?)$|api_?key|secret|password|credential|token$", re.IGNORECASE)

Key = tuple[str, str, str, int]
"""(eval, effort or "", question id, repeat)"""


@contextlib.contextmanager
def recording(folder: Path, head: Mapping[str, Any]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields the function that stores one line; the line is in the file when the function returns.

    Raises:
        EvalError: another process writes there, or the folder holds a run with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "samples.jsonl").open("a", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvalError(f"another process writes to {folder}: name another --out") from None
        if not file.tell():
            put(folder / "run.json", head)
        if differ := differences(read_head(folder), head):
            told = "; ".join(f"{key} was {before!r} and is {after!r}" for key, (before, after) in differ.items())
            raise EvalError(f"{folder} holds a run with other settings: {told}. Name another --out")
        _drop_half_a_line(folder / "samples.jsonl")

        def add(row: Mapping[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        yield add


def _drop_half_a_line(path: Path) -> None:
    """Removes the line that a kill has left in its middle; its sample is sent again."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (16 << 20)))  # lines are far shorter
        end = file.read()
        file.truncate(size - len(end) + end.rfind(b"\n") + 1)


def without_secrets(value: Any) -> Any:
    """Decoded JSON with `***` in place of values of fields that are named like secrets."""
    if isinstance(value, dict):
        return {name: "***" if SECRET.search(name) else without_secrets(one) for name, one in value.items()}
    return [without_secrets(one) for one in value] if isinstance(value, list) else value


def put(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all."""
    made = path.with_name(path.name + ".new")
    made.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    made.replace(path)


def read_head(folder: Path) -> dict[str, Any]:
    """The settings of a run."""
    try:
        return dict(json.loads((folder / "run.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise EvalError(f"{folder} is no folder of a run: no run.json that can be read") from None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, without `FREE`."""
    keys = sorted({*before, *after} - {*FREE})
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def kept(folder: Path) -> dict[Key, dict[str, Any]]:
    """Outcome, tokens and seconds of the last line of every sample; invalid lines are counted and logged."""
    found, bad = {}, 0
    try:
        with (folder / "samples.jsonl").open(encoding="utf-8", errors="replace") as lines:
            for line in filter(str.strip, lines):
                try:
                    row = json.loads(line)
                    key = (str(row["eval"]), str(row["effort"]), str(row["id"]), int(row["repeat"]))
                    figures = {"outcome": Outcome(row["outcome"]), "tokens": row["tokens"], "seconds": row["seconds"]}
                    found[key] = figures
                except (ValueError, KeyError, TypeError, RecursionError):
                    bad += 1
    except OSError as error:
        raise EvalError(f"{folder}: {error.strerror}") from None
    if bad:
        log.warning("%s: %d lines of samples.jsonl are invalid, and are left out", folder, bad)
    return found
