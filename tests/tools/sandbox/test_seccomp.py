"""The filter's decisions, for both machines, by a reading of the program that does not share code with its writing."""

from __future__ import annotations

import errno
import struct

import pytest

from vllm_gptoss.tools.sandbox import seccomp, syscalls

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = "allow", "kill"


def decide(
    machine: str,
    number: int,
    *args: int,
    arch: int | None = None,
    network: bool = False,
    profile: seccomp.Profile = seccomp.CAGE,
) -> str:
    """Runs the program over a `struct seccomp_data` as Linux' Documentation/networking/filter.rst defines it."""
    padded = [a & (1 << 64) - 1 for a in (*args, 0, 0, 0, 0, 0, 0)][:6]
    data = struct.pack("<iIQ6Q", number, ARCH[machine] if arch is None else arch, 0, *padded)
    program = seccomp.build_filter(machine, allow_network=network, profile=profile)
    accumulator = at = 0
    while True:
        code, when_true, when_false, k = program[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif code == 0x06:
            if k == 0x7FFF0000:
                return ALLOW
            return KILL if k == 0x80000000 else errno.errorcode[k & 0xFFFF]
        else:
            hit = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
            at += when_true if hit else when_false


def number(machine: str, name: str) -> int:
    column = 0 if machine == "x86_64" else 1
    found = (syscalls.ALLOWED | syscalls.CHECKED | syscalls.MISSING)[name][column]
    assert found is not None
    return found


@pytest.mark.parametrize("machine", ARCH)
@pytest.mark.parametrize("profile", ["CAGE", "COMPUTE"])
def test_nobody_watches_files(machine: str, profile: str) -> None:
    made = {"x86_64": (253, 294), "aarch64": (26,)}[machine]
    assert {decide(machine, call, profile=getattr(seccomp, profile)) for call in made} == {"ENOSYS"}
    further = {"x86_64": (254, 255, 300, 301), "aarch64": (27, 28, 262, 263)}[machine]  # and fanotify's
    assert {decide(machine, call, profile=getattr(seccomp, profile)) for call in further} == {"EPERM"}


@pytest.mark.parametrize("machine", ARCH)
def test_only_listed_calls_pass(machine: str) -> None:
    column = list(ARCH).index(machine)
    listed = {n[column] for n in syscalls.ALLOWED.values()} - {None}
    checked = {n[column] for n in (syscalls.CHECKED | syscalls.MISSING).values()}
    for call in range(1024):
        if call in checked:
            continue
        expected = ALLOW if call in listed else "ENOSYS" if call > syscalls.LAST else "EPERM"
        assert decide(machine, call) == expected, call


@pytest.mark.parametrize("machine", ARCH)
def test_foreign_machines_are_killed(machine: str) -> None:
    assert decide(machine, 0, arch=0x40000003) == KILL  # i386
    assert decide("x86_64", 0x40000000) == KILL  # x32


@pytest.mark.parametrize("machine", ARCH)
@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("socket", (1, 1), ALLOW),
        ("socket", (2, 1), "EAFNOSUPPORT"),
        ("socket", (1 << 32 | 2, 1), "EAFNOSUPPORT"),  # the kernel looks at the lower half only
        ("socket", (1 << 32 | 1, 1), ALLOW),
        ("socket", (10, 2), "EAFNOSUPPORT"),
        ("socket", (16, 3), "EAFNOSUPPORT"),
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (40, 1), "EAFNOSUPPORT"),
        ("clone", (0x3D0F00,), ALLOW),  # a thread
        ("clone", (17,), ALLOW),  # a fork
        ("clone", (0x4111,), ALLOW),  # vfork
        ("clone", (0x3D0F00 & ~0x400,), "EPERM"),  # a thread with separate descriptors
        ("clone", (0x10000000,), "EPERM"),
        ("clone", (0x40000000 | 17,), "EPERM"),
        ("clone", (0x00020000,), "EPERM"),
        ("clone3", (), "ENOSYS"),
        ("memfd_create", (), "ENOSYS"),
        *(("fcntl", (3, command), ALLOW) for command in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 16, 1030, 1032)),
        *(("fcntl", (3, command), "EINVAL") for command in (36, 37, 38, 1024, 1025, 1026, 1031, 1033, 1036, 1038)),
        ("ioctl", (1, 0x5401), ALLOW),
        ("ioctl", (1, 0x5412), "EPERM"),
        ("ioctl", (1, 0x541C), "EPERM"),
        ("personality", (0xFFFFFFFF,), ALLOW),
        ("personality", (0x0040000,), "EPERM"),
        ("prctl", (15,), ALLOW),
        ("prctl", (35,), "EPERM"),
        ("prctl", (22, 2), "EPERM"),
        ("prctl", (28,), "EPERM"),
        ("prctl", (4, 1), ALLOW),
        ("prctl", (4, 0), "EPERM"),
        ("prctl", (4, 2), "EPERM"),
        ("prctl", (0x59616D61,), "EPERM"),
        ("prlimit64", (0, 7, 0, 0x1000), ALLOW),
        ("prlimit64", (0, 7, 0x1000, 0), ALLOW),
        ("prlimit64", (1, 7, 0, 0x1000), "EPERM"),
        ("prlimit64", (0, 4, 0, 0x1000), ALLOW),
        ("prlimit64", (0, 4, 0x1000, 0), "EPERM"),
        ("prlimit64", (0, 4, 0x7F00_0000_0000, 0), "EPERM"),
        ("setrlimit", (7,), ALLOW),
        ("setrlimit", (4,), "EPERM"),
        ("setpriority", (0, 0, 5), ALLOW),
        ("setpriority", (0, 1, 5), "EPERM"),
        ("setpriority", (1, 1, 5), "EPERM"),
        ("setpriority", (2, 0, 19), "EPERM"),
        ("sched_setscheduler", (7, 0), ALLOW),
        ("sched_setscheduler", (1, 5), "EPERM"),
        ("sched_setattr", (1,), "EPERM"),
        ("sched_setparam", (1,), "EPERM"),
    ],
)
def test_arguments_decide(machine: str, name: str, args: tuple[int, ...], expected: str) -> None:
    assert decide(machine, number(machine, name), *args) == expected


_ANONYMOUS, _SHARED, _PRIVATE, _VALIDATE = 0x20, 1, 2, 3


@pytest.mark.parametrize("machine", ARCH)
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (_ANONYMOUS | _SHARED, "EPERM"),
        (_ANONYMOUS | _VALIDATE, "EPERM"),
        (_ANONYMOUS | _SHARED | 0x8000, "EPERM"),
        (_ANONYMOUS | _PRIVATE, ALLOW),
        (_SHARED, ALLOW),
    ],
)
def test_memory_that_nothing_counts_is_refused(machine: str, flags: int, expected: str) -> None:
    mmap = number(machine, "mmap")
    uncounted = seccomp.Profile(checks=seccomp.UNCOUNTED)
    assert decide(machine, mmap, 0, 4096, 3, flags, profile=uncounted) == expected
    assert decide(machine, mmap, 0, 4096, 3, flags, profile=seccomp.COMPUTE) == expected
    assert decide(machine, mmap, 0, 4096, 7, flags, profile=seccomp.COMPUTE) == "EPERM"
    assert decide(machine, mmap, 0, 4096, 3, flags) == ALLOW  # where a cgroup counts


@pytest.mark.parametrize("machine", ARCH)
@pytest.mark.parametrize(
    "name", ["openat", "socket", "clone", "kill", "execve", "ioctl", "sendmsg", "dup", "tgkill", "futex_requeue"]
)
def test_a_worker_that_computes_makes_no_other_call(machine: str, name: str) -> None:
    if (syscalls.ALLOWED | syscalls.CHECKED)[name][0 if machine == "x86_64" else 1] is not None:
        assert decide(machine, number(machine, name), profile=seccomp.COMPUTE) == "EPERM"
    assert decide(machine, number(machine, "read"), profile=seccomp.COMPUTE) == ALLOW


@pytest.mark.parametrize("family", [1, 2, 10, 16])
def test_network_opens_only_what_it_needs(family: int) -> None:
    assert decide("x86_64", number("x86_64", "socket"), family, network=True) == ALLOW
    assert decide("x86_64", number("x86_64", "socket"), 17, network=True) == "EAFNOSUPPORT"


@pytest.mark.parametrize("machine", ARCH)
def test_program_fits_the_kernels_limit(machine: str) -> None:
    assert len(seccomp.build_filter(machine)) <= 4096


def test_numbers_of_calls_that_no_payload_may_make_are_not_listed() -> None:
    """aarch64's from asm-generic/unistd.h: a wrong column would let these through."""
    dangerous = {
        "ptrace": 117,
        "unshare": 97,
        "setns": 268,
        "mount": 40,
        "umount2": 39,
        "pivot_root": 41,
        "chroot": 51,
        "init_module": 105,
        "finit_module": 273,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "io_uring_setup": 425,
        "keyctl": 219,
        "open_by_handle_at": 265,
        "process_vm_readv": 270,
        "kexec_load": 104,
        "reboot": 142,
        "memfd_secret": 447,
        "sched_setaffinity": 122,
    }
    assert {name: decide("aarch64", n) for name, n in dangerous.items()} == dict.fromkeys(dangerous, "EPERM")


@pytest.mark.parametrize("machine", ARCH)
def test_runtime_of_webassembly_touches_nothing_but_files_and_itself(machine: str) -> None:
    profile = seccomp.runtime(4711)

    def says(name: str, *args: int) -> str:
        return decide(machine, number(machine, name), *args, profile=profile)

    column = list(ARCH).index(machine)
    there = [n for n in syscalls.OF_OTHERS if (syscalls.ALLOWED | syscalls.CHECKED)[n][column] is not None]
    assert {name: says(name) for name in there} == dict.fromkeys(there, "EPERM")
    assert says("clone", 17) == "EPERM"  # a process
    assert says("clone", 0x3D0F00) == ALLOW  # glibc's flags for a thread
    assert says("clone", 0x3D0F00 | 0x10000000) == "EPERM"
    assert says("clone", 0x3D0F00 & ~0x400) == "EPERM"
    for name in ("mmap", "mprotect"):
        assert (says(name, 0, 4096, 3), says(name, 0, 4096, 7), says(name, 0, 4096, 5)) == (ALLOW, "EPERM", "EPERM")
    assert (says("prlimit64", 0), says("prlimit64", 4711), says("prlimit64", 1)) == (ALLOW, "EPERM", "EPERM")
    assert (says("tgkill", 4711), says("tgkill", 1)) == (ALLOW, "EPERM")
    assert {says(name) for name in ("read", "write", "openat", "futex", "getdents64", "exit_group")} == {ALLOW}
    assert says("clone3") == "ENOSYS"
