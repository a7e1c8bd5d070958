"""The soak's own eyes: growth, what is left behind, and a median of nothing."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.waiting import soon
from tests.support.watched import Watch, median


def test_a_process_that_is_left_behind_is_seen_until_it_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    watch = Watch({"this": os.getpid, "down": lambda: None}, lambda: 3)
    try:
        soon(lambda: (watch.look(), child.pid in watch.started)[1])
        assert child.pid in watch.left()
        (sample, *_) = watch.of("this")
        assert sample.resident > 1 << 20
        assert sample.descriptors
        assert sample.children
        assert not watch.of("down")
    finally:
        child.kill()
        child.wait()
    assert child.pid not in watch.left()
    assert median(watch.connections_between(0, 1e9)) == 3
    assert median([]) == 0
