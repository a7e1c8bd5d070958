"""The fork server: caged once, imports what payloads need once, then forks a conversation's cage per request.

Run by `launcher.Zygote` as `python -I -c <loader> <fd> <json>`. A conversation's processes share the imported
libraries' memory with it (copy on write), which makes fifty of them cheap, and with it the address space's layout.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import random
import signal
import socket
import sys
from types import ModuleType
from typing import Any, NoReturn

from . import cage, linux, wire
from .processes import ProcessTable
from .spec import INSIDE_ID, Spec
from .supervisor import Supervisor

_MAX_FD = 1 << 16


def main(argv: list[str]) -> None:
    """`argv`: `zygote` or `cage` and the server's socket, or `host` and what `_on_host` takes. Does not return."""
    if argv[0] == "host":
        _on_host(*argv[1:])
    control = socket.socket(fileno=int(argv[1]))
    first = wire.receive(control)  # not an argument: /proc shows those to the programs, and paths of the host are in it
    if first is None:
        os._exit(1)
    spec = Spec.from_json(first[0])
    if argv[0] == "cage":
        _already_caged(control, spec)
    linux.die_with_parent(signal.SIGKILL)
    payload = _load_or_fail(control, spec.payload)
    try:
        cage.leave_host(spec.view)
    except Exception as error:
        _fail(control, error, isolation=True)
    pid = os.fork()
    if pid:
        control.close()
        _, status = os.waitpid(pid, 0)
        os._exit(abs(os.waitstatus_to_exitcode(status)) & 0xFF)
    try:
        cage.enter_root(spec.view)
        linux.die_with_parent(signal.SIGKILL)
    except Exception as error:
        _fail(control, error, isolation=True)
    try:
        payload.preload(spec.options)
    except Exception as error:
        _fail(control, error)
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, what the children share
    wire.send(control, {"event": "ready"})
    _serve(control, spec, payload)
    os._exit(0)


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gptoss_payload", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the payload {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _load_or_fail(control: socket.socket, path: str) -> ModuleType:
    try:
        return _load(path)
    except Exception as error:
        _fail(control, error)


def _fail(control: socket.socket, error: BaseException, *, isolation: bool = False) -> NoReturn:
    """`isolation`: it is the host that does not allow it, so that another way may be tried."""
    wire.send(control, {"event": "failed", "error": f"{type(error).__name__}: {error}", "isolation": isolation})
    os._exit(1)


def _serve(control: socket.socket, spec: Spec, payload: ModuleType) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    cpus = itertools.cycle(sorted(os.sched_getaffinity(0)))
    while (message := wire.receive(control)) is not None:
        own = {next(cpus) for _ in range(spec.limits.cpus)}
        for fd in message[1]:
            conn = socket.socket(fileno=fd)
            if os.fork() == 0:
                control.close()
                _conversation(conn, spec, payload, own)
            conn.close()


def _conversation(conn: socket.socket, spec: Spec, payload: ModuleType, cpus: set[int]) -> None:
    """In a child of the zygote: a cage around a grandchild, which becomes its pid 1. Does not return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        uid, gid = os.getuid(), os.getgid()
        linux.unshare(cage.namespaces(spec.view.allow_network) | linux.CLONE_NEWUSER)
        linux.write_id_maps(INSIDE_ID, uid, gid)
        if os.fork():
            os._exit(0)  # the zygote is pid 1 of its namespace and adopts the grandchild
        os.setsid()
        conn = _only_keep(conn)
        _supervise(conn, spec, payload, cage.enter_conversation(spec.limits, spec.view.read_only), cpus)
    except BaseException as error:
        try:
            wire.send(conn, {"event": "failed", "error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(1)


def _already_caged(conn: socket.socket, spec: Spec) -> None:
    """As pid 1 of a cage that another program built: `bubblewrap`. Does not return."""
    try:
        payload = _load(spec.payload)
        payload.preload(spec.options)
        conn = _only_keep(conn)
        cpus = set(random.sample(sorted(os.sched_getaffinity(0)), min(spec.limits.cpus, os.cpu_count() or 1)))
        linux.no_new_privileges()
        linux.drop_capabilities()
        _supervise(conn, spec, payload, ProcessTable(own=True), cpus)
    except BaseException as error:
        _fail(conn, error)


def _on_host(ready_fd: str, spec_text: str, argument: str) -> None:
    """No walls: `host`. Does not return."""
    linux.die_with_parent(signal.SIGKILL)
    spec = Spec.from_json(json.loads(spec_text))
    payload = _load(spec.payload)
    payload.preload(spec.options | {"cache": os.environ["HOME"]})
    payload.run(
        spec.options, json.loads(argument), lambda: os.close(int(ready_fd)) if os.write(int(ready_fd), b"1") else None
    )
    os._exit(0)


def _supervise(conn: socket.socket, spec: Spec, payload: ModuleType, processes: ProcessTable, cpus: set[int]) -> None:
    cage.confine(spec.limits, allow_network=spec.view.allow_network, cpus=cpus)

    def run(argument: dict[str, Any], ready: Any) -> None:
        payload.run(spec.options, argument, ready)

    Supervisor(conn, spec, processes, run).serve()
    os._exit(0)


def _only_keep(conn: socket.socket) -> socket.socket:
    """Closes every descriptor but `conn`, and points the standard ones nowhere."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    kept = conn.detach()
    if kept != 3:  # dup3(2) refuses equal descriptors
        os.dup2(kept, 3, inheritable=False)
    os.closerange(4, _MAX_FD)
    return socket.socket(fileno=3)
