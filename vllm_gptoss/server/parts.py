"""The parts of the endpoint plugin. A part is installed completely or not at all; vLLM then serves in its place.

vLLM calls `attach(app, args, settings)` before it builds its handlers, and `async start(engine_client, state, args)`
after. A part fails if a package is missing, or if vLLM has moved something.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute

from vllm_gptoss import fallback
from vllm_gptoss._vllm import compatibility, replaced
from vllm_gptoss.server.http import routes
from vllm_gptoss.settings import Settings, SettingsError
from vllm_gptoss.tools.missing import reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartKind:
    """A part before it is imported. `requested_by`: settings that a user gives only to have this part."""

    name: str
    module: str
    factory: str
    requested_by: tuple[str, ...] = ()
    variables: str = ""
    """The prefix of environment variables that configure this part alone."""
    check: str = ""
    """The part of `compatibility.PARTS` that must fit the installed vLLM."""

    def load(self) -> Any:
        if self.check and (why := compatibility.why_off(self.check)):
            raise fallback.UnavailableError(why)
        return getattr(importlib.import_module(self.module), self.factory)()

    def request(self, settings: Settings, environ: Mapping[str, str]) -> str | None:
        """The setting by which the user requests this part, or None."""
        named = [name for name in self.requested_by if name in settings.model_fields_set and getattr(settings, name)]
        own = [name for name in sorted(environ) if self.variables and name.startswith(self.variables)]
        return next((f"the setting {name!r} (GPTOSS_{name.upper()})" for name in named), next(iter(own), None))


CHAT = PartKind("chat completions", "vllm_gptoss.server.chat.endpoint", "ChatCompletions", ("parser",), check="parser")
RESPONSES = PartKind(
    "Responses API",
    "vllm_gptoss.server.responses.endpoint",
    "ResponsesEndpoint",
    ("endpoint", "tools", "store", "prompts"),
    "GPTOSS_RESPONSES_",
    check="endpoint",
)
KINDS = (
    PartKind("completions", "vllm_gptoss.server.chat.completions", "Completions"),
    CHAT,
    RESPONSES,
    PartKind("event loop watch", "vllm_gptoss.server.streaming.process_tuning", "Host"),
)


def failures() -> dict[str, str]:
    """The parts that cannot be imported, with the reason."""
    found = {}
    for kind in KINDS:
        try:
            importlib.import_module(kind.module)
        except Exception as error:
            found[kind.name] = reason(error)
    return found


@dataclass(frozen=True)
class _Installed:
    kind: PartKind
    part: Any
    routes: Sequence[BaseRoute]


class Parts:
    """The parts of one server."""

    def __init__(self, app: FastAPI, args: Namespace, settings: Settings) -> None:
        """Attaches every part that can be imported.

        Raises:
            SettingsError: a setting is wrong, or requests a part that failed.
        """
        self.app = app
        self._settings = settings
        self._before = list(app.router.routes)
        self.installed: list[_Installed] = []
        for kind in KINDS:
            if kind is not RESPONSES or settings.endpoint:
                self._attach(kind, args)

    def _attach(self, kind: PartKind, args: Namespace) -> None:
        there = self.app.router.routes
        before, restore = list(there), replaced.remember(self.app.router, args)
        try:
            part = kind.load()
            part.attach(self.app, args, self._settings)
        except Exception as error:
            restore()
            there[:] = before
            self._left_out(kind, self.app.state, error)
        else:
            ours = [route for route in there if not any(route is each for each in before)]
            self.installed.append(_Installed(kind, part, ours))

    async def start(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Starts every part; removes a part that fails, with its routes.

        Raises:
            SettingsError: as in `__init__`.
        """
        for each in [*self.installed]:
            restore = replaced.remember(state)
            try:
                await each.part.start(engine_client, state, args)
            except Exception as error:
                restore()
                routes.put_back(self.app, each.routes, self._before)
                self.installed.remove(each)
                self._left_out(each.kind, state, error)

    def _left_out(self, kind: PartKind, state: Any, error: Exception) -> None:
        if kind is CHAT:
            with contextlib.suppress(ImportError, AttributeError):  # vLLM has moved its parser: it was not replaced
                replaced.use_own_parser(state)
        if isinstance(error, SettingsError):
            raise error
        if request := kind.request(self._settings, os.environ):
            raise SettingsError(
                f"{request} needs the plugin's {kind.name}, which failed: {reason(error)}."
                " Without the setting, vLLM's own implementation is used."
            ) from error
        logger.warning(
            "The plugin's %s is off; vLLM's own implementation is used (%s). `vllm-gptoss doctor` checks all packages.",
            kind.name,
            reason(error),
        )
        logger.debug("The traceback:", exc_info=error)


def shadowed(parts: Parts) -> list[str]:
    """Method and path of each route of `parts` that the app never reaches, because another's route precedes it."""
    ours = {id(route) for each in parts.installed for route in each.routes}
    first: dict[str, bool] = {}
    lost = []
    for route in parts.app.router.routes:
        for method in sorted(getattr(route, "methods", None) or ()):
            name = f"{method} {getattr(route, 'path', '')}"
            if not first.setdefault(name, id(route) in ours) and id(route) in ours:
                lost.append(name)
    return lost
