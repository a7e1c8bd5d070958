"""A run's folder: `run.json` (settings), `samples.jsonl` (one line a sample, when it ends), `summary.json`. The same
command continues a stopped run: it sends missing and lost samples. A line that a kill truncated is left out with a
message, and its sample sent again. Of two lines of one sample the later counts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from vllm_gptoss.cli.eval.apis import LOST, Fate

log = logging.getLogger(__name__)

MAX_LINE = 16 << 20
"""Characters of a line that is read. Lines are written far below it."""

FIGURES = ("usage", "seconds", "first_s", "tries", "parts")
"""Fields of a line that the figures need: memory does not grow with the answers."""

Key = tuple[str, str, str, int]
"""(eval, effort or "", question id, repeat)"""


class RecordError(ValueError):
    """A folder of another run, or of no run; the message has the remedy."""


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

    def __enter__(self) -> Recorder:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "samples.jsonl"
        if path.exists() and not path.is_file():
            raise RecordError(f"{path} is no file: name another --out")
        self._file: TextIO = path.open("a", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._match()
        except BlockingIOError:
            self._file.close()
            raise RecordError(f"another process writes to {self.folder}: name another --out") from None
        except RecordError:
            self._file.close()
            raise
        _drop_half_a_line(path)
        return self

    def __exit__(self, *_: object) -> None:
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

    def add(self, row: Mapping[str, Any]) -> None:
        """One line, in the file when this returns: a kill of this process loses nothing that was added."""
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()


def _drop_half_a_line(path: Path) -> None:
    """Ends the file with a whole line."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LINE))
        end = file.read()
        if half := len(end) - end.rfind(b"\n") - 1:
            log.warning("%s ends in half a line, of a run that was killed: dropped, its sample is sent again", path)
            file.truncate(size - half)


def read_head(folder: Path) -> dict[str, Any]:
    """The settings of a run."""
    try:
        return dict(json.loads((folder / "run.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise RecordError(f"{folder} is no folder of a run: no run.json that can be read") from None


def rows(folder: Path) -> Iterator[tuple[Key, dict[str, Any]]]:
    """All lines with their keys; invalid ones are counted and reported."""
    bad = 0
    try:
        with (folder / "samples.jsonl").open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(MAX_LINE):
                try:
                    row = json.loads(line)
                    row["fate"] = Fate(row["fate"])
                    key = (str(row["eval"]), str(row["effort"] or ""), str(row["id"]), int(row["repeat"]))
                except (ValueError, KeyError, TypeError, RecursionError):
                    bad += 1
                else:
                    yield key, row
    except OSError as error:
        raise RecordError(f"{folder}: {error.strerror}") from None
    if bad:
        log.warning("%s: %d lines of samples.jsonl are none, and are left out", folder, bad)


def kept(folder: Path) -> dict[Key, dict[str, Any]]:
    """The figures and the fate of the last line of every sample."""
    return {key: {name: row[name] for name in ("fate", *FIGURES) if row.get(name)} for key, row in rows(folder)}


def done(folder: Path) -> set[Key]:
    """Samples that are not sent again."""
    return {key for key, one in kept(folder).items() if one["fate"] not in LOST}
