"""The walls: what a process does to itself before it runs anything that was not reviewed.

Two rings. The zygote's ring hides the host: a new root made of read-only binds, its own namespaces, and for a root
server another user. A conversation's ring, inside it, hides the other conversations: again its own namespaces, a
private scratch tmpfs and its own /proc. Both rings need no privilege on the host; a root server gives its own away.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterable

from . import landlock, linux, seccomp
from .processes import ProcessTable
from .spec import CACHE, DATA, DEVICE_LINKS, DEVICES, INSIDE_ID, RUN, SHM, SOCKETS, TMP, Limits, View, scratch_directory

_QUIET = linux.MS_NOSUID | linux.MS_NODEV
ABSENT = 'raise ModuleNotFoundError(f"{__name__} is hidden in this sandbox", name=__name__)\n'
"""The `__init__.py` of a hidden package: an empty folder could be imported, as a namespace package."""
ETC = ("ld.so.cache", "alternatives", "localtime", "fonts", "mime.types")
ETC_NETWORK = ("resolv.conf", "ssl/certs", "ca-certificates", "services", "gai.conf")


def etc_files(allow_network: bool) -> dict[str, str]:
    """Texts of the files in /etc that a cage replaces, by name."""
    return {
        "passwd": f"root:x:0:0::/nonexistent:/bin/false\nsandbox:x:{INSIDE_ID}:{INSIDE_ID}::{TMP}:/bin/sh\n",
        "group": f"root:x:0:\nsandbox:x:{INSIDE_ID}:\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "nsswitch.conf": f"passwd: files\ngroup: files\nhosts: {'files dns' if allow_network else 'files'}\n",
    }


def namespaces(allow_network: bool) -> int:
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
    return flags if allow_network else flags | linux.CLONE_NEWNET


def leave_host(view: View) -> None:
    """First half of the zygote's ring: own namespaces. The next child is pid 1 of the new pid namespace."""
    flags = namespaces(view.allow_network)
    if os.getuid() == 0 and is_mapped("uid", view.uid) and is_mapped("gid", view.gid):
        try:
            linux.unshare(flags)
            return
        except PermissionError:  # a container's root without CAP_SYS_ADMIN: an ordinary user can do more
            become(view.uid, view.gid)
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(flags | linux.CLONE_NEWUSER)
    linux.write_id_maps(INSIDE_ID, uid, gid)


def is_mapped(kind: str, wanted: int) -> bool:
    """Whether this user namespace has such an id; a rootless container's may have root alone."""
    with open(f"/proc/self/{kind}_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= wanted < first + count for first, _, count in ranges)


def enter_root(view: View) -> None:
    """Second half, as pid 1: a root with only `view` in it, then no privilege left at all."""
    _build_root(view)
    if os.getuid() == 0:
        become(view.uid, view.gid)
    linux.no_new_privileges()
    linux.drop_capabilities()


def enter_void(view: View) -> None:
    """Instead of `enter_root`, for what has all it needs in memory: an empty root, no /proc, no privilege left."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    base = next(d for d in (TMP, RUN, "/var", "/mnt") if os.path.isdir(d))
    linux.mount("tmpfs", base, "tmpfs", _QUIET | linux.MS_NOEXEC, "mode=555,size=4k,nr_inodes=1")
    linux.lock_mount(base, recursive=False)
    os.chdir(base)
    linux.pivot_root(".", ".")
    linux.unmount(".")
    os.chdir("/")
    if os.getuid() == 0:
        become(view.uid, view.gid)


def become(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    linux.set_dumpable(True)  # a change of user hides /proc/self from ourselves, and the id maps are written there


def _build_root(view: View) -> None:
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    base = next(d for d in (TMP, RUN, "/var", "/mnt") if os.path.isdir(d))
    linux.mount("tmpfs", base, "tmpfs", _QUIET, "mode=755,size=1m")
    os.mkdir(f"{base}/old")
    os.mkdir(f"{base}/new")
    linux.pivot_root(base, f"{base}/old")
    os.chdir("/")
    linux.mount("tmpfs", "/new", "tmpfs", _QUIET, "mode=755,size=4m,nr_inodes=4096")
    os.mkdir(f"/new{TMP}")
    # First, so that a Python that lives below it is shown on top.
    linux.mount("tmpfs", f"/new{TMP}", "tmpfs", _QUIET, "mode=1777,size=16m,nr_inodes=1024")
    for path in view.read_only:
        _show(path)
    for path in view.hidden:
        _hide(path)
    _make_etc(view.allow_network)
    _make_dev()
    for path in (RUN, DATA, CACHE):
        os.makedirs(f"/new{path}", exist_ok=True)
    owner = f"uid={os.getuid() or view.uid},gid={os.getgid() or view.gid}"
    linux.mount("tmpfs", f"/new{CACHE}", "tmpfs", _QUIET, f"mode=755,size=16m,nr_inodes=1024,{owner}")
    _mount_proc("/new/proc", fallback="/old/proc")
    linux.lock_mount("/new", recursive=False)
    os.chdir("/new")
    linux.pivot_root(".", ".")
    linux.unmount(".")
    os.chdir("/")


def _show(path: str) -> None:
    """Binds a host path at its own place. A link becomes a link, and what it leads to is bound."""
    path = os.path.normpath(path)
    real = os.path.realpath(f"/old{path}").removeprefix("/old")
    # /old's links are absolute in the host's root, so they are followed by hand.
    real = _resolve(path) or real
    source, target = f"/old{real}", f"/new{real}"
    if not os.path.lexists(source):
        return
    if not os.path.lexists(target):
        if os.path.isdir(source):
            os.makedirs(target)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
    linux.lock_mount(target)
    if real != path and not os.path.lexists(f"/new{path}"):
        os.makedirs(os.path.dirname(f"/new{path}"), exist_ok=True)
        os.symlink(real, f"/new{path}")


def _resolve(path: str, depth: int = 40) -> str:
    """realpath(3) as if /old were the root."""
    done = "/"
    parts = path.split("/")
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            done = os.path.dirname(done)
            continue
        step = os.path.join(done, part)
        if not os.path.islink(f"/old{step}"):
            done = step
            continue
        if (depth := depth - 1) < 0:
            raise OSError(f"too many links in {path}")
        link = os.readlink(f"/old{step}")
        parts = link.split("/") + parts
        done = "/" if link.startswith("/") else done
    return done


def _hide(path: str) -> None:
    target = f"/new{_resolve(os.path.normpath(path))}"
    if os.path.isdir(target):
        package = os.path.exists(f"{target}/__init__.py")
        linux.mount("tmpfs", target, "tmpfs", _QUIET, "mode=755,size=4k,nr_inodes=2")
        if package:
            with open(f"{target}/__init__.py", "w") as file:
                file.write(ABSENT)
        linux.lock_mount(target, recursive=False)
    elif os.path.exists(target):
        linux.mount("/old/dev/null", target, None, linux.MS_BIND)


def _make_etc(allow_network: bool) -> None:
    os.makedirs("/new/etc", exist_ok=True)
    for name, text in etc_files(allow_network).items():
        with open(f"/new/etc/{name}", "w") as file:
            file.write(text)
    for name in ETC + (ETC_NETWORK if allow_network else ()):
        _show(f"/etc/{name}")


def _make_dev() -> None:
    os.makedirs(f"/new{SHM}")
    for path in DEVICES:
        os.close(os.open(f"/new{path}", os.O_CREAT | os.O_WRONLY, 0o666))
        linux.mount(f"/old{path}", f"/new{path}", None, linux.MS_BIND)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"/new/dev/{name}")


def _mount_proc(target: str, fallback: str | None) -> bool:
    """An own /proc for the own pid namespace; False where the kernel refuses, as below a masked /proc."""
    os.makedirs(target, exist_ok=True)
    flags = _QUIET | linux.MS_NOEXEC
    for options in ("subset=pid", ""):  # subset: Linux 5.8, only the process directories
        with contextlib.suppress(OSError):
            linux.mount("proc", target, "proc", flags, options)
            return True
    if fallback:
        linux.mount(fallback, target, None, linux.MS_BIND | linux.MS_REC)
    return False


def enter_conversation(limits: Limits, shown: Iterable[str] = ()) -> ProcessTable:
    """As pid 1 of a conversation's ring: private scratch and /proc, then no privilege left."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    outer = ProcessTable(own=False)
    has_proc = _mount_proc("/proc", fallback=None)
    if not has_proc:
        linux.mount("tmpfs", "/proc", "tmpfs", _QUIET | linux.MS_RDONLY, "mode=555,size=4k,nr_inodes=1")
    size = f"mode=755,size={limits.scratch},nr_inodes={limits.inodes}"
    linux.mount("tmpfs", RUN, "tmpfs", _QUIET | linux.MS_NOEXEC, size)
    for path in (TMP, DATA, SHM):
        source = scratch_directory(path)
        os.mkdir(source)
        _keep_in_view(path, source, shown)
        linux.mount(source, path, None, linux.MS_BIND | linux.MS_REC)
    linux.lock_mount(CACHE)
    socket.sethostname("sandbox")
    linux.no_new_privileges()
    linux.drop_capabilities()
    if not has_proc:
        return outer
    outer.close()
    return ProcessTable(own=True)


def _keep_in_view(path: str, source: str, shown: Iterable[str]) -> None:
    """Parts of `shown` below `path`, such as a virtual environment in /tmp, stay visible when `source` covers it."""
    for one in shown:
        real = os.path.realpath(one)
        if real.startswith(f"{path}/"):
            target = source + real.removeprefix(path)
            if os.path.isdir(real):
                os.makedirs(target, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
            linux.mount(real, target, None, linux.MS_BIND | linux.MS_REC)
        if one.startswith(f"{path}/") and not os.path.lexists(link := source + one.removeprefix(path)):
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(real, link)


def confine(limits: Limits, *, allow_network: bool, cpus: Iterable[int]) -> None:
    """The filters of the conversation's pid 1, which all its children inherit."""
    os.mkdir(SOCKETS, 0o700)
    os.sched_setaffinity(0, cpus)
    # A crash may start a program on the host, as root, that reads the crashed process (core_pattern with a pipe). That
    # ignores a limit of 0 and stops at 1: Linux' fs/coredump.c. The seccomp filter keeps it at 1.
    set_rlimit(resource.RLIMIT_CORE, 1)
    linux.set_dumpable(False)  # the payload runs as the same user: keeps it away from our memory
    checks = {} if limits.shared_memory else seccomp.UNCOUNTED
    seccomp.install(seccomp.assembled(allow_network=allow_network, profile=seccomp.Profile(checks=checks)))


def confine_payload(limits: Limits, *, allow_network: bool) -> None:
    """Sets rlimits and landlock, which apply only to the payload's process."""
    linux.set_dumpable(True)  # else it could not read its own /proc/self
    os.nice(limits.niceness)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the host runs out of memory, this goes first
    _set_rlimits(limits)
    # A shared mapping of /dev/zero is anonymous shared memory by another name, if it was opened for writing: mmap(2).
    devices = [path for path in DEVICES if limits.shared_memory or path != "/dev/zero"]
    landlock.restrict((RUN, TMP, DATA, SHM), devices, allow_network=allow_network)


def _set_rlimits(limits: Limits) -> None:
    for kind, value in (
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.scratch),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_SIGPENDING, 256),  # the user's in the namespace outside, for all conversations
        (resource.RLIMIT_STACK, 8 << 20),
    ):
        set_rlimit(kind, value)


def set_rlimit(kind: int, value: int) -> None:
    """Soft and hard limit, never more than the hard limit that is there."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def scratch_used() -> tuple[int, int]:
    s = os.statvfs(RUN)
    return (s.f_blocks - s.f_bfree) * s.f_frsize, s.f_files - s.f_ffree
