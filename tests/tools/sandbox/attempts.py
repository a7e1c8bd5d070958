"""What the escape suites share: a cage with small limits, what the host has, and how an attempt is made and judged."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_gptoss.tools.protocol import SessionOptions, ToolCall, ToolResult
from vllm_gptoss.tools.python import PythonOptions, PythonProvider

LAUNCHER = os.environ.get("GPTOSS_TEST_LAUNCHER", "namespaces")
SHOWS_TMP = LAUNCHER == "namespaces" and os.getuid() == 0  # bubblewrap shows nothing below /tmp
OPTIONS = PythonOptions(
    launcher=LAUNCHER,
    hidden_paths=(f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/pip",),
    timeout_s=20,
    memory_mib=384,
    scratch_mib=64,
    inodes=2048,
    processes=48,
    warm=1,
    max_conversations=4,
    preload=(),
)
# Given to every attempt: runs a function and prints `blocked` with the reason, or `ESCAPED` with what it got.
PRELUDE = """
import ctypes, errno, json, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def attempt(name, function, *args):
    try:
        got = function(*args)
    except OSError as error:
        print('blocked', name, errno.errorcode.get(error.errno))
    else:
        print('ESCAPED', name, repr(got)[:300])
def read(path):
    with open(path, 'rb') as file:
        return file.read(4096)
def open_fd(fd):
    return os.path.lexists(f'/proc/self/fd/{fd}')
def processes():
    alive = 0
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try: alive += open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'Z'
        except OSError: pass
    return alive
def write(path):
    with open(path, 'a') as file:
        file.write('x')
"""


@dataclass(frozen=True)
class Host:
    """Secrets that no program inside may read."""

    secret: str
    directory: Path
    model: Path
    shown: Path  # read-only for programs
    port: int
    pid: int
    abstract: str
    path_socket: str


async def run(provider: PythonProvider, code: str, conversation: str = "") -> ToolResult:
    session = await provider.open(conversation or secrets.token_hex(4), SessionOptions())
    return await session.call(ToolCall("call", "python", None, PRELUDE + code))


async def all_blocked(provider: PythonProvider, code: str, attempts: int) -> str:
    """Runs attempts, each of which must have been made and refused; returns what was printed."""
    result = await run(provider, code)
    lines = result.text.splitlines()
    assert "ESCAPED" not in result.text, result.text
    assert sum(line.startswith("blocked ") for line in lines) == attempts, result.text
    return result.text


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
