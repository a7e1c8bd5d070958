"""A run's folder: `run.json` (settings), `samples.jsonl` (one line a sample, when it ends), `summary.json`. The same
command continues a stopped run: it sends missing and lost samples. A line that a kill truncated is dropped with a
message, and its sample sent again. Of two lines of one sample the later counts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from vllm_gptoss.cli.eval.answer import LOST, Fate

log = logging.getLogger(__name__)

MAX_TEXT = 65_536
"""Characters of an answer, and of its reasoning, that a line keeps."""

MAX_LINE = 16 << 20
"""Characters of a line that is read. Lines are written far below it."""

Key = tuple[str, str, str, int]
"""(eval, effort or "", question id, repeat)"""


class RecordError(ValueError):
    """A folder of another run, or of no run; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What the figures need of one line."""

    fate: Fate
    input: int = 0
    output: int = 0
    reasoning: int = 0
    seconds: float = 0.0
    first_s: float | None = None
    tries: int = 1
    parts: tuple[tuple[str, int, int], ...] = ()


def key_of(row: Mapping[str, Any]) -> Key:
    return (str(row["eval"]), str(row["effort"] or ""), str(row["id"]), int(row["repeat"]))


def put(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all."""
    made = path.with_name(path.name + ".new")
    made.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    made.replace(path)


class Recorder:
    """The folder of a run that is going on: `with Recorder(folder, head) as recorder`.

    Raises:
        RecordError: another process writes there, or the folder holds a run with other settings.
    """

    FREE = ("date", "finished", "version", "host")
    """Fields of the head that may differ from one command to the next."""

    def __init__(self, folder: Path, head: Mapping[str, Any]) -> None:
        self.folder = folder
        self.head = dict(head)
        self._file: TextIO | None = None

    def __enter__(self) -> Recorder:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "samples.jsonl"
        if path.exists() and not path.is_file():
            raise RecordError(f"{path} is no file: name another --out")
        self._file = path.open("a", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._match()
            _mend(path)
        except BlockingIOError:
            self._file.close()
            raise RecordError(f"another process writes to {self.folder}: name another --out") from None
        except RecordError:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def _match(self) -> None:
        path = self.folder / "run.json"
        if not path.exists():
            if (self.folder / "samples.jsonl").stat().st_size:
                raise RecordError(f"{self.folder} has samples, but no run.json: name another --out")
            put(path, self.head)
            return
        before = read_head(self.folder)
        differ = [k for k in {*before, *self.head} - {*self.FREE} if before.get(k) != self.head.get(k)]
        if differ:
            told = "; ".join(f"{k} was {before.get(k)!r} and is {self.head.get(k)!r}" for k in sorted(differ))
            raise RecordError(f"{self.folder} holds a run with other settings: {told}. Name another --out")
        self.head["date"] = before.get("date", self.head.get("date"))

    def add(self, row: Mapping[str, Any]) -> None:
        """One line, in the file when this returns: a kill of this process loses nothing that was added."""
        assert self._file is not None
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()


def _mend(path: Path) -> None:
    """Ends the file with a whole line."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        place = size
        while place > 0:
            step = min(place, 1 << 16)
            file.seek(place - step)
            end = file.read(step).rfind(b"\n")
            if end >= 0:
                place = place - step + end + 1
                break
            place -= step
        if place < size:
            log.warning("%s ends in half a line, of a run that was killed: dropped, its sample is sent again", path)
            file.truncate(place)


def read_head(folder: Path) -> dict[str, Any]:
    try:
        head = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return dict(head)
    except (OSError, ValueError, TypeError):
        raise RecordError(f"{folder} is no folder of a run: no run.json that can be read") from None


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """All lines; invalid ones are counted and reported."""
    bad = 0
    path = folder / "samples.jsonl"
    if path.exists() and not path.is_file():
        raise RecordError(f"{path} is no file")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(MAX_LINE):
                try:
                    row = json.loads(line)
                    Fate(row["fate"])
                    key_of(row)
                    yield row
                except (ValueError, KeyError, TypeError, RecursionError):
                    bad += 1
    except OSError as error:
        raise RecordError(f"{folder}: {error.strerror}") from None
    if bad:
        log.warning("%s: %d lines of samples.jsonl are none, and are left out", folder, bad)


def kept(folder: Path) -> dict[Key, Kept]:
    """The last line of every sample, without its text: memory does not grow with the answers."""
    found: dict[Key, Kept] = {}
    for row in rows(folder):
        usage = row.get("usage") or {}
        tokens = [int(usage.get(name) or 0) for name in ("input", "output", "reasoning")]
        found[key_of(row)] = Kept(
            fate=Fate(row["fate"]),
            input=tokens[0],
            output=tokens[1],
            reasoning=tokens[2],
            seconds=float(row.get("seconds") or 0),
            first_s=row.get("first_s"),
            tries=int(row.get("tries") or 1),
            parts=tuple((str(name), int(good), int(of)) for name, (good, of) in (row.get("parts") or {}).items()),
        )
    return found


def done(folder: Path) -> set[Key]:
    """Samples that are not sent again."""
    return {key for key, one in kept(folder).items() if one.fate not in LOST}
