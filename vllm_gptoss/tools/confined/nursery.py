"""The server's side of the fork server: started when first needed, started again when it is gone."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_gptoss.tools.sandbox import wire
from vllm_gptoss.tools.sandbox.launcher import ENVIRONMENT

logger = logging.getLogger(__name__)

_ROOT = str(Path(__file__).parents[3])
# The server's own path: `-I` ignores PYTHONPATH and the working directory, where packages may lie too.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:];"
    " from vllm_gptoss.tools.confined import worker; worker.main(int(sys.argv[1]))"
)


class Nursery:
    """One fork server, for every event loop of this process. Nothing here waits."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._first = {"modules": list(modules)}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        atexit.register(self.close)

    def knows(self, modules: Sequence[str]) -> bool:
        """Whether its workers have the jobs of all these."""
        return set(modules) <= set(self._first["modules"])

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def gone(self) -> bool:
        """Whether it was started and has ended: then its workers are ending, also those that have connected."""
        return self._process is not None and self._process.poll() is not None

    def spawn(self) -> socket.socket:
        """Our end of a new worker's socket. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            self._post(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def _post(self, theirs: socket.socket) -> None:
        if self.gone:
            self._lost()
        for last in (False, True):
            control = self._control or self._start()
            try:
                wire.send(control, {"op": "spawn"}, [theirs.fileno()])
                return
            except OSError:
                self._lost()
                if last:
                    raise

    def _start(self) -> socket.socket:
        ours, theirs = wire.pair()
        with theirs:
            # Not asyncio's: it belongs to no event loop. Popen returns once the program runs, 1 or 2 ms.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, str(theirs.fileno()), *filter(os.path.isabs, sys.path), _ROOT],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        ours.setblocking(False)
        wire.send(ours, self._first)
        self._control = ours
        return ours

    def _lost(self) -> None:
        logger.warning("confined: the fork server of the workers died; starting another")
        self.close()

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._process = None
