"""What one caller may have of the python tool, told to the model where it is more.

A caller is an API key; of a tools service, the key of whoever uses it, however many users stand behind. Each server
counts what it does itself.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

_MINUTE = 60.0


def account(owner: str) -> str:
    """Who pays for what `owner` does: the part before the slash, where a caller says for whom of its users it asks."""
    return owner.partition("/")[0]


class QuotaError(ValueError):
    """A caller has all that it may have; the message is for the model."""


@dataclass
class Quotas:
    """Limits of each account; 0 is none. `containers` alive, `runs` a minute, `kept` bytes of files."""

    containers: int = 0
    runs: int = 0
    kept: int = 0
    _runs: dict[str, deque[float]] = field(default_factory=dict, repr=False)

    def count_run(self, owner: str) -> None:
        """Counts a call that is about to run. Raises QuotaError."""
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
            raise QuotaError(f"this caller may run {self.runs} python calls a minute; the next one in {wait} s")
        times.append(now)

    def check_kept(self, owner: str, held: int, size: int) -> None:
        """Whether `size` bytes more may be kept beside the `held` ones. Raises QuotaError."""
        if self.kept and held + size > self.kept:
            raise QuotaError(f"this caller may keep {self.kept} bytes of files and has {held}; this one has {size}")
