"""Runs a command as an ordinary user who can reach this checkout: `python -m … UID command…`, started as root.

The checkout, the interpreter or the environment may lie in root's home, which others cannot enter. So in a mount
new namespace, closed directories on the way to them are covered by open ones that hold nothing else.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from vllm_gptoss.tools.sandbox import linux

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534
UNREACHABLE = 77
"""The exit status where no way can be opened; the reason is the last line of stderr."""


def run(modules: Sequence[str], home: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """pytest on modules of this folder as user 65534, who owns `home`. Skips where that user cannot be let in."""
    python = str(Path(sys.prefix).resolve() / "bin" / "python")
    suites = [str(Path(__file__).with_name(module)) for module in modules]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={home}/t", *suites]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.sandbox.as_nobody", str(NOBODY), *command],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1", **environ},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode == UNREACHABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return done


def _closed_parent(path: str) -> str | None:
    """The topmost directory above `path`, or itself, that others cannot enter."""
    parts = path.strip("/").split("/")
    for i in range(1, len(parts) + 1):
        directory = "/" + "/".join(parts[:i])
        if os.path.isdir(directory) and not os.stat(directory).st_mode & stat.S_IXOTH:
            return directory
    return None


def open_ways(paths: list[str]) -> None:
    """Puts every directory that lies in a closed one at the same place in an open one."""
    closed = {path: parent for path in paths if (parent := _closed_parent(path)) not in (None, path)}
    if not closed:
        return
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    with tempfile.TemporaryDirectory(dir="/tmp") as aside:
        kept = {path: os.path.join(aside, str(number)) for number, path in enumerate(closed)}
        for path, place in kept.items():
            os.mkdir(place)
            linux.mount(path, place, None, linux.MS_BIND | linux.MS_REC)
        for parent in sorted(set(closed.values())):
            linux.mount("tmpfs", parent, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=1m")
        for path, place in kept.items():
            os.makedirs(path, exist_ok=True)
            linux.mount(place, path, None, linux.MS_BIND | linux.MS_REC)
            linux.unmount(place)


def topmost(paths: list[str]) -> list[str]:
    """The paths that are not inside another one."""
    real = {os.path.realpath(path) for path in paths}
    return sorted(path for path in real if not any(path.startswith(f"{other}/") for other in real))


def main() -> None:
    uid, python = int(sys.argv[1]), sys.argv[2]
    os.umask(0o022)
    try:
        open_ways(topmost([str(ROOT), sys.base_prefix, sys.prefix, os.environ["HOME"]]))
    except OSError as error:
        _give_up(f"this checkout is below a closed folder and no way can be opened: {error}")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    for needed in (python, os.path.realpath(python), __file__, pytest.__file__, os.environ["HOME"]):
        if not os.access(needed, os.R_OK):
            _give_up(f"user {uid} may not read {needed}: its permissions are closed to others")
    os.execv(python, sys.argv[2:])


def _give_up(why: str) -> None:
    print(why, file=sys.stderr)
    sys.exit(UNREACHABLE)


if __name__ == "__main__":
    main()
