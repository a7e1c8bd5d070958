"""One MCP server's configuration, and how its secrets come from the environment."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, model_validator

from vllm_gptoss.tools.protocol import LABEL, RESERVED

Approval = Literal["always", "never"]
Transport = Literal["auto", "streamable_http", "sse", "stdio"]

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")


class MissingVariableError(ValueError):
    """A configuration value names an environment variable that is not set."""


def expand(text: str, environ: Mapping[str, str]) -> str:
    """`text` with each `${NAME}` replaced. Raises MissingVariableError: NAME is not set."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in environ:
            raise MissingVariableError(f"the environment variable {match[1]} is not set")
        return environ[match[1]]

    return _VARIABLE.sub(value, text)


class ApprovalRules(BaseModel, extra="forbid"):
    """Tools that need a person's word before each call, and tools that never do; others do."""

    always: list[str] = []
    never: list[str] = []


class OAuthConfig(BaseModel, extra="forbid"):
    """OAuth 2.1, its secrets named by environment variables; the token endpoint is discovered (RFC 9728, RFC 8414).

    With a refresh token that a person got once (RFC 6749 §6), else with client credentials (§4.4).
    """

    client_id_env: str
    client_secret_env: str = ""
    refresh_token_env: str = ""
    issuer: str = Field(description="the authorization server; credentials are sent nowhere else")
    scope: str | None = None

    @model_validator(mode="after")
    def _something_to_show(self) -> Self:
        if not self.client_secret_env and not self.refresh_token_env:
            raise ValueError("give `client_secret_env`, `refresh_token_env`, or both")
        return self


class McpServerConfig(BaseModel, extra="forbid"):
    """One entry of `mcp` in tools.yaml. `${NAME}` in `url`, `headers`, `args` and `env` comes from the environment."""

    url: str = ""
    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: Path | None = None
    transport: Transport = "auto"
    protocol: str = Field(
        default="auto", description="auto, legacy (initialize handshake), or a version such as 2026-07-28"
    )
    headers: dict[str, str] = {}
    authorization_env: str = Field(default="", description="variable with the bearer token")
    oauth: OAuthConfig | None = None
    ca_file: Path | None = Field(default=None, description="certificates to trust besides the usual ones, PEM")
    kind: Literal["auto", "mcp", "python", "browser"] = "auto"
    allowed_tools: list[str] | None = None
    require_approval: Approval | ApprovalRules = "never"
    connections: Literal["auto", "shared", "per_conversation"] = "auto"
    connect_timeout_s: float = Field(default=10.0, gt=0)
    timeout_s: float = Field(default=120.0, gt=0)
    refresh_s: float = Field(
        default=300.0, gt=0, description="how old a list of tools may be before it is requested again"
    )
    max_output_chars: int = Field(default=60_000, gt=0)
    max_unasked_per_s: float = Field(
        default=50.0, gt=0, description="notifications a second, a request counting five; more wait, then it ends"
    )
    check: dict[str, Any] | None = Field(default=None, description="`{tool, arguments}` that `tools check` may call")

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if bool(self.url) == bool(self.command):
            raise ValueError("give exactly one of `url` and `command`")
        if self.url and urlsplit(self.url).scheme not in ("http", "https") and "${" not in self.url:
            raise ValueError(f"`url` must begin with http:// or https://, not {self.url!r}")
        if self.command and self.transport not in ("auto", "stdio"):
            raise ValueError("a `command` speaks stdio")
        if self.url and self.transport == "stdio":
            raise ValueError("stdio needs a `command`")
        if self.oauth and self.authorization_env:
            raise ValueError("give one of `oauth` and `authorization_env`")
        if self.ca_file and not self.url:
            raise ValueError("`ca_file` is for a `url`")
        return self

    @property
    def wire(self) -> Literal["streamable_http", "sse", "stdio"]:
        """The transport: the configured one, else stdio for commands, SSE for paths ending in /sse."""
        if self.transport != "auto":
            return self.transport
        if self.command:
            return "stdio"
        return "sse" if urlsplit(self.url).path.rstrip("/").endswith("/sse") else "streamable_http"

    def needs_approval(self, tool: str) -> bool:
        rules = self.require_approval
        if isinstance(rules, ApprovalRules):
            return tool in rules.always or tool not in rules.never
        return rules == "always"


def from_command(line: str, **values: Any) -> McpServerConfig:
    """The stdio server that `line` starts, split as a shell would. Raises ValueError: `line` is empty or its quotes are
    not closed."""
    words = shlex.split(line)
    if not words:
        raise ValueError("stdio: needs a command")
    return McpServerConfig(command=words[0], args=words[1:], **values)


def check_name(name: str, kind: str = "auto") -> None:
    """
    Raises:
        ValueError: no tool could be called by this namespace name.
    """
    if not LABEL.fullmatch(name):
        raise ValueError("the model cannot call a tool by this name; use letters, digits, `_`, `-` and `.`")
    if name in RESERVED and not (name in ("python", "browser") and kind in ("auto", name)):
        raise ValueError("this name means something else to the model; choose another")


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """`headers` without blanks around their values, such as the line break at the end of a token's file. Raises
    ValueError: HTTP does not allow a name or value; the message names the header and never shows the value."""
    clean = {name: value.strip(" \t\r\n") for name, value in headers.items()}
    for name, value in clean.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"the header {name!a} has characters that HTTP does not allow")
    return clean


def bearer(config: McpServerConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The headers of every request to the server. Raises MissingVariableError: a variable they name is not set;
    ValueError: as `checked_headers`."""
    headers = {name: expand(value, environ) for name, value in config.headers.items()}
    if config.authorization_env:
        headers["Authorization"] = "Bearer " + expand(f"${{{config.authorization_env}}}", environ).strip(" \t\r\n")
    return checked_headers(headers)
