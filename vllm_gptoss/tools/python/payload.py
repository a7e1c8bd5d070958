"""What runs inside a cage: an ipykernel on unix sockets, with bounded output. Loaded by path, without our package.

The bounds here keep an honest flood from filling memory. A program that disables them floods only itself: the server
reads with its own limits (`client`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, cast

# Before IPython imports them. debugpy costs each kernel 10 MB and half of its start.
UNUSED = ("debugpy", "jedi", "parso")
sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]

try:
    import zmq
    from ipykernel.iostream import IOPubThread, OutStream
    from ipykernel.kernelapp import IPKernelApp
    from jupyter_client.session import Session
    from traitlets.config import Config
except ModuleNotFoundError as error:
    needs = f"{sys.executable} needs ipykernel among its installed packages: PYTHONPATH is not looked at"
    raise ModuleNotFoundError(f"{error}. {needs}") from error

# Fixed "ports": file name suffixes of the unix sockets.
SHELL, IOPUB, STDIN, CONTROL, HEARTBEAT = 1, 2, 3, 4, 5

# What a kernel and its first traceback import; shared by all when the fork server has it already.
_KERNEL_MODULES = (
    *("IPython.core.completerlib", "IPython.core.debugger", "IPython.core.oinspect", "IPython.extensions.storemagic"),
    *("executing", "http.server", "pdb", "pygments.formatters.terminal256", "pygments.styles.default", "stack_data"),
    *("tornado.locks", "tornado.platform.asyncio", "tornado.queues"),
)
_NOTE = "\n[output truncated: this call printed more than {limit} characters]\n"


class BoundedStream(OutStream):
    """stdout or stderr that swallows what one call prints beyond a limit."""

    limit = 1 << 20

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._written: dict[str, int] = {}
        super().__init__(*args, **kwargs)

    def write(self, string: str) -> int | None:
        if not isinstance(string, str):
            return super().write(string)
        if not self._is_master_process():
            # A forked child has no ZeroMQ; what it writes to the descriptor comes back through the parent's pipe.
            return os.write(self._original_stdstream_fd, string.encode(errors="replace"))
        call = str(self.parent_header.get("msg_id", ""))
        written = self._written.get(call, 0)
        if written > self.limit:
            return len(string)
        self._written = {call: written + len(string)}
        if written + len(string) > self.limit:
            super().write(string[: self.limit - written] + _NOTE.format(limit=self.limit))
        else:
            super().write(string)
        return len(string)

    def flush(self) -> None:
        if self._is_master_process():
            super().flush()


class CagedKernelApp(IPKernelApp):
    """A kernel that opens no TCP port, not even the one on which ipykernel hears its forked children."""

    iopub_port: int

    def init_iopub(self, context: zmq.Context[Any]) -> None:
        self.iopub_socket = context.socket(zmq.XPUB)
        self.iopub_socket.linger = 1000
        self.iopub_port = self._bind_socket(self.iopub_socket, self.iopub_port)
        self.configure_tornado_logger()
        self.iopub_thread = IOPubThread(self.iopub_socket, pipe=False, session=self.session)
        self.iopub_thread.start()
        self.iopub_socket = self.iopub_thread.background_socket


class BoundedKernelSession(Session):
    """Replaces a message that is too large to send by a short notice."""

    limit = 16 << 20

    def serialize(self, msg: dict[str, Any], ident: Any = None) -> list[bytes]:
        parts: list[bytes] = super().serialize(msg, ident)
        size = sum(len(p) for p in parts)
        if size > self.limit:
            logging.getLogger(__name__).warning("dropped a message of %d bytes", size)
            text = f"[output of {size} bytes dropped: the limit is {self.limit}]"
            msg = dict(msg, content=_smaller(msg["msg_type"], text))
            parts = super().serialize(msg, ident)
        return parts


def _smaller(kind: str, text: str) -> dict[str, Any]:
    if kind == "stream":
        return {"name": "stderr", "text": text}
    if kind in ("error", "execute_reply"):
        return {"ename": "OutputTooLarge", "evalue": text, "traceback": [text], "status": "error", "execution_count": 0}
    return {"data": {"text/plain": text}, "metadata": {}, "transient": {}, "execution_count": 0}


def preload(options: dict[str, Any]) -> None:
    """Imports in the fork server what conversations will want. Raises ImportError for a required module."""
    os.environ["MPLCONFIGDIR"] = options.get("cache", "/var/cache/python")
    os.environ["IPYTHONDIR"] = os.path.join(os.environ["HOME"], ".ipython")
    for name in options.get("required", ()):
        importlib.import_module(name)
    for name in (*_KERNEL_MODULES, *options.get("preload", ())):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "matplotlib" in sys.modules:
        matplotlib = sys.modules["matplotlib"]
        matplotlib.use("Agg")
        # First use builds caches of fonts and of text layout: pay once, here.
        import matplotlib.pyplot as plt

        figure = plt.figure()
        figure.gca().plot([0, 1])
        figure.canvas.draw()
        plt.close("all")
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    importlib.import_module("matplotlib_inline.backend_inline") if "matplotlib" in sys.modules else None


def run(options: dict[str, Any], argument: dict[str, Any], ready: Callable[[], None]) -> None:
    """Serves one kernel until killed. `argument`: `ip` (path prefix of the sockets) and `key` (signs the messages)."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the fork server's state is the same for every conversation
    BoundedStream.limit = options["max_output_chars"]
    BoundedKernelSession.limit = options["max_message_bytes"]
    config = Config()
    config.Session.key = argument["key"].encode()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.cache_size = 100
    config.CagedKernelApp.outstream_class = f"{__name__}.BoundedStream"
    config.IPCompleter.use_jedi = False
    app = CagedKernelApp(
        config=config,
        transport="ipc",
        ip=argument["ip"],
        connection_file=argument["ip"] + ".json",
        shell_port=SHELL,
        iopub_port=IOPUB,
        stdin_port=STDIN,
        control_port=CONTROL,
        hb_port=HEARTBEAT,
        log_level=logging.CRITICAL,
    )
    app.session = BoundedKernelSession(parent=app, key=argument["key"].encode(), username="kernel")
    app.initialize([])
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        # It copies there all that goes to the descriptors 1 and 2, which would fill the scratch space.
        os.dup2(null, cast(BoundedStream, stream)._original_stdstream_copy)
    app.shell.system = app.shell.system_raw  # `!command`; the default wants a terminal, and there is none
    if "matplotlib" in sys.modules:
        with contextlib.suppress(Exception):
            app.shell.enable_matplotlib("inline")
    ready()
    app.start()
