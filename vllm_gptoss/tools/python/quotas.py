"""Limits of the python tool for each caller. The model reads the refusals.

A caller is an API key; of a tools service, a key of the service, with all its users. Each server counts on its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

_MINUTE = 60.0


def account(owner: str) -> str:
    """The account of `owner`: the part before the slash, which separates a caller from its user."""
    return owner.partition("/")[0]


class PythonQuotaError(ValueError):
    """A caller has all that it may have; the message is for the model."""


@dataclass
class PythonQuotas:
    """Limits of each account: living containers, runs a minute, bytes of stored files. 0 means no limit."""

    containers: int = 0
    runs: int = 0
    kept: int = 0
    _runs: dict[str, deque[float]] = field(default_factory=dict, repr=False)

    def count_run(self, owner: str) -> None:
        """Counts a call that is about to run. Raises PythonQuotaError."""
        if not self.runs:
            return
        now, who = time.monotonic(), account(owner)
        for name in [name for name, times in self._runs.items() if not times or now - times[-1] > _MINUTE]:
            del self._runs[name]
        times = self._runs.setdefault(who, deque())
        while times and now - times[0] > _MINUTE:
            times.popleft()
        if len(times) >= self.runs:
            wait = math.ceil(_MINUTE - (now - times[0]))
            raise PythonQuotaError(f"this caller may run {self.runs} python calls a minute; the next one in {wait} s")
        times.append(now)

    def check_kept(self, owner: str, held: int, size: int) -> None:
        """Whether `size` bytes more may be stored in addition to the `held` ones. Raises PythonQuotaError."""
        if self.kept and held + size > self.kept:
            raise PythonQuotaError(
                f"this caller may keep {self.kept} bytes of files and has {held}; this one has {size}"
            )
