"""The few system calls that Python's standard library lacks, through ctypes; each raises `OSError` with its name.

Sources: namespaces(7), mount(2), mount_setattr(2), pivot_root(2), capabilities(7), prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 28, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
# noroot, no_setuid_fixup, no_cap_ambient_raise, each with its lock bit: capabilities(7)
_SECUREBITS = 0b1100_1111

MACHINE = platform.machine()
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442
SUPPORTED = MACHINE in _PIVOT_ROOT

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def syscall(number: int, *args: int | bytes | ctypes.Array[ctypes.c_char] | None, what: str) -> int:
    """Calls `number` with register-sized arguments; pointers are passed as bytes or ctypes buffers."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *wide)), what)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, fstype: str | None, flags: int, data: str = "") -> None:
    kind = fstype.encode() if fstype else None
    result = _libc.mount(os.fsencode(source), os.fsencode(target), kind, ctypes.c_ulong(flags), data.encode() or None)
    _checked(result, f"mount {source} on {target}")


def unmount(target: str) -> None:
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def lock_mount(target: str, *, recursive: bool = True) -> None:
    """Makes a mount, and with `recursive` all below it, read-only, without setuid and without device nodes.

    mount_setattr(2), Linux 5.12: the older MS_REMOUNT reaches only the topmost mount and leaves submounts writable.
    """
    request = struct.pack("=QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    syscall(_MOUNT_SETATTR, -100, os.fsencode(target), flags, request, len(request), what="mount_setattr")


def pivot_root(new_root: str, put_old: str) -> None:
    syscall(_PIVOT_ROOT[MACHINE], os.fsencode(new_root), os.fsencode(put_old), what="pivot_root")


def prctl(option: int, arg2: int = 0, arg3: int = 0, *, what: str = "prctl") -> int:
    words = (ctypes.c_ulong(arg2), ctypes.c_ulong(arg3), ctypes.c_ulong(0), ctypes.c_ulong(0))
    return _checked(_libc.prctl(ctypes.c_int(option), *words), what)


def die_with_parent(signal_number: int) -> None:
    """Requests a signal when the parent's thread ends. A change of credentials clears it: call this last."""
    prctl(PR_SET_PDEATHSIG, signal_number, what="PR_SET_PDEATHSIG")


def no_new_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1, what="PR_SET_NO_NEW_PRIVS")


def set_dumpable(value: bool) -> None:
    prctl(PR_SET_DUMPABLE, int(value), what="PR_SET_DUMPABLE")


def drop_capabilities() -> None:
    """Empties every capability set, bounding set included, so that no exec can bring one back."""
    # Both need CAP_SETPCAP; a process that never had it has nothing to drop from the bounding set that matters,
    # because no_new_privs stops exec from granting.
    with contextlib.suppress(PermissionError):
        prctl(PR_SET_SECUREBITS, _SECUREBITS, what="PR_SET_SECUREBITS")
        for capability in range(64):
            try:
                prctl(PR_CAPBSET_DROP, capability, what="PR_CAPBSET_DROP")
            except OSError as error:
                if isinstance(error, PermissionError):
                    raise
                break  # EINVAL: past the kernel's last capability
    with contextlib.suppress(OSError):  # Linux before 4.3 has no ambient set
        prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, what="PR_CAP_AMBIENT")
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    syscall(_CAPSET[MACHINE], header, bytes(24), what="capset")


def write_id_maps(inside: int, outside_uid: int, outside_gid: int) -> None:
    """Maps one user and one group of the parent namespace to id `inside`: user_namespaces(7)."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside_uid} 1"),
        ("gid_map", f"{inside} {outside_gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
