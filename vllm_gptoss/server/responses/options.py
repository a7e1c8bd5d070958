"""The operator's options of the Responses endpoint: `GPTOSS_RESPONSES_*` variables."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from vllm_gptoss.settings import SettingsError

DAY = 86_400
PREFIX = "GPTOSS_RESPONSES_"


class ResponsesOptions(BaseSettings):
    """Field names are the variables' names after `GPTOSS_RESPONSES_`; constructor arguments win over variables.
    store, strict_tools, prompts and ui are the plugin's settings (settings.py).

    store: SQLAlchemy URL, a file path, or `off`; empty for SQLite in the user's state directory
    retention: seconds until a response is deleted; 0 for never
    max_bytes, max_responses, max_conversations, max_items: of all stored data; data of the largest key is evicted
    key_bytes, key_responses, key_conversations, key_items: of one API key's data; 0 bytes for half of `max_bytes`
    max_response_bytes: of one response with its input
    tool_timeout: seconds that one tool call may take; the tools' own limits are shorter
    secret: base64 of 32 bytes for encrypted reasoning; empty to generate one in the store
    max_tool_rounds: tool calls of one response, even where the request sets no `max_tool_calls`
    heartbeat: seconds without an update from a server after which its background responses count as lost, and its
      conversations are unlocked
    key_waiting, max_waiting: transactions of one API key, and of all, that wait for the store, on one server
    max_input_items: of one request
    max_background: background responses of one API key that have not ended, on one server
    total_background: the same, of all keys
    running_background: background responses of one API key that run at once, on one server; the others are queued
    max_sockets: WebSockets of one API key, on one server
    total_sockets: the same, of all keys
    strict_tools: the engine keeps calls to the offered tools and their schemas
    prompts: a YAML file of prompt templates, or a folder of them; empty for none
    ui: serve the web page
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True)

    store: str = ""
    retention: float = 30 * DAY
    max_bytes: int = 8 << 30
    max_responses: int = 2_000_000
    max_conversations: int = 200_000
    max_items: int = 10_000_000
    key_bytes: int = 0
    key_responses: int = 500_000
    key_conversations: int = 50_000
    key_items: int = 2_000_000
    max_response_bytes: int = 64 << 20
    tool_timeout: float = 900.0
    secret: str = ""
    max_tool_rounds: int = 128
    heartbeat: float = 30.0
    key_waiting: int = 2_000
    max_waiting: int = 8_000
    max_input_items: int = 10_000
    max_background: int = 64
    total_background: int = 512
    running_background: int = 16
    max_sockets: int = 64
    total_sockets: int = 1024
    strict_tools: bool = True
    prompts: str = ""
    ui: bool = False

    @classmethod
    def load(cls, store: str = "", strict_tools: bool = True, prompts: str = "", ui: bool = False) -> ResponsesOptions:
        """Reads all options but the arguments from the environment; the arguments are settings of the plugin.

        Raises:
            SettingsError: a variable has an invalid value; the message names the variable.
        """
        try:
            return cls(store=store, strict_tools=strict_tools, prompts=prompts, ui=ui)
        except ValidationError as error:
            problem = error.errors()[0]
            name = f"{PREFIX}{str(problem['loc'][0]).upper()}"
            raise SettingsError(f"{name}={problem['input']!r}: {problem['msg']}") from None

    @property
    def bytes_of_key(self) -> int:
        """Bytes that one API key may store."""
        return self.key_bytes or self.max_bytes // 2

    @property
    def url(self) -> str | None:
        """The SQLAlchemy URL of the store; None when it is off."""
        if self.store == "off":
            return None
        if "://" in self.store:
            return _with_driver(self.store)
        path = Path(self.store) if self.store else default_path()
        return f"sqlite:///{path.expanduser().absolute()}"


def _with_driver(url: str) -> str:
    """`url` with a driver of this package, also in place of SQLAlchemy's asynchronous ones. asyncpg names TLS `ssl`,
    and has a cache of prepared statements."""
    scheme, rest = url.split("://", 1)
    if scheme in ("postgres", "postgresql", "postgresql+asyncpg", "postgresql+psycopg_async"):
        rest = re.sub(r"(?<=[?&])ssl=", "sslmode=", rest)
        return "postgresql+psycopg://" + re.sub(r"(?<=[?&])prepared_statement_cache_size=\w*&?", "", rest).rstrip("?&")
    return f"{scheme.replace('+aiosqlite', '')}://{rest}"


def default_path() -> Path:
    """`$XDG_STATE_HOME/vllm-gptoss/responses.sqlite` (XDG Base Directory Specification)."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "vllm-gptoss" / "responses.sqlite"
