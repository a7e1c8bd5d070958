"""Settings of the Responses endpoint, from `GPTOSS_RESPONSES_*` variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DAY = 86_400


@dataclass(frozen=True, slots=True)
class ResponsesConfig:
    """What an operator can set.

    store: SQLAlchemy URL, a file path, or `off`; empty for SQLite in the user's state directory
    retention: seconds that a response is kept; 0 for ever
    max_bytes: of all that is stored; the oldest go first
    max_response_bytes: of one response with its input
    tool_timeout: seconds that one tool call may take, behind the tools' own shorter limits
    secret: base64 of 32 bytes for encrypted reasoning; empty to make one and keep it in the store
    max_tool_rounds: tool calls of one response, even where the request sets no `max_tool_calls`
    heartbeat: seconds without a sign of life after which a background response counts as lost
    max_input_items: of one request
    strict_tools: the engine keeps calls to the offered tools and their schemas
    """

    store: str = ""
    retention: float = 30 * DAY
    max_bytes: int = 8 << 30
    max_response_bytes: int = 64 << 20
    tool_timeout: float = 900.0
    secret: str = ""
    max_tool_rounds: int = 128
    heartbeat: float = 30.0
    max_input_items: int = 10_000
    strict_tools: bool = True

    @classmethod
    def load(
        cls, environ: Mapping[str, str] | None = None, store: str = "", strict_tools: bool = True
    ) -> ResponsesConfig:
        """From the environment. A `store` that is given wins, and so does `strict_tools` when it is off.

        Raises:
            ValueError: a variable that must be a number is not.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, str | int | float] = {}
        for name, default in ((f, getattr(cls(), f)) for f in cls.__dataclass_fields__):
            raw = environ.get(f"GPTOSS_RESPONSES_{name.upper()}")
            if raw is None:
                continue
            if isinstance(default, bool):
                values[name] = raw.lower() not in ("0", "false", "no", "off")
                continue
            try:
                values[name] = type(default)(raw)
            except ValueError:
                raise ValueError(f"GPTOSS_RESPONSES_{name.upper()} must be a number, got {raw!r}") from None
        if store:
            values["store"] = store
        if not strict_tools:
            values["strict_tools"] = False
        return cls(**values)  # type: ignore[arg-type]

    @property
    def url(self) -> str | None:
        """The SQLAlchemy URL of the store; None when it is off."""
        if self.store == "off":
            return None
        if "://" in self.store:
            return _async_driver(self.store)
        path = Path(self.store) if self.store else default_path()
        return f"sqlite+aiosqlite:///{path.expanduser().absolute()}"


def _async_driver(url: str) -> str:
    scheme, rest = url.split("://", 1)
    drivers = {
        "sqlite": "sqlite+aiosqlite",
        "postgres": "postgresql+asyncpg",
        "postgresql": "postgresql+asyncpg",
    }
    return f"{drivers.get(scheme, scheme)}://{rest}"


def default_path() -> Path:
    """`$XDG_STATE_HOME/vllm-gptoss/responses.sqlite` (XDG Base Directory Specification)."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "vllm-gptoss" / "responses.sqlite"
