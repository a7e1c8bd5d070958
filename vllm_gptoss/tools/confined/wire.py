"""The messages between the pool and a worker: one request and one answer, each after its length.

Request: header (MessagePack), payload. Answer: a status and MessagePack, which the pool decodes only into the job's
type. The pool compares each length with the caller's limit before it uses the length.
"""

from __future__ import annotations

import struct

import msgspec

REQUEST = struct.Struct(">II")  # bytes of the header, bytes of the payload
ANSWER = struct.Struct(">BI")  # status, bytes of what follows
DONE, REFUSED, FAILED = 0, 1, 2


class JobHeader(msgspec.Struct):
    """The trusted half of a request. Sizes in bytes, times in seconds."""

    job: str
    options: dict[str, object]
    cpu_s: int
    memory: int
    nice: int = 0


class Hello(msgspec.Struct):
    """A worker's first message, with a descriptor of itself: which walls this host does not have, or its failure."""

    missing: list[str] = []
    error: str = ""
