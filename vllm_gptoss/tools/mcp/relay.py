"""Between a stdio server and the `mcp` package, which reads lines of any length on the event loop: only lines that fit.

Run as `python -I relay.py MAX_BYTES command…`. The command has our stdin and stderr; its stdout comes through here,
line by line. One that is too long, or would have too large a tree, becomes an error for the same request, and nothing
is lost. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "confined"))

from json_tree import json_problem  # type: ignore[import-not-found]

_CHUNK = 1 << 16
_ID = re.compile(rb'"id"\s*:\s*(\d{1,18}|"[^"\\]{1,100}")')
_NEAR = 1024  # bytes at either end of a message among which its id is


def main(arguments: list[str]) -> int:
    limit, command = int(arguments[0]), arguments[1:]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for line in lines(process.stdout.fileno(), limit):
                _write(line)
        except BrokenPipeError:
            pass
        os.close(1)  # the server's end of the conversation; its process is ended by our parent
    return process.returncode


def lines(fd: int, limit: int) -> Iterator[bytes]:
    """Lines with their ends, each one fit to be parsed."""
    parts: list[bytes] = []
    size = 0
    while chunk := os.read(fd, _CHUNK):
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            yield _fit(b"".join([*parts, piece]), size + len(piece), limit)
            parts, size = [], 0
        size += len(rest)
        parts.append(rest)
        if size > limit + _CHUNK:  # of what is too long, keep both ends
            joined = b"".join(parts)
            parts = [joined[:_NEAR], joined[-_NEAR:]]
    if size:
        yield _fit(b"".join(parts), size, limit)


def _fit(line: bytes, size: int, limit: int) -> bytes:
    if size > limit:
        return _refusal(line, f"it is larger than {limit} bytes")
    if problem := json_problem(line):
        return _refusal(line, problem)
    return line + b"\n"


def _refusal(line: bytes, problem: str) -> bytes:
    print(f"vllm-gptoss: an answer of an MCP server was not read: {problem}", file=sys.stderr, flush=True)
    found = _ID.search(line[:_NEAR]) or _ID.search(line[-_NEAR:])
    if found is None:
        return b""
    error = {"code": -32603, "message": f"the answer was not read: {problem}"}
    return b'{"jsonrpc":"2.0","id":%s,"error":%s}\n' % (found[1], json.dumps(error).encode())


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
