"""Runs a command as an ordinary user who can reach this interpreter: `python -m … UID command…`, started as root.

The interpreter may lie in root's home, which others cannot enter. So in a mount namespace of its own, closed
directories on the way to it are covered by open ones that hold nothing but the interpreter.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile

from vllm_gptoss.tools.sandbox import linux


def _closed_parent(path: str) -> str | None:
    """The topmost directory above `path` that others cannot enter."""
    parts = path.strip("/").split("/")
    for i in range(1, len(parts) + 1):
        directory = "/" + "/".join(parts[:i])
        if os.path.isdir(directory) and not os.stat(directory).st_mode & stat.S_IXOTH:
            return directory
    return None


def _open_way(path: str) -> None:
    closed = _closed_parent(path)
    if closed is None:
        return
    with tempfile.TemporaryDirectory() as aside:
        linux.mount(path, aside, None, linux.MS_BIND | linux.MS_REC)
        linux.mount("tmpfs", closed, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=1m")
        os.makedirs(path)
        linux.mount(aside, path, None, linux.MS_BIND | linux.MS_REC)
        linux.unmount(aside)


def main() -> None:
    uid = int(sys.argv[1])
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):
        _open_way(os.path.realpath(prefix))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
