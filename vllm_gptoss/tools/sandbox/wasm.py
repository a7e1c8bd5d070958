"""The portable tier's process: CPython as WebAssembly inside wasmtime, in a process that has locked itself in.

Run by `portable` as `python -I -c <loader> <package> compile|run <json>`. Nothing here needs a namespace. The program
is held by WebAssembly: its memory is not this process', and it reaches only WASI's files below two
directories, a clock and random numbers. Should it break out of that, it is in a process that may start nothing, reach
no socket, make no machine code and, with landlock, open nothing but those directories. Needs the package `wasmtime`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from . import cage, landlock, linux, seccomp

TOO_MANY_FILES, TOO_MANY_DESCRIPTORS = 73, 74  # exit codes, of a process that exceeded these limits
_STACK = 8 << 20  # bytes of wasm stack; CPython's own guard for C recursion in this build assumes it
_HOST_STACK = 32 << 20
_HOST_MEMORY = 512 << 20  # memory of the runtime in addition to the program's
_MAX_DEPTH = 64  # folders in folders
_WATCH_S = 0.02
_WATCH_SHARE = 10  # of the time at most a tenth is spent on counting files
_NO_FUNCTION = -1
_BROKEN = 70  # exit code of a runtime that could not run the program


def main(argv: list[str]) -> None:
    """`argv`: `compile` or `run`, and its settings as JSON. Does not return."""
    settings = json.loads(argv[1])
    {"compile": _compile, "run": _run}[argv[0]](settings)
    os._exit(0)


def engine() -> Any:
    """One configuration for both steps: wasmtime refuses code that was compiled under another."""
    import wasmtime

    config = wasmtime.Config()
    config.wasm_exceptions = True
    config.max_wasm_stack = _STACK
    wasmtime._bindings.wasmtime_config_async_stack_size_set(config.ptr(), _STACK)  # must not be the smaller one
    return wasmtime.Engine(config)


def _compile(settings: dict[str, Any]) -> None:
    """`source`: WebAssembly; `target`: where its machine code goes, whole or not at all."""
    import wasmtime

    linux.die_with_parent(signal.SIGKILL)
    module = wasmtime.Module.from_file(engine(), settings["source"])
    unfinished = f"{settings['target']}.{os.getpid()}"
    fd = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(module.serialize())
    os.rename(unfinished, settings["target"])


def _run(settings: dict[str, Any]) -> None:
    """Loads, locks itself in, then runs the program with this process' standard streams.

    `module`: our machine code; `argv`: the program's; `mounts`: [path, path inside, writable]; `memory`, `scratch`:
    bytes; `inodes`, `open_files`, `cpus`, `niceness`; `user`: [uid, gid] to become, or none; `parent`: a process to
    die with.
    """
    import wasmtime

    configured = engine()
    module = wasmtime.Module.deserialize_file(configured, settings["module"])
    wasi = wasmtime.WasiConfig()
    wasi.argv = settings["argv"]
    wasi.env = []
    for path, inside, writable in settings["mounts"]:
        wasi.preopen_dir(path, inside, writable)
    wasi.inherit_stdin()
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    store = wasmtime.Store(configured)
    store.set_wasi(wasi)
    store.set_limits(memory_size=settings["memory"], memories=1, instances=1)
    linker = wasmtime.Linker(configured)
    linker.define_wasi()
    for wanted in module.imports:
        if wanted.module == "host" and isinstance(wanted.type, wasmtime.FuncType):
            # This build's door to functions of its embedder: there are none.
            linker.define_func("host", str(wanted.name), wanted.type, lambda *_: _NO_FUNCTION)
    watched = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path, _, writable in settings["mounts"] if writable]
    _lock(settings)
    # Threads inherit the filters. The program's needs more stack than the main thread may have.
    threading.Thread(target=_watch, args=(watched, settings), daemon=True).start()
    threading.stack_size(_HOST_STACK)
    program = threading.Thread(target=_enter, args=(linker, store, module))
    program.start()
    program.join()


def _enter(linker: Any, store: Any, module: Any) -> None:
    """The program from its start to its end, and the process' with it."""
    import wasmtime

    code = _BROKEN
    try:
        exports = linker.instantiate(store, module).exports(store)
        exports["_initialize"](store)
        code = exports["run"](store)
    except wasmtime.ExitTrap as error:
        code = error.code
    except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
        os.write(2, f"\nWebAssembly: {str(error).strip().splitlines()[-1]}\n".encode())
    finally:
        os._exit(code & 0xFF)


def _lock(settings: dict[str, Any]) -> None:
    """Everything an unprivileged process can take from itself. Raises OSError where a part is refused."""
    if len(os.listdir("/proc/self/task")) != 1:
        raise OSError("a thread exists already, which the filters would not reach")
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, random.sample(cpus, min(settings["cpus"], len(cpus))))
    os.nice(settings["niceness"])
    for kind, value in (
        (resource.RLIMIT_CORE, 1),  # as in `cage`: 0 would still start the host's core_pattern program
        (resource.RLIMIT_DATA, settings["memory"] + _HOST_MEMORY),
        (resource.RLIMIT_NOFILE, settings["open_files"]),
        (resource.RLIMIT_FSIZE, settings["scratch"]),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),
    ):
        cage.set_rlimit(kind, value)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the host runs out of memory, this goes first
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit is an error, not an end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mounts = settings["mounts"]
    landlock.restrict(
        [path for path, _, writable in mounts if writable], (), readable=[path for path, _, w in mounts if not w]
    )
    if settings["user"]:
        cage.become(*settings["user"])
    linux.no_new_privileges()
    linux.drop_capabilities()
    linux.set_dumpable(False)
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        os._exit(1)  # it died before the line above
    seccomp.install(seccomp.assembled(profile=seccomp.runtime(os.getpid())))


def _watch(directories: list[int], settings: dict[str, Any]) -> None:
    """Keeps the files within bounds that no rlimit knows: over the size nothing can be written until something is
    deleted; over the number, the end. Also ends with the server, if the kernel's word of its death was lost."""
    code = _BROKEN
    try:
        full = False
        while os.getppid() == settings["parent"]:
            began = time.monotonic()
            size = 0
            files = itertools.chain.from_iterable(_sizes(os.dup(directory), 1) for directory in directories)
            for number, one in enumerate(files):
                size += one
                if number > settings["inodes"]:
                    raise _TooManyFilesError
            if (size > settings["scratch"]) != full:
                full = not full
                resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else settings["scratch"], settings["scratch"]))
            time.sleep(max(_WATCH_S, _WATCH_SHARE * (time.monotonic() - began)))
    except _TooManyFilesError:
        code = TOO_MANY_FILES
    except OSError as error:  # no descriptor is left to count with
        code = TOO_MANY_DESCRIPTORS if error.errno == errno.EMFILE else _BROKEN
    finally:
        os._exit(code)  # unwatched the program does not run


class _TooManyFilesError(Exception):
    pass


def _sizes(fd: int, depth: int) -> Iterator[int]:
    """Bytes on the disk of everything below the directory `fd`, which is closed; depth first, links not followed."""
    if depth > _MAX_DEPTH:
        os.close(fd)
        raise _TooManyFilesError
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                        yield from _sizes(os.open(entry.name, flags, dir_fd=fd), depth + 1)
    finally:
        os.close(fd)
