"""How strongly a program can be isolated here: one row per way, the strongest first, and the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import Gauge

from vllm_gptoss.tools.sandbox import bubblewrap, interpreter
from vllm_gptoss.tools.sandbox.launcher import IsolationError, SandboxError

from . import jupyter, portable
from .messages import KernelMessage
from .options import PythonOptions

logger = logging.getLogger(__name__)

TIER = Gauge("gptoss_python_tier", "1 for the python tool's tier of isolation", ["tier"], multiprocess_mode="livemax")


class Client(Protocol):
    async def execute(self, code: str, on_output: Callable[[KernelMessage], None]) -> KernelMessage: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tier:
    """A way to isolate. `make` and `connect` raise SandboxError; `missing` returns, untried, why it is not possible.

    `make(options)` returns a launcher that has been tried, `connect(options, sandbox)` a `Client`. Both are typed by
    their tier alone: a launcher's sandboxes go to the `connect` of the same row only.
    """

    name: str
    what: str
    make: Callable[[PythonOptions], Awaitable[Any]]
    connect: Callable[[PythonOptions, Any], Awaitable[Client]]
    missing: Callable[[], str | None] = lambda: None


NAMESPACES = Tier("namespaces", "own namespaces, warm fork server", jupyter.make_namespaces, jupyter.connect)
BUBBLEWRAP = Tier(
    "bubblewrap",
    "bubblewrap's namespaces; a conversation starts slower and shares no memory",
    jupyter.make_bubblewrap,
    jupyter.connect,
    lambda: None if bubblewrap.find() else "bubblewrap (bwrap) is not installed",
)
PORTABLE = Tier(
    "portable",
    "WebAssembly without namespaces: no programs, threads, sockets or `!` commands, packages are those built in, slower"
    " arithmetic, and a call that times out loses its variables",
    portable.make,
    portable.connect,
    interpreter.missing,
)
HOST = Tier("host", "NO isolation", jupyter.make_host, jupyter.connect)

TIERS = (NAMESPACES, BUBBLEWRAP, PORTABLE)


@dataclass(frozen=True, slots=True)
class TierChoice:
    """The tier that works here, its launcher, and why none before it does."""

    tier: Tier
    launcher: Any
    reason: str


async def choose(options: PythonOptions) -> TierChoice:
    """The tier that `options` name, or the first that this host allows. Raises SandboxError: no tier is allowed, with
    all reasons; or one is and fails for another reason, such as an option, which no weaker tier shall cover up."""
    if options.dangerously_run_python_on_host:
        logger.warning("python runs ON THE HOST without isolation, as dangerously_run_python_on_host requires")
        return TierChoice(HOST, await HOST.make(options), "dangerously_run_python_on_host")
    for tier in TIERS:
        if tier.name == options.launcher:
            return TierChoice(tier, await tier.make(options), f"`launcher: {tier.name}`")
    reasons: list[str] = []
    for tier in TIERS:
        try:
            if (why := tier.missing()) is None:
                choice = TierChoice(tier, await tier.make(options), "; ".join(reasons))
                if reasons:
                    logger.warning("python: using %s (%s), because %s", tier.name, tier.what, choice.reason)
                return choice
        except SandboxError as error:
            why = str(error)
            if not isinstance(error, IsolationError):
                raise SandboxError("; ".join([*reasons, f"{tier.name}: {why}"])) from error
        reasons.append(f"{tier.name}: {why}")
    raise SandboxError("; ".join(reasons))


async def diagnose(options: PythonOptions) -> tuple[Tier | None, str]:
    """The tier that would be used, with the reason, or None with the reason. Starts the tier and closes it again."""
    try:
        choice = await choose(options)
    except (SandboxError, OSError) as error:
        return None, str(error)
    await choice.launcher.aclose()
    return choice.tier, choice.reason
