"""Ends an engine when the server that started it has ended, also by SIGKILL.

vLLM's workers detect the end of their engine (a pipe reads end of file), but the engine does not detect the end of its
server: it would keep the GPU's memory, and the next start would fail.

Only children of `multiprocessing`, spawned or forked, watch their parent: vLLM starts engines and workers that way.
Other children (the tools' fork servers, compilers) end by their own means.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Between asking this process to end and killing it."""

_OF_GPT_OSS = ("vllm_gptoss.engine.experts.config", "vllm_gptoss.engine.model.gpt_oss")
"""Modules that are loaded only where gpt-oss is: engines of other models are left to vLLM."""

_watched_by = 0
_follows_forks = False


def watch() -> None:
    """Watches the process that started this one, if it is `multiprocessing`'s child, and so in every child that
    `multiprocessing` forks from it: vLLM loads plugins once, and a forked engine has them already. Idempotent."""
    global _watched_by, _follows_forks
    if not _follows_forks:
        _follows_forks = True
        # Not os.register_at_fork, which every fork runs, and before `parent_process` is known.
        multiprocessing.util.register_after_fork(watch, lambda watch: watch())
    parent = multiprocessing.parent_process()
    if parent is None or _watched_by == os.getpid():
        return
    _watched_by = os.getpid()
    threading.Thread(target=_wait, args=(parent,), name="gptoss-parent-watch", daemon=True).start()


def _wait(parent: BaseProcess) -> None:
    _until_gone(parent)
    if not any(name in sys.modules for name in _OF_GPT_OSS):
        return
    with contextlib.suppress(Exception):  # standard error may have ended with the parent
        logger.error("The server (process %s) is gone; its process %d ends too.", parent.pid, os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _until_gone(parent: BaseProcess) -> None:
    """Blocks until the parent process has ended.

    The sentinel does not suffice: children forked later also hold the other end of its pipe open.
    """
    is_direct = multiprocessing.get_start_method() != "forkserver"
    signs = [parent.sentinel]
    if is_direct and parent.pid is not None:
        with contextlib.suppress(OSError, AttributeError):  # gone, or a kernel before Linux 5.3, or no Linux
            signs.append(os.pidfd_open(parent.pid))
        # Checked after opening: the process id may have been reused by then.
        if os.getppid() != parent.pid:
            return
    multiprocessing.connection.wait(signs)
