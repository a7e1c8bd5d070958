"""The second launcher: a cage per `bwrap` process, for hosts that let only bubblewrap make namespaces.

Ubuntu 24.04 is one: AppArmor takes an ordinary user's capabilities in a new user namespace away, except from programs
with a profile, and bubblewrap's package brings one. Same supervisor, filters and limits as the fork server's cages,
with two differences: every conversation starts its interpreter (slower, and its memory is not shared), and
the number of files is limited by the supervisor's watch, not by the file system. Source: bwrap(1), 0.8 or newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from dataclasses import asdict

from . import wire
from .cage import ABSENT, ETC, ETC_NETWORK, etc_files
from .cgroups import Cgroups
from .launcher import ENVIRONMENT, LOADER, PACKAGE, Sandbox, SandboxError
from .spec import CACHE, DATA, DEVICE_LINKS, DEVICES, INSIDE_ID, RUN, SHM, TMP, Spec, View, scratch_directory

_NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_SPAWN_S = 60.0
_DEMOTE = (
    "import os, sys; uid, gid = int(sys.argv[1]), int(sys.argv[2]); os.setgroups([]);"
    " os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid); os.execv(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    return shutil.which("bwrap")


def _binds(view: View) -> list[str]:
    """Every path at its own place; a link stays a link, and what it leads to is shown."""
    arguments: list[str] = []
    etc = [f"/etc/{name}" for name in ETC + (ETC_NETWORK if view.allow_network else ())]
    for path in (*view.read_only, *etc):
        real = os.path.realpath(path)
        if not os.path.exists(real):
            continue
        if real.startswith(tuple(f"{scratch}/" for scratch in (TMP, DATA, SHM, RUN))):
            raise SandboxError(f"{real} lies where bubblewrap's cage has its scratch space: move it elsewhere")
        arguments += ["--ro-bind", real, real]
        if real != path:
            arguments += ["--symlink", real, path]
    return arguments


def _hidden(view: View) -> tuple[list[str], list[int]]:
    """Replaces hidden paths inside shown paths by empty ones: (arguments, descriptors to pass)."""
    arguments: list[str] = []
    fds: list[int] = []
    for path in map(os.path.realpath, view.hidden):
        if os.path.isdir(path):
            arguments += ["--size", "4096", "--tmpfs", path]
            if os.path.exists(f"{path}/__init__.py"):
                fds.append(_in_memory(ABSENT))
                arguments += ["--ro-bind-data", str(fds[-1]), f"{path}/__init__.py"]
            arguments += ["--remount-ro", path]
        elif os.path.exists(path):
            arguments += ["--ro-bind", "/dev/null", path]
    return arguments, fds


def _scratch(spec: Spec) -> list[str]:
    """One tmpfs for all that can be written, and links to it, so that one size limits all."""
    arguments = ["--size", str(spec.limits.scratch), "--tmpfs", RUN]
    for path in (TMP, DATA, SHM):
        inside = scratch_directory(path)
        arguments += ["--dir", inside, "--symlink", inside, path]
    return [*arguments, "--size", str(16 << 20), "--tmpfs", CACHE]


def _files(view: View) -> tuple[list[str], list[int]]:
    """Small files from memory: (arguments, descriptors to pass)."""
    arguments: list[str] = []
    fds: list[int] = []
    for name, text in etc_files(view.allow_network).items():
        fds.append(_in_memory(text))
        arguments += ["--ro-bind-data", str(fds[-1]), f"/etc/{name}"]
    return arguments, fds


def _in_memory(text: str) -> int:
    fd = os.memfd_create("file")
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Bubblewrap:
    """Makes cages as `launcher.Zygote` does. Raises SandboxError where bwrap does not work either."""

    hung = False  # every cage is a separate process

    def __init__(self, spec: Spec, python: str = sys.executable, cgroups: Cgroups | None = None) -> None:
        self._spec = spec
        self._python = python
        self._cgroups = cgroups
        self._bwrap = ""
        self._running: set[asyncio.Task[int]] = set()

    @property
    def alive(self) -> bool:
        return bool(self._bwrap)

    async def start(self, timeout_s: float) -> None:
        found = find()
        if found is None:
            raise SandboxError("bubblewrap (bwrap) is not installed: take the package bubblewrap of your distribution")
        self._bwrap = found

    def _arguments(self, control: int) -> tuple[list[str], list[int]]:
        view = self._spec.view
        files, fds = _files(view)
        hidden, more = _hidden(view)
        devices = [word for path in DEVICES for word in ("--dev-bind", path, path)]
        devices += [word for name, target in DEVICE_LINKS.items() for word in ("--symlink", target, f"/dev/{name}")]
        network = [] if view.allow_network else ["--unshare-net"]
        inside = [self._python, "-I", "-c", LOADER, PACKAGE, "cage", str(control)]
        return [
            *(self._demotion() if os.getuid() == 0 else ()),
            *(self._bwrap, *_NAMESPACES, *network, "--die-with-parent", "--new-session", "--as-pid-1"),
            *("--hostname", "sandbox", "--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID)),
            *(*_binds(view), *hidden),
            *("--ro-bind", PACKAGE, PACKAGE, "--ro-bind", self._spec.payload, self._spec.payload),
            *(*files, *devices, *_scratch(self._spec), "--proc", "/proc", "--remount-ro", "/", "--chdir", "/"),
            *("--", *inside),
        ], fds + more

    def _demotion(self) -> list[str]:
        """A command before bwrap's that gives root away. Not `user=`: uvloop's subprocesses do not have it."""
        view = self._spec.view
        return [self._python, "-I", "-c", _DEMOTE, str(view.uid), str(view.gid)]

    async def spawn(self) -> Sandbox:
        """A new cage, nothing running in it yet. Raises SandboxError."""
        ours, theirs = wire.pair()
        sandbox = Sandbox(ours)
        arguments, fds = self._arguments(theirs.fileno())
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                pass_fds=[theirs.fileno(), *fds],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
            )
        except OSError as error:
            sandbox.kill()
            raise SandboxError(f"cannot run {self._bwrap}: {error}") from error
        finally:
            theirs.close()
            for fd in fds:
                os.close(fd)
        waiting = asyncio.create_task(process.wait())
        self._running.add(waiting)
        waiting.add_done_callback(self._running.discard)
        try:
            sandbox.post(asdict(self._spec))
            async with asyncio.timeout(_SPAWN_S):
                await sandbox.hello
            await sandbox.join(self._cgroups, self._spec)
        except BaseException as error:
            sandbox.kill()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            if isinstance(error, (TimeoutError, SandboxError)):
                raise SandboxError(f"bubblewrap made no cage: {error or 'timeout'}") from error
            raise
        return sandbox

    async def aclose(self) -> None:
        self._bwrap = ""
        await asyncio.gather(*self._running, return_exceptions=True)
