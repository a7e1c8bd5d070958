"""A seccomp filter assembled by hand: an allowlist of system calls, some checked by their arguments.

Classic BPF over `struct seccomp_data` {int nr; u32 arch; u64 ip; u64 args[6]}. Source: seccomp(2), Linux'
Documentation/userspace-api/seccomp_filter.rst. Arguments are compared by their low 32 bits: every checked one is
an int, and the kernel itself ignores the upper half of those.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from . import linux, syscalls

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH, _ARGS = 0, 4, 16
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
MACHINES = frozenset(_COLUMN)
_X32_BIT = 0x40000000
_CLONE_THREAD, _CLONE_FILES = 0x00010000, 0x00000400

_NEW_NAMESPACE = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWCGROUP
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUSER
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
)
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # both push keystrokes into a terminal
# Who may trace us, the memory map's layout, seccomp's own strictness, core scheduling: nothing payloads need.
_PRCTL_DENIED = (35, 62, 0x59616D61, linux.PR_SET_SECCOMP, linux.PR_SET_SECUREBITS)
_PERSONALITY_QUERY = 0xFFFFFFFF
_F_OWNER_EX = (15, 16)  # F_SETOWN_EX, F_GETOWN_EX
_FCNTL_ALLOWED = (
    *(fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL, fcntl.F_DUPFD_CLOEXEC),
    *(fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW),
    *(fcntl.F_GETOWN, fcntl.F_SETOWN, fcntl.F_GETSIG, fcntl.F_SETSIG, *_F_OWNER_EX, fcntl.F_GETPIPE_SZ),
)
"""Common operations on a descriptor, and the locks that SQLite takes. Not allowed, see fcntl(2): leases and directory
notifications, because conversations share them; resized pipes, because the limit on their pages is per user; locks of
an open file description, because the supervisor counts descriptors and such a lock outlives one; write hints, because
they are stored with a shared file."""
# Pid 1 runs as the same user, and the kernel's checks would let the payload starve the watchdog or cripple it.
_SUPERVISOR = 1

Instruction = tuple[int, int, int, int]
_INSTRUCTION = "=HBBI"


@dataclass(frozen=True, slots=True)
class Profile:
    """Restrictions of a filter in addition to the tables of `syscalls`."""

    without: frozenset[str] = frozenset()
    checks: Mapping[str, list[Instruction]] = field(default_factory=dict)  # replace a table's check of a call
    only: frozenset[str] | None = None  # nothing beyond these names, of what the tables allow

    def leaves(self, name: str) -> bool:
        return name not in self.without and (self.only is None or name in self.only)


def _refuse(code: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _only(argument: int, allowed: Sequence[int], code: int) -> list[Instruction]:
    """Allows the call if the argument is one of `allowed`."""
    tests: list[Instruction] = [(_JUMP_EQ, len(allowed) - i, 0, value) for i, value in enumerate(allowed)]
    return [(_LOAD, 0, 0, _ARGS + 8 * argument), *tests, _refuse(code), (_RETURN, 0, 0, _ALLOW)]


def _except(argument: int, denied: Sequence[int], code: int) -> list[Instruction]:
    """Allows the call unless the argument is one of `denied`."""
    tests: list[Instruction] = [(_JUMP_EQ, len(denied) - i, 0, value) for i, value in enumerate(denied)]
    return [(_LOAD, 0, 0, _ARGS + 8 * argument), *tests, (_RETURN, 0, 0, _ALLOW), _refuse(code)]


def _prlimit() -> list[Instruction]:
    """Refuses limits of the supervisor's process, and a new core limit: see `cage`."""
    low, high = _ARGS + 8 * 2, _ARGS + 8 * 2 + 4
    return [
        (_LOAD, 0, 0, _ARGS),
        (_JUMP_EQ, 7, 0, _SUPERVISOR),
        (_LOAD, 0, 0, _ARGS + 8),
        (_JUMP_EQ, 0, 4, resource.RLIMIT_CORE),
        (_LOAD, 0, 0, low),  # the new limit's address; without one the call only reads
        (_JUMP_EQ, 0, 3, 0),
        (_LOAD, 0, 0, high),
        (_JUMP_EQ, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        _refuse(errno.EPERM),
    ]


def _prctl() -> list[Instruction]:
    """The supervisor must read every process, and could not read one that is not dumpable: ptrace(2)."""
    denied: list[Instruction] = [
        (_JUMP_EQ, len(_PRCTL_DENIED) - i + 3, 0, value) for i, value in enumerate(_PRCTL_DENIED)
    ]
    return [
        (_LOAD, 0, 0, _ARGS),
        *denied,
        (_JUMP_EQ, 0, 2, linux.PR_SET_DUMPABLE),
        (_LOAD, 0, 0, _ARGS + 8),
        (_JUMP_EQ, 0, 1, 1),
        (_RETURN, 0, 0, _ALLOW),
        _refuse(errno.EPERM),
    ]


def _setpriority() -> list[Instruction]:
    """For a process or group other than the supervisor's, not for all of the user's."""
    return [
        (_LOAD, 0, 0, _ARGS),
        (_JUMP_EQ, 3, 0, os.PRIO_USER),
        (_LOAD, 0, 0, _ARGS + 8),
        (_JUMP_EQ, 1, 0, _SUPERVISOR),
        (_RETURN, 0, 0, _ALLOW),
        _refuse(errno.EPERM),
    ]


def _not_shared(allowed: Sequence[Instruction] = ((_RETURN, 0, 0, _ALLOW),)) -> list[Instruction]:
    """No anonymous memory that is shared; the rest as in `allowed`.

    The kernel puts it into an internal tmpfs, as no process' memory once it is dropped from the page tables and no
    file's of the cage: 700 MiB were held under a limit of 128. tmpfs(5): only a cgroup counts it.
    """
    return [
        (_LOAD, 0, 0, _ARGS + 8 * 3),
        (_JUMP_SET, 0, 2, mmap.MAP_ANONYMOUS),
        (_JUMP_SET, 0, 1, mmap.MAP_SHARED),
        _refuse(errno.EPERM),
        *allowed,
    ]


_NOT_EXECUTABLE: list[Instruction] = [
    (_LOAD, 0, 0, _ARGS + 8 * 2),
    (_JUMP_SET, 0, 1, mmap.PROT_EXEC),
    _refuse(errno.EPERM),
    (_RETURN, 0, 0, _ALLOW),
]
_NOT_EXECUTABLE_NOR_SHARED = _not_shared(_NOT_EXECUTABLE)
CAGE = Profile()
UNCOUNTED = {"mmap": _not_shared()}
"""Checks that a cage adds if no cgroup counts its memory."""


def _clone(*, process: bool) -> list[Instruction]:
    """Refuses new namespaces, and threads with their own descriptors, which are counted per process.

    `process`: allows forks.
    """
    return [
        (_LOAD, 0, 0, _ARGS),
        (_JUMP_SET, 3, 0, _NEW_NAMESPACE),
        (_JUMP_SET, 0, 1 if process else 2, _CLONE_THREAD),
        (_JUMP_SET, 0, 1, _CLONE_FILES),
        (_RETURN, 0, 0, _ALLOW),
        _refuse(errno.EPERM),
    ]


def _checks(allow_network: bool) -> dict[str, list[Instruction]]:
    families = [int(socket.AF_UNIX)]
    if allow_network:  # netlink: getaddrinfo lists the interfaces
        families += [int(socket.AF_INET), int(socket.AF_INET6), int(socket.AF_NETLINK)]
    return {
        "clone": _clone(process=True),
        "fcntl": _only(1, _FCNTL_ALLOWED, errno.EINVAL),
        "ioctl": _except(1, (_TIOCSTI, _TIOCLINUX), errno.EPERM),
        "personality": _only(0, (0, _PERSONALITY_QUERY), errno.EPERM),
        "prctl": _prctl(),
        "prlimit64": _prlimit(),
        "sched_setattr": _except(0, (_SUPERVISOR,), errno.EPERM),
        "sched_setparam": _except(0, (_SUPERVISOR,), errno.EPERM),
        "sched_setscheduler": _except(0, (_SUPERVISOR,), errno.EPERM),
        "setpriority": _setpriority(),
        "setrlimit": _except(0, (resource.RLIMIT_CORE,), errno.EPERM),
        "socket": _only(0, families, errno.EAFNOSUPPORT),
        "socketpair": _only(0, (int(socket.AF_UNIX),), errno.EAFNOSUPPORT),
    }


COMPUTE = Profile(
    only=frozenset(syscalls.COMPUTE), checks={"mmap": _NOT_EXECUTABLE_NOR_SHARED, "mprotect": _NOT_EXECUTABLE}
)
"""For a process with one open socket: read it, write it, compute, end. No file, process, socket or signal."""


def runtime(pid: int) -> Profile:
    """For process `pid`, which runs a WebAssembly program and has loaded all that it needs: no program, no process, no
    socket, no new machine code, nothing about another process."""
    return Profile(
        without=frozenset(syscalls.OF_OTHERS),
        checks={
            "clone": _clone(process=False),
            "mmap": _NOT_EXECUTABLE_NOR_SHARED,
            "mprotect": _NOT_EXECUTABLE,
            "prlimit64": _only(0, (0,), errno.EPERM),
            "tgkill": _only(0, (pid,), errno.EPERM),
        },
    )


def build_filter(machine: str, *, allow_network: bool = False, profile: Profile = CAGE) -> list[Instruction]:
    """The filter's instructions for `machine` (x86_64 or aarch64); raises KeyError for another."""
    column = _COLUMN[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),  # 32-bit calls would be other numbers altogether
        (_LOAD, 0, 0, _NR),
    ]
    if machine == "x86_64":
        program += [(_JUMP_GE, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL_PROCESS)]
    checks = {**_checks(allow_network), **profile.checks}
    for name, numbers in syscalls.ALLOWED.items():
        if (number := numbers[column]) is not None and name not in checks and profile.leaves(name):
            program += [(_JUMP_EQ, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for name, body in checks.items():
        number = (syscalls.CHECKED | syscalls.ALLOWED)[name][column]
        if number is not None and profile.leaves(name):
            program += [(_JUMP_EQ, 0, len(body), number), *body]
    for numbers in syscalls.MISSING.values():
        if (number := numbers[column]) is not None:
            program += [(_JUMP_EQ, 0, 1, number), _refuse(errno.ENOSYS)]
    program += [(_JUMP_GE, 0, 1, syscalls.LAST + 1), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]
    return program


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def assembled(*, allow_network: bool = False, profile: Profile = CAGE) -> bytes:
    """The filter for this machine, as the kernel takes it. Takes some milliseconds."""
    program = build_filter(linux.MACHINE, allow_network=allow_network, profile=profile)
    return b"".join(struct.pack(_INSTRUCTION, *one) for one in program)


def install(program: bytes) -> None:
    """Confines this thread and all its descendants, for good. Needs no_new_privs (or CAP_SYS_ADMIN)."""
    code = ctypes.create_string_buffer(program)
    request = _Program(len(program) // struct.calcsize(_INSTRUCTION), ctypes.addressof(code))
    mode_filter = 2
    linux.prctl(linux.PR_SET_SECCOMP, mode_filter, ctypes.addressof(request), what="PR_SET_SECCOMP")
