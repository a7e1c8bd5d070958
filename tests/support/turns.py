"""Tests that judge by the clock run while no other test does: workers share the processors."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def alone_in(file: Path) -> frozenset[str]:
    """The functions of tests in `file` with the mark `alone`. The process that distributes tests imports none."""
    decorated = r"^@pytest\.mark\.alone\n(?:[@ )\]].*\n)*(?:async )?def (\w+)"
    return frozenset(re.findall(decorated, file.read_text("utf-8"), re.MULTILINE))


@contextlib.contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Holds the machine together with others, or `alone`. All workers of a run give the same folder.

    Who waits to be alone holds the gate, so that those who share cannot pass one after the other for ever.
    """
    with (folder / "gate").open("w") as gate, (folder / "machine").open("w") as machine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
