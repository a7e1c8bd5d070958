"""Landlock: a second, independent wall around files, TCP and signals, for kernels that have it.

Source: landlock(7), Linux' Documentation/userspace-api/landlock.rst. ABI 1 is Linux 5.13, 4 (TCP) 6.7, 6 (scopes) 6.12.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from . import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NET_BIND, _NET_CONNECT = 1, 2
_SCOPE_ABSTRACT_UNIX, _SCOPE_SIGNAL = 1, 2


def abi() -> int:
    """The kernel's landlock version, 0 where it has none or has it switched off."""
    try:
        return linux.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG, what="landlock_create_ruleset")
    except OSError:
        return 0


def _handled(version: int) -> int:
    handled = (1 << 13) - 1  # execute … make_sym
    handled |= _REFER if version >= 2 else 0
    handled |= _TRUNCATE if version >= 3 else 0
    return handled | (_IOCTL_DEV if version >= 5 else 0)


def _allow(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, fd)
        linux.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0, what=f"landlock_add_rule {path}")
    finally:
        os.close(fd)


def restrict(
    writable: Iterable[str], devices: Iterable[str], *, allow_network: bool = False, readable: Iterable[str] = ("/",)
) -> int:
    """Read and execute below `readable`, by default anywhere that is mounted; write only below `writable` and to
    `devices`; no TCP; no signal to and no abstract socket of a process outside. Confines this thread and its
    descendants. Returns the ABI used (0: none).
    """
    version = abi()
    if not version:
        return 0
    handled = _handled(version)
    net = _NET_BIND | _NET_CONNECT if version >= 4 and not allow_network else 0
    scope = _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL if version >= 6 else 0
    words = [handled] + ([net] if version >= 4 else []) + ([scope] if version >= 6 else [])
    request = struct.pack(f"={len(words)}Q", *words)
    ruleset = linux.syscall(
        _CREATE_RULESET, ctypes.create_string_buffer(request), len(request), 0, what="landlock_create_ruleset"
    )
    try:
        for path in readable:
            _allow(ruleset, path, _READ)
        for path in writable:
            _allow(ruleset, path, handled & ~_IOCTL_DEV)
        for path in devices:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE | (_TRUNCATE if version >= 3 else 0))
        linux.no_new_privileges()
        linux.syscall(_RESTRICT_SELF, ruleset, 0, what="landlock_restrict_self")
    finally:
        os.close(ruleset)
    return version
