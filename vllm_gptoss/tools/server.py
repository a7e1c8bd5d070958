"""All tools of one server: started together, looked up by namespace, each on its own when it fails."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from vllm_gptoss.tools.browser.guard import Guard, host_matches, literal
from vllm_gptoss.tools.browser.page import estimate_tokens
from vllm_gptoss.tools.browser.settings import BrowserConfig
from vllm_gptoss.tools.config import ToolConfigError, ToolsPlan, first_problem, parse_spec
from vllm_gptoss.tools.gate import gated
from vllm_gptoss.tools.mcp.settings import McpServerConfig, checked_headers
from vllm_gptoss.tools.missing import reason
from vllm_gptoss.tools.protocol import Namespace, SessionOptions, ToolProvider, ToolSession
from vllm_gptoss.tools.service.settings import ServiceConfig
from vllm_gptoss.tools.slots import Slots

logger = logging.getLogger(__name__)


_OURS = frozenset(("connection", "content-length", "content-type", "host", "transfer-encoding", "upgrade"))


class NotAllowedError(Exception):
    """A request names an MCP server that this server does not connect to; the message has the fix."""


@dataclass(frozen=True)
class ToolServerOptions:
    """What the serving process brings: its environment, and the model's tokenizer for sizing pages."""

    environ: Mapping[str, str] | None = None
    count_tokens: Callable[[str], int] = estimate_tokens
    python_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options of the python tool that hold unless the operator sets them."""


class ToolServer:
    """The configured providers, in order. Use as `async with`, or `start` and `aclose`."""

    def __init__(self, providers: Sequence[ToolProvider], plan: ToolsPlan | None = None) -> None:
        self.plan = plan or ToolsPlan()
        limit = self.plan.max_running_calls
        # Every configured provider, available or not. Of two that offer one namespace, the first counts.
        self.providers = [gated(each, Slots(min(limit, each.at_once or limit))) for each in providers]
        self._reported: set[str] = set()

    @classmethod
    def from_spec(cls, spec: str, options: ToolServerOptions | None = None) -> ToolServer:
        """The server that `--tool-server spec` describes, not yet started. A tool with a missing package is off. Raises
        ToolConfigError: `spec`, or a file it names, is wrong; nothing about tools being down."""
        options = options or ToolServerOptions()
        environ = os.environ if options.environ is None else options.environ
        plan = parse_spec(spec, environ)
        providers = [
            _loaded(label or config.url or "mcp", _mcp, label, config, {"environ": environ}, plan.names)
            for label, config in plan.mcp
        ]
        if plan.service is not None:
            if plan.python is not None:
                logger.info("python runs on the tools service; this server starts no other")
            providers.append(_loaded("python", _service, plan.service, environ))
        # Last, so that a server that the operator labels `python` or `browser` takes a built-in tool's place.
        if plan.python is not None and plan.service is None:
            providers.append(_loaded("python", _python, {**options.python_defaults, **plan.python}))
        if plan.browser is not None:
            providers.append(_loaded("browser", _browser, plan.browser, environ, options.count_tokens))
        return cls(providers, plan)

    def shared_by(self, processes: int) -> None:
        """Logs what conversations lose where several API server processes each have these tools."""
        if processes > 1 and self.plan.python is not None and self.plan.service is None:
            logger.warning(
                "%d API server processes have a python tool each: a conversation that meets another one loses its "
                "variables and files, and the model is informed; --api-server-count 1 avoids it, or a tools service "
                "(docs/tools.md)",
                processes,
            )

    async def __aenter__(self) -> ToolServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Starts every tool at once. Never raises for one that is down; it is logged and retried later."""
        results = await asyncio.gather(*(provider.start() for provider in self.providers), return_exceptions=True)
        for provider, error in zip(self.providers, results, strict=True):
            if isinstance(error, Exception):
                logger.error("tool %s did not start", provider.name, exc_info=error)
        for provider in self.providers:
            if provider.unavailable:
                logger.warning("tool %s is off: %s", provider.name, provider.unavailable)
            else:
                names = [tool.name for namespace in provider.namespaces()[:1] for tool in namespace.tools]
                logger.info("tool %s is on: %s", provider.name, ", ".join(names or [provider.name]))
        self.namespaces()  # raises for names that are taken twice

    async def aclose(self) -> None:
        results = await asyncio.gather(*(provider.aclose() for provider in self.providers), return_exceptions=True)
        for provider, error in zip(self.providers, results, strict=True):
            if isinstance(error, Exception):
                logger.error("tool %s did not close", provider.name, exc_info=error)

    def namespaces(self) -> list[Namespace]:
        found: dict[str, Namespace] = {}
        for provider in self.providers:
            for namespace in provider.namespaces() if not provider.unavailable else ():
                if namespace.name not in found:
                    found[namespace.name] = namespace
                elif namespace.name not in self._reported:
                    self._reported.add(namespace.name)
                    logger.warning("two tools are called %s; the first configured server is used", namespace.name)
        return list(found.values())

    async def remote(self, tool: Mapping[str, Any]) -> ToolProvider:
        """The MCP server that a request's `mcp` tool names by `server_url`, connected; the caller closes it.

        `authorization` and `headers` live in this provider alone and end with it.

        Raises:
            NotAllowedError: the host is not one that the operator allowed, or a header is not one to pass on.
        """
        url = str(tool.get("server_url") or "")
        guard = self._judge(url)
        headers = {str(name): str(value) for name, value in (tool.get("headers") or {}).items()}
        if token := str(tool.get("authorization") or "").strip(" \t\r\n"):
            headers["Authorization"] = f"Bearer {token}"
        try:
            headers = checked_headers(headers)
        except ValueError as error:
            raise NotAllowedError(str(error)) from None
        if wrong := [name for name in headers if name.lower() in _OURS]:
            raise NotAllowedError(f"the header {wrong[0]} cannot be set by a request")
        requests = self.plan.requests
        config = McpServerConfig(
            url=url,
            kind="mcp",
            connections="shared",
            timeout_s=requests.timeout_s,
            connect_timeout_s=requests.connect_timeout_s,
            require_approval="never",  # the operator has no rule here: the request's counts
        )
        try:
            dial = {"guard": guard, "headers": headers, "environ": {}}
            inner = _mcp(str(tool.get("server_label") or ""), config, dial)
        except ImportError as error:
            raise NotAllowedError(f"this server cannot connect to MCP servers: {reason(error)}") from None
        provider = gated(inner, public=False)
        try:
            await provider.start()
        except BaseException:
            await provider.aclose()
            raise
        return provider

    def _judge(self, url: str) -> Guard:
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError as error:
            raise NotAllowedError(f"server_url is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not host or "${" in url:
            raise NotAllowedError("server_url must be an http or https URL")
        if parts.username is not None or parts.password is not None:
            raise NotAllowedError("server_url must not carry credentials; send them as `authorization`")
        host = str(literal(host) or host.rstrip("."))
        full = f"{host}:{port or (443 if parts.scheme == 'https' else 80)}"
        for allowed in self.plan.requests.allowed_hosts:
            if allowed in (host, full):
                return Guard([allowed])
            if allowed.startswith("*.") and host_matches(host, allowed):
                return Guard()
        raise NotAllowedError(
            f"this server does not connect to {host}; its operator can allow the host with `requests.allowed_hosts` "
            "in tools.yaml or GPTOSS_MCP_ALLOWED_HOSTS"
        )


def _loaded(name: str, make: Callable[..., ToolProvider], *args: Any) -> ToolProvider:
    """The result of `make`; if it cannot import a package, a replacement that names the package."""
    try:
        return make(*args)
    except ImportError as error:
        return _Missing(name, reason(error))


def _mcp(
    label: str, config: McpServerConfig, dial: Mapping[str, Any], taken: frozenset[str] = frozenset()
) -> ToolProvider:
    from vllm_gptoss.tools.mcp.provider import McpProvider
    from vllm_gptoss.tools.mcp.transport import Dialer

    return McpProvider(label, config, Dialer(config, **dial), taken=taken)


def _service(config: ServiceConfig, environ: Mapping[str, str]) -> ToolProvider:
    from vllm_gptoss.tools.service.nodes import ServiceProvider

    return ServiceProvider(config, environ)


def _browser(config: BrowserConfig, environ: Mapping[str, str], count_tokens: Callable[[str], int]) -> ToolProvider:
    from vllm_gptoss.tools.browser.provider import BrowserProvider

    return BrowserProvider(config, environ=environ, count_tokens=count_tokens)


def _python(options: Mapping[str, Any]) -> ToolProvider:
    """
    Raises:
        ToolConfigError: an option is wrong.
    """
    from vllm_gptoss.tools.python import PythonOptions, PythonProvider

    try:
        return PythonProvider(PythonOptions(**options))
    except ValidationError as error:
        raise ToolConfigError(first_problem(error, "python")) from error


class _Missing(ToolProvider):
    name = ""
    unavailable: str | None = None

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.unavailable = reason

    def namespaces(self) -> Sequence[Namespace]:
        return ()

    async def open(self, conversation_id: str, options: SessionOptions) -> ToolSession:
        raise RuntimeError(self.unavailable)
