"""Bytes as they came off a wire: one content encoding, undone in bounded steps."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from vllm_gptoss.tools.confined.jobs import Refused, job
from vllm_gptoss.tools.confined.json_tree import MAX_NODES, json_problem

ACCEPT_ENCODING = "gzip, deflate"
"""The encodings that `undone` decodes, for request headers."""

SMALL = 64 << 10
"""Bytes of JSON that a server may parse with any content: `[],[]` to the end takes 2 ms and 2 MiB."""

_STEP = 64 << 10


class Undoing:
    """One content encoding, undone step by step. Raises Refused for another than `ACCEPT_ENCODING` names, or two."""

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower().removeprefix("x-")
        if name not in ("", "identity", "gzip", "deflate"):
            what = "encoded more than once" if "," in name else f"encoded as {name[:40]!r}, which was not requested"
            raise Refused(f"the content is {what}")
        self._name = name
        self._inner: zlib._Decompress | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The decoded bytes of `data`, at most 64 KiB at a time, so that the caller can stop. Raises Refused."""
        if self._name in ("", "identity"):
            for at in range(0, len(data), _STEP):
                yield data[at : at + _STEP]
            return
        try:
            while data:
                if self._inner is None or (self._inner.eof and self._name == "gzip"):
                    self._inner = self._new(data)
                part = self._inner.decompress(data, _STEP)
                data = self._inner.unconsumed_tail or self._inner.unused_data
                if part:
                    yield part
                if self._inner.eof and self._name != "gzip":
                    return
        except zlib.error as error:
            raise Refused(f"the {self._name} content cannot be decompressed: {error}") from None

    def _new(self, data: bytes) -> zlib._Decompress:
        if self._name == "gzip":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        zlib_header = len(data) > 1 and data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
        return zlib.decompressobj(zlib.MAX_WBITS if zlib_header else -zlib.MAX_WBITS)


def undone(data: bytes, encoding: str, limit: int) -> tuple[bytes, bool]:
    """At most `limit` bytes of the content, and whether there was more. Raises Refused."""
    content = bytearray()
    for part in Undoing(encoding).feed(data):
        content += part
        if len(content) > limit:
            return bytes(content[:limit]), True
    return bytes(content), False


@job
def json_content(payload: bytes, *, encoding: str = "", max_bytes: int, max_nodes: int = MAX_NODES) -> bytes:
    """The JSON document that `payload` is once its content encoding is undone: its tree is small enough to be built."""
    content, cut = undone(payload, encoding, max_bytes)
    if cut:
        raise Refused(f"the answer is larger than {max_bytes} bytes")
    if problem := json_problem(content, max_nodes):
        raise Refused(f"the answer cannot be read: {problem}")
    return content
