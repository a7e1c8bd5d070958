"""What a server and a tools service exchange in addition to MCP's fields, in `_meta`."""

from __future__ import annotations

import hashlib
import logging
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_gptoss.tools.protocol import ID

logger = logging.getLogger(__name__)

ASKED, ANSWERED = "vllm-gptoss/asked", "vllm-gptoss/answered"
"""Keys of `_meta` in a call and in its result."""

MAX_FILES = 1000
"""Files of one call."""

M = TypeVar("M", bound=BaseModel)

_ID = ID.pattern
_HEX = r"([0-9a-f]{32})?"


class Asked(BaseModel, extra="ignore", frozen=True):
    """The server's data about the conversation. `owner`: the user as a hash; `ran`: whether the conversation ran
    python before; `container`: its last container; `call`: the last call's name, empty without one, None if unknown;
    `seed`: for a new container's id. Older nodes ignore the last two."""

    owner: str = Field(default="", pattern=f"^{_ID}$")
    ran: bool = False
    container: str = Field(default="", pattern=f"^{_ID}$")
    call: str | None = Field(default=None, pattern=f"^{_HEX}$")
    seed: str = Field(default="", pattern=f"^{_HEX}$")


class KeptFile(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    file_id: str = Field(pattern=f"^{_ID}$")
    filename: str = Field(max_length=8192)
    bytes: int = Field(ge=0)


class Listed(KeptFile):
    media_type: str = Field(max_length=200)
    created_at: int


class Answered(BaseModel, extra="ignore", frozen=True):
    """A result's data beyond its content. `error` is a `ToolError.type`; `call` names the call, where it ran."""

    container: str = Field(default="", pattern=f"^{_ID}$")
    error: str = Field(default="", pattern=r"^[a-z_]{0,40}$")
    call: str = Field(default="", pattern=f"^{_HEX}$")
    files: list[KeptFile] = Field(default=[], max_length=MAX_FILES)


def container_id(seed: str) -> str:
    """The id of the container that is made of a server's `seed`; empty without one.

    A server can thus name the id before any node has made the container, and no caller can claim another's container:
    clients see its id and never its seed.
    """
    return f"cntr_{hashlib.sha256(seed.encode()).hexdigest()[:32]}" if seed else ""


def asked(meta: Any) -> Asked | None:
    """The caller's data, or None where it is not our server or is malformed."""
    return _read(Asked, meta, ASKED)


def answered(meta: Any) -> Answered | None:
    return _read(Answered, meta, ANSWERED)


def _read(kind: type[M], meta: Any, key: str) -> M | None:
    value = meta.get(key) if isinstance(meta, dict) else None
    if value is None:
        return None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        logger.warning("tools service: %s is not read: %s", key, error.errors()[0]["msg"])
        return None
