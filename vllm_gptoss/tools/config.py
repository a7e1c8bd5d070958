"""What `--tool-server` accepts, and tools.yaml, as checked configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from vllm_gptoss.tools.browser.guard import host_entry
from vllm_gptoss.tools.browser.settings import BrowserConfig
from vllm_gptoss.tools.mcp.settings import McpServerConfig, check_name, from_command
from vllm_gptoss.tools.service.settings import ServiceConfig

HELP = (
    "`demo`, `host:port`, `http(s)://…`, `service:http(s)://…`, `stdio:command`, or the path of a .yaml file, joined by"
    " commas"
)


class ToolConfigError(ValueError):
    """The configuration cannot be used; the message names the key and the fix."""


class RemoteConfig(BaseModel, extra="forbid"):
    """MCP servers that requests may name by `server_url`. None, unless hosts are listed."""

    allowed_hosts: list[str] = Field(
        default=[], description="`host`, `host:port` or `*.domain`; a name listed in full may be a private address"
    )
    timeout_s: float = Field(default=60.0, gt=0)
    connect_timeout_s: float = Field(default=10.0, gt=0)

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, entries: list[str]) -> list[str]:
        return [host_entry(entry, wildcard=True) for entry in entries]


class ToolsConfig(BaseModel, extra="forbid"):
    python: dict[str, Any] | bool = Field(default=False, description="true, or the python tool's options")
    browser: BrowserConfig | bool = False
    service: ServiceConfig | None = Field(default=None, description="the python tool on other machines")
    mcp: dict[str, McpServerConfig] = {}
    requests: RemoteConfig = RemoteConfig()
    max_running_calls: int = Field(default=64, gt=0, description="calls of one tool that run at once")


@dataclass(frozen=True, slots=True)
class ToolsPlan:
    """The tools to start. `mcp`: pairs of label and server; an empty label means the server's own name."""

    python: dict[str, Any] | None = None
    browser: BrowserConfig | None = None
    mcp: list[tuple[str, McpServerConfig]] = field(default_factory=list)
    requests: RemoteConfig = field(default_factory=RemoteConfig)
    max_running_calls: int = 64
    service: ServiceConfig | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names that the operator gave out: no server takes one of them by calling itself so."""
        builtin = {"python": self.service or self.python, "browser": self.browser}
        return frozenset(
            [*(label for label, _ in self.mcp if label), *(n for n, tool in builtin.items() if tool is not None)]
        )


def parse_spec(spec: str, environ: Mapping[str, str] = os.environ) -> ToolsPlan:
    """The plan that `spec` describes. Raises ToolConfigError: a part has no accepted form, or a file in it cannot be
    used."""
    plan = ToolsPlan(requests=_requests(environ))
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    if not parts:
        raise ToolConfigError(f"--tool-server is empty; give {HELP}")
    for part in parts:
        plan = _add(plan, part)
    return plan


def _requests(environ: Mapping[str, str]) -> RemoteConfig:
    hosts = environ.get("GPTOSS_MCP_ALLOWED_HOSTS", "")
    try:
        return RemoteConfig(allowed_hosts=[host.strip() for host in hosts.split(",") if host.strip()])
    except ValidationError as error:
        raise ToolConfigError(f"GPTOSS_MCP_ALLOWED_HOSTS: {first_problem(error)}") from error


def _add(plan: ToolsPlan, part: str) -> ToolsPlan:
    python, browser, servers = plan.python, plan.browser, [*plan.mcp]
    if part in ("demo", "python", "browser"):
        python = python or {} if part != "browser" else python
        browser = browser or BrowserConfig() if part != "python" else browser
    elif part.endswith((".yaml", ".yml")):
        return _merge(plan, load(Path(part)), part)
    elif part.startswith("service:"):
        return replace(plan, service=_service(plan, part.removeprefix("service:")))
    elif part.startswith("stdio:"):
        try:
            servers.append(("", from_command(part.removeprefix("stdio:"), kind="mcp")))
        except ValueError as error:
            raise ToolConfigError(f"{part!r}: {error}") from error
    elif part.startswith(("http://", "https://")):
        servers.append(("", _checked(part, url=part, kind="mcp")))
    else:
        servers.append(("", _host_and_port(part)))
    return replace(plan, python=python, browser=browser, mcp=servers)


def _service(plan: ToolsPlan, node: str) -> ServiceConfig:
    """The service with one node more: each `service:` names one."""
    nodes = [*(plan.service.nodes if plan.service else []), node]
    try:
        return ServiceConfig(**{**(plan.service.model_dump() if plan.service else {}), "nodes": nodes})
    except ValidationError as error:
        raise ToolConfigError(f"'service:{node}': {first_problem(error)}") from error


def _host_and_port(part: str) -> McpServerConfig:
    """Upstream's form: an MCP server over SSE at `http://host:port/sse`. It alone may be `python` by its own word."""
    try:
        port = urlsplit(f"//{part}").port
    except ValueError:
        port = None
    if port is None or "/" in part or " " in part:
        raise ToolConfigError(f"{part!r} is not a tool server; give {HELP}")
    return _checked(part, url=f"http://{part}/sse", transport="sse")


def _checked(part: str, **values: Any) -> McpServerConfig:
    try:
        return McpServerConfig(**values)
    except ValidationError as error:
        raise ToolConfigError(f"{part!r}: {first_problem(error)}") from error


def _merge(plan: ToolsPlan, config: ToolsConfig, source: str) -> ToolsPlan:
    twice = {label for label, _ in plan.mcp if label} & set(config.mcp)
    if twice:
        raise ToolConfigError(f"{source}: mcp.{min(twice)} is configured twice")
    python, browser = plan.python, plan.browser
    if config.python is not False:
        python = {} if config.python is True else config.python
    if config.browser is not False:
        browser = BrowserConfig() if config.browser is True else config.browser
    hosts = [*plan.requests.allowed_hosts, *config.requests.allowed_hosts]
    requests = config.requests.model_copy(update={"allowed_hosts": hosts})
    servers = [*plan.mcp, *config.mcp.items()]
    service = config.service or plan.service
    return ToolsPlan(python, browser, servers, requests, config.max_running_calls, service)


def load(path: Path) -> ToolsConfig:
    """The configuration in the file `path`; paths in it are relative to its folder. Raises ToolConfigError: there is no
    such file, it is no YAML, or a key in it is wrong; the message names the key."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ToolConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ToolConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ToolConfigError(f"{path}: the top level must be a mapping with python, browser, service, mcp or requests")
    data = {
        key: {} if value is None and key == "mcp" else True if value is None else value for key, value in data.items()
    }
    try:
        config = ToolsConfig.model_validate(data)
    except ValidationError as error:
        raise ToolConfigError(f"{path}: {first_problem(error)}") from error
    for name, server in config.mcp.items():
        try:
            check_name(name, server.kind)
        except ValueError as error:
            raise ToolConfigError(f"{path}: mcp.{name}: {error}") from None
    return _anchored(config, path.parent)


def _anchored(config: ToolsConfig, folder: Path) -> ToolsConfig:
    browser = config.browser
    if isinstance(browser, BrowserConfig) and browser.documents and not browser.documents.is_absolute():
        browser = browser.model_copy(update={"documents": folder / browser.documents})
    servers = {name: _anchored_server(server, folder) for name, server in config.mcp.items()}
    service = config.service
    if service and service.ca_file:
        service = service.model_copy(update={"ca_file": folder / service.ca_file})
    return config.model_copy(update={"browser": browser, "mcp": servers, "service": service})


def _anchored_server(server: McpServerConfig, folder: Path) -> McpServerConfig:
    if server.command:
        return server.model_copy(update={"cwd": folder / (server.cwd or "")})
    return server.model_copy(update={"ca_file": folder / server.ca_file}) if server.ca_file else server


def first_problem(error: ValidationError, *above: str) -> str:
    """The first problem, with the key as written in the file; `above` are keys that the error does not know."""
    problem = min(error.errors(), key=lambda e: (e["type"] == "bool_type", -len(e["loc"])))
    names = [
        *above,
        *(str(p) for p in problem["loc"] if not str(p).startswith(("function-", "bool", "dict[", "BrowserConfig"))),
    ]
    where = ".".join(names)
    what = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        what = "there is no such key"
    return f"{where}: {what}" if where else what
