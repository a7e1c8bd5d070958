"""A notebook on standard streams: cells come in as lines of JSON, what they do goes out as frames.

A frame is a record separator, a JSON array [kind, body] and a newline; kinds and bodies are Jupyter's. What is not a
frame is text that something wrote past `sys.stdout`. Runs alone on CPython for WASI: no threads, signals, processes.
"""

from __future__ import annotations

import ast
import base64
import builtins
import importlib
import io
import json
import linecache
import os
import re
import sys
import time
import traceback
import types
from typing import Any

_FLUSH_S = 0.05
_CHUNK = 1 << 16
_MAGIC = re.compile(r"^%matplotlib\b.*$", re.MULTILINE)
_SHELL = re.compile(r"^[!%].*$", re.MULTILINE)
_NOTE = "\n[output truncated: this call printed more than {limit} characters]\n"
_IMAGES = (("_repr_png_", "image/png"), ("_repr_jpeg_", "image/jpeg"), ("_repr_svg_", "image/svg+xml"))


def send(kind: str, body: dict[str, Any]) -> None:
    """One frame, after what was printed before it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, CellOutput):
            stream.flush()
    _send(kind, body)


def _send(kind: str, body: dict[str, Any]) -> None:
    text = json.dumps([kind, body])
    if len(text) > CellOutput.max_message:
        size, limit = len(text), CellOutput.max_message
        text = json.dumps(["stream", {"name": "stderr", "text": f"[output of {size} bytes dropped: limit {limit}]\n"}])
    data = f"\x1e{text}\n".encode("utf-8", "surrogatepass")
    while data:
        data = data[os.write(1, data) :]


class CellOutput(io.TextIOBase):
    """stdout or stderr as frames; swallows what one call prints beyond `limit` characters."""

    limit = 1 << 20
    max_message = 16 << 20
    written = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self._parts: list[str] = []
        self._sent = -_FLUSH_S

    encoding = "utf-8"

    def begin(self) -> None:
        """A cell: it may print as much, and its first line goes out at once."""
        CellOutput.written = 0
        self._sent = -_FLUSH_S

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        left = CellOutput.limit - CellOutput.written
        CellOutput.written += len(text)
        if left >= 0:
            self._parts.append(text if len(text) <= left else text[:left] + _NOTE.format(limit=CellOutput.limit))
            if "\n" in text and time.monotonic() - self._sent > _FLUSH_S:
                self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._parts = "".join(self._parts), []
        for at in range(0, len(text), _CHUNK):
            _send("stream", {"name": self.name, "text": text[at : at + _CHUNK]})
        self._sent = time.monotonic()


def _bundle(value: Any) -> dict[str, Any]:
    data = {"text/plain": repr(value)}
    for method, media_type in _IMAGES:
        shown = getattr(value, method, None)
        picture = shown() if callable(shown) and not isinstance(value, type) else None
        if isinstance(picture, (bytes, str)):
            data[media_type] = base64.b64encode(picture).decode() if isinstance(picture, bytes) else picture
            break
    return data


def display(*values: Any, **_: Any) -> None:
    for value in values:
        if _is_figure(value):
            importlib.import_module("inline").display_figure(value)
        else:
            send("display_data", {"data": _bundle(value)})


def _is_figure(value: Any) -> bool:
    figures = sys.modules.get("matplotlib.figure")
    return figures is not None and isinstance(value, figures.Figure)


def _show(value: Any) -> None:
    if value is None:
        return
    builtins._ = value  # type: ignore[attr-defined]
    send("execute_result", {"data": _bundle(value)})


def _no_input(prompt: object = "") -> str:
    raise RuntimeError("input() is not there: nobody can type into this notebook")


def _compile(code: str, number: int) -> tuple[Any, Any]:
    """The cell's statements, and its last expression unless a semicolon ends it."""
    name = f"<cell {number}>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    tree: Any = compile(code, name, "exec", ast.PyCF_ONLY_AST)  # not ast.parse: it would be in every traceback
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)
    return compile(tree, name, "exec"), compile(last, name, "eval") if last else None


def _prepare(code: str) -> str:
    """Without what only IPython knows. Raises RuntimeError for what has no meaning here."""
    code = _MAGIC.sub("", code)
    try:
        ast.parse(code)
    except SyntaxError:
        if line := _SHELL.search(code):
            raise RuntimeError(f"{line[0]!r}: there are no programs and no magics here, only Python") from None
    return code


def _run(code: str, number: int, names: dict[str, Any]) -> dict[str, Any]:
    try:
        body, last = _compile(_prepare(code), number)
        exec(body, names)  # noqa: S102 - what a notebook is for, and where: see above
        if last is not None:
            _show(eval(last, names))  # noqa: S307
        if "matplotlib.pyplot" in sys.modules and "inline" in sys.modules:
            sys.modules["inline"].show()
    except SystemExit:
        return {"status": "ok", "payload": [{"source": "ask_exit"}]}
    except BaseException as error:
        told = _describe(error)
        send("error", told)
        return {"status": "error", "ename": told["ename"], "evalue": told["evalue"]}
    return {"status": "ok"}


def _describe(error: BaseException) -> dict[str, Any]:
    """Without the notebook's own frames, and never failing itself."""
    name = type(error).__name__
    try:
        frames = error.__traceback__
        while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell "):
            frames = frames.tb_next
        lines = "".join(traceback.format_exception(type(error), error, frames))
        return {"ename": name, "evalue": str(error), "traceback": [lines.rstrip("\n")]}
    except BaseException as second:
        return {"ename": name, "evalue": "", "traceback": [f"{name} (its description failed: {type(second).__name__})"]}


def _lines() -> Any:
    rest = b""
    while data := os.read(0, _CHUNK):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def main() -> None:
    """Settings first, then a cell per line, until the input ends."""
    lines = _lines()
    settings = json.loads(next(lines))
    CellOutput.limit, CellOutput.max_message = settings["max_output_chars"], settings["max_message_bytes"]
    os.environ.update(HOME="/tmp", TMPDIR="/tmp", MPLCONFIGDIR="/tmp/.matplotlib", MPLBACKEND="module://inline")  # noqa: S108
    os.chdir("/mnt/data")
    cells = types.ModuleType("__main__")
    vars(cells).update(__builtins__=builtins, display=display)
    sys.modules["__main__"] = cells
    builtins.input = _no_input
    sys.displayhook = _show
    for module in settings["required"]:
        importlib.import_module(module)
    outputs = CellOutput("stdout"), CellOutput("stderr")
    sys.stdout, sys.stderr = outputs
    _send("ready", {})
    for number, line in enumerate(lines, 1):
        request = json.loads(line)
        for output in outputs:
            output.begin()
        reply = _run(request["code"], number, vars(cells))
        send("reply", {"id": request["id"], "content": reply})
