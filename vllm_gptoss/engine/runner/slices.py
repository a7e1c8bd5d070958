"""Short time slices for the engine's threads, so that they run as soon as they wake.

The engine's thread has a millisecond to plan the next step of one token. Linux lets a running thread finish its slice,
which is 3 ms on most machines. From Linux 6.12 on, a thread with a shorter slice preempts threads with longer ones
(EEVDF, `PREEMPT_SHORT` of kernel/sched/features.h); its share of the core is unchanged. This needs no privilege. Older
kernels ignore the setting.
"""

from __future__ import annotations

import ctypes
import os
import platform

SLICE_NS = 100_000
"""The shortest that Linux gives (`__setparam_fair` of kernel/sched/fair.c). docs/host.md has measurements."""
CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of sched_setattr and sched_getattr."""


class Attributes(ctypes.Structure):
    """`struct sched_attr`, sched_setattr(2)."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def ask_short() -> str | None:
    """Sets short slices for all threads of this process and their children. Returns the reason of a failure, or None.

    Threads with a scheduling policy other than the default (`chrt`, SCHED_IDLE) keep it.
    """
    numbers = CALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        return f"not known for {platform.system()} on {platform.machine()}"
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            _ask(thread, *numbers)
        except ProcessLookupError:
            continue  # it has ended
        except OSError as error:
            return str(error)
    return None


def slice_of(thread: int) -> int:
    """A thread's slice in ns, 0 if the kernel does not report it.

    Raises:
        OSError: it has ended, or the call is not allowed.
    """
    return int(_attributes(thread, CALLS[platform.machine()][1]).runtime)


def _ask(thread: int, set_number: int, get_number: int) -> None:
    attributes = _attributes(thread, get_number)
    if attributes.policy == os.SCHED_OTHER:
        attributes.runtime = SLICE_NS
        _call(set_number, thread, ctypes.byref(attributes), 0)


def _attributes(thread: int, number: int) -> Attributes:
    attributes = Attributes()
    _call(number, thread, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    return attributes


def _call(number: int, *arguments: object) -> None:
    if ctypes.CDLL(None, use_errno=True).syscall(number, *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
