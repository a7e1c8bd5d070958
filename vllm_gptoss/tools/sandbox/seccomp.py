"""A seccomp filter assembled by hand: an allowlist of system calls, some checked by their arguments.

Classic BPF over `struct seccomp_data` {int nr; u32 arch; u64 ip; u64 args[6]}. Source: seccomp(2), Linux'
Documentation/userspace-api/seccomp_filter.rst. Arguments are compared by their low 32 bits: every checked one is
an int, and the kernel itself ignores the upper half of those.
"""

from __future__ import annotations

import ctypes
import errno
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
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x00010000

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
# Pid 1 runs as the same user, and the kernel's checks would let the payload starve the watchdog or cripple it.
_SUPERVISOR = 1

Instruction = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Profile:
    """What a filter refuses beyond the tables of `syscalls`."""

    without: frozenset[str] = frozenset()
    checks: Mapping[str, list[Instruction]] = field(default_factory=dict)  # instead of a table's own word on a call


CAGE = Profile()


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
    """Not for the supervisor, and no new core limit: see `cage`."""
    low, high = _ARGS + 8 * 2, _ARGS + 8 * 2 + 4
    return [
        (_LOAD, 0, 0, _ARGS),
        (_JUMP_EQ, 7, 0, _SUPERVISOR),
        (_LOAD, 0, 0, _ARGS + 8),
        (_JUMP_EQ, 0, 4, resource.RLIMIT_CORE),
        (_LOAD, 0, 0, low),  # the new limit's address; without one the call only asks
        (_JUMP_EQ, 0, 3, 0),
        (_LOAD, 0, 0, high),
        (_JUMP_EQ, 0, 1, 0),
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


def _checks(allow_network: bool) -> dict[str, list[Instruction]]:
    families = [int(socket.AF_UNIX)]
    if allow_network:  # netlink: getaddrinfo asks for the interfaces
        families += [int(socket.AF_INET), int(socket.AF_INET6), int(socket.AF_NETLINK)]
    return {
        "clone": [
            (_LOAD, 0, 0, _ARGS),
            (_JUMP_SET, 0, 1, _NEW_NAMESPACE),
            _refuse(errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ],
        "ioctl": _except(1, (_TIOCSTI, _TIOCLINUX), errno.EPERM),
        "personality": _only(0, (0, _PERSONALITY_QUERY), errno.EPERM),
        "prctl": _except(0, _PRCTL_DENIED, errno.EPERM),
        "prlimit64": _prlimit(),
        "sched_setattr": _except(0, (_SUPERVISOR,), errno.EPERM),
        "sched_setparam": _except(0, (_SUPERVISOR,), errno.EPERM),
        "sched_setscheduler": _except(0, (_SUPERVISOR,), errno.EPERM),
        "setpriority": _setpriority(),
        "setrlimit": _except(0, (resource.RLIMIT_CORE,), errno.EPERM),
        "socket": _only(0, families, errno.EAFNOSUPPORT),
        "socketpair": _only(0, (int(socket.AF_UNIX),), errno.EAFNOSUPPORT),
    }


def runtime(pid: int) -> Profile:
    """For process `pid`, which runs a WebAssembly program and has loaded all that it needs: no program, no process, no
    socket, no new machine code, nothing about another process."""
    threads_only: list[Instruction] = [
        (_LOAD, 0, 0, _ARGS),
        (_JUMP_SET, 2, 0, _NEW_NAMESPACE),
        (_JUMP_SET, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        _refuse(errno.EPERM),
    ]
    not_executable: list[Instruction] = [
        (_LOAD, 0, 0, _ARGS + 8 * 2),
        (_JUMP_SET, 0, 1, mmap.PROT_EXEC),
        _refuse(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return Profile(
        without=frozenset(syscalls.OF_OTHERS),
        checks={
            "clone": threads_only,
            "mmap": not_executable,
            "mprotect": not_executable,
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
        if (number := numbers[column]) is not None and name not in checks and name not in profile.without:
            program += [(_JUMP_EQ, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for name, body in checks.items():
        number = (syscalls.CHECKED | syscalls.ALLOWED)[name][column]
        if number is not None and name not in profile.without:
            program += [(_JUMP_EQ, 0, len(body), number), *body]
    for numbers in syscalls.MISSING.values():
        if (number := numbers[column]) is not None:
            program += [(_JUMP_EQ, 0, 1, number), _refuse(errno.ENOSYS)]
    program += [(_JUMP_GE, 0, 1, syscalls.LAST + 1), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]
    return program


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(*, allow_network: bool = False, profile: Profile = CAGE) -> None:
    """Confines this thread and all its descendants, for good. Needs no_new_privs (or CAP_SYS_ADMIN)."""
    program = build_filter(linux.MACHINE, allow_network=allow_network, profile=profile)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *i) for i in program))
    request = _Program(len(program), ctypes.addressof(code))
    mode_filter = 2
    linux.prctl(linux.PR_SET_SECCOMP, mode_filter, ctypes.addressof(request), what="PR_SET_SECCOMP")
