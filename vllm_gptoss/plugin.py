"""vLLM's entry points: `register()` in every process, `GptOssEndpoint` in the API server.

vLLM ignores an import error of this module and serves the in-tree model. An exception in `register()` would end every
vLLM process, also of other models. So this module imports nothing heavy, `register()` never raises, and `doctor` and
the start-up line prove which parts are active.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import multiprocessing
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import compatibility
from vllm_gptoss.engine import parent_death, spec
from vllm_gptoss.settings import ChoiceError, Settings, SettingsError
from vllm_gptoss.version import __version__

ENDPOINT_GROUP = "vllm.endpoint_plugins"
OTHER_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
NAME = "gptoss"

COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
FOR_WORKERS = ("GPTOSS", "GPTOSS_EXPERTS", "GPTOSS_HOST", "GPTOSS_LAYERS")
"""The settings that a worker reads. Other settings may hold secrets."""


def _quantization() -> type:
    from vllm_gptoss.engine.experts.config import GptOssQuantConfig

    return GptOssQuantConfig


WORKER = "vllm_gptoss.engine.runner.worker.GptOssWorker"
SCHEDULER = "vllm_gptoss.engine.runner.scheduler.GptOssScheduler"


def _use_runner() -> None:
    from vllm_gptoss._vllm import runner

    runner.use_classes(spec.ARCHITECTURE, WORKER, SCHEDULER, _wants_runner, _graph_sizes)


def _wants_runner(config: Any) -> bool:
    """Called once, in the process that makes the `VllmConfig`; the engine and its worker read both classes from it.

    Raises:
        ChoiceError: a setting names kernels of a part that this vLLM disables, or a runner that cannot run.
        SettingsError: a setting is wrong.
    """
    from vllm_gptoss import fallback, startup_line
    from vllm_gptoss._vllm import runner

    if _vllm.variable("VLLM_USE_RUST_FRONTEND"):
        _vllm.init_logger("vllm.gptoss").warning(RUST)
    settings = Settings.load(config.additional_config)
    for name in ("experts", "layers"):
        chosen = getattr(settings, name)
        if chosen not in ("auto", "upstream") and (why := compatibility.why_off("engine")):
            raise ChoiceError(f"{name}={chosen} needs the plugin's model, which is off: {why}; use {name}=auto")
    if settings.ui:
        fallback.attempt("choices on the page", "auto", lambda: runner.extend_worker(config, startup_line.EXTENSION))
    if settings.host == "stock":
        return False
    fallback.attempt("start", "auto", lambda: _shorten_start(config))
    wanted = fallback.attempt("host", "auto", lambda: runner.suits(config)) and fallback.fits("host", "runner")
    why = None if wanted else "no vLLM 0.33 with Model Runner V2 on the CUDA GPUs of one host"
    if wanted and config.parallel_config.worker_cls not in ("auto", WORKER):
        why = "--worker-cls names another worker"
        fallback.log("host", fallback.UnavailableError(why))
    if settings.host == "gptoss" and why:
        raise ChoiceError(f"host=gptoss cannot run here: {why}; use host=auto")
    if wanted and config.parallel_config.world_size > 1:  # a single worker decides when it starts
        from vllm_gptoss.engine.choose.device import Device
        from vllm_gptoss.engine.runner import eligibility

        check, here = eligibility.check_configuration, Device("nvidia", "", runner.gpu_architecture(), 0)
        wanted = fallback.attempt("host", settings.host, lambda: check(config, settings.host, here))
    return bool(wanted)


def _graph_sizes(config: Any) -> list[int] | None:
    """The sizes of the CUDA graphs that vLLM captures; None for its own."""
    from vllm_gptoss import fallback
    from vllm_gptoss.engine.choose import graph_sizes

    return fallback.attempt("sizes of CUDA graphs", "auto", lambda: graph_sizes.chosen(config))


def _shorten_start(config: Any) -> None:
    """Saves vLLM a second load of the tokenizer, and imports the endpoint while the API server waits for its engine."""
    _vllm.skip_processor(config.model_config)
    is_server = asyncio._get_running_loop() is not None and multiprocessing.parent_process() is None
    # Of several engines, those after the first would be started, perhaps forked, during the imports.
    if is_server and config.parallel_config.data_parallel_size == 1 and not endpoint_is_off():
        threading.Thread(target=_import_endpoint, name="gptoss-import", daemon=True).start()


def _import_endpoint() -> None:
    """Imports the endpoint once the engine's process exists; after five minutes without one, it returns."""
    for _ in range(1500):
        if multiprocessing.active_children():
            from vllm_gptoss.server import parts

            parts.failures()  # logged where the parts are attached
            return
        time.sleep(0.2)


RUST = (
    "VLLM_USE_RUST_FRONTEND is set: vLLM's Rust front end answers requests and loads no plugin. The plugin's"
    " /v1/responses, Harmony parser and streams are not used; its model and kernels are. Unset the variable to use all."
)

REGISTRATIONS: tuple[tuple[str, str, Callable[[], None]], ...] = (
    ("logging", "", _vllm.share_logging),
    (
        f"model class {spec.ARCHITECTURE}",
        "engine",
        lambda: _vllm.register_model(spec.ARCHITECTURE, "vllm_gptoss.engine.model.gpt_oss:GptOssForCausalLM"),
    ),
    (
        f"quantization {spec.QUANTIZATION}",
        "engine",
        lambda: _vllm.register_quantization(spec.QUANTIZATION, _quantization),
    ),
    ("worker and scheduler", "", _use_runner),
    ("the watch for a dead server", "", parent_death.watch),
)
"""All that is registered with vLLM, in order: name, part of `compatibility.PARTS` (empty: checked later or needs none),
function. Each function is idempotent: vLLM may load plugins more than once."""


def register() -> None:
    """Registers the parts of the plugin that fit the installed vLLM, and logs the others. Never raises."""
    if why := _why_inactive():
        _tell_ray_workers()
        _say(f"not active: {why}. vLLM serves gpt-oss without the plugin.")
        return
    for name, part, entry in (*REGISTRATIONS, *ENVIRONMENT):
        try:
            if not part or compatibility.why_off(part) is None:
                entry()
        except Exception as error:  # a moved vLLM internal must not stop a server of another model
            _say(f"not registered: {name}: {type(error).__name__}: {error}. Run `vllm-gptoss doctor`.")
    if _vllm.is_untested(_vllm.version()) and multiprocessing.parent_process() is None:
        _say(f"WARNING: {compatibility.summary()}")


def _why_inactive() -> str | None:
    """Why this process uses no part of the plugin, or None."""
    return "GPTOSS=off" if _is_off("GPTOSS") else _vllm.outside_range(_vllm.version())


def endpoint_is_off() -> bool:
    """Whether `GPTOSS_ENDPOINT` leaves `/v1/responses` to vLLM."""
    return _is_off("GPTOSS_ENDPOINT")


def _is_off(variable: str) -> bool:
    """Whether the environment variable has a value for off. Avoids `Settings`: its errors must not stop vLLM."""
    return os.environ.get(variable, "1").lower() in ("0", "false", "no", "off")


def _read_batches() -> None:
    """Installs the parser where vLLM loads no endpoint plugin: `vllm run-batch` builds its handlers without an app."""
    is_command = sys.argv[1:2] == ["run-batch"] or os.path.basename(sys.argv[0]) == "run_batch.py"
    if not is_command or multiprocessing.parent_process() is not None or _is_off("GPTOSS_PARSER"):
        return
    from vllm_gptoss.server.chat.vllm_parser import install

    if install():
        _say(
            "run-batch: gpt-oss output is read by our parser; prompts, constraints and stop strings are vLLM's own,"
            " because run-batch loads no endpoint plugins"
        )


def _allow_endpoint() -> None:
    """Sets `VLLM_PLUGINS`, without which vLLM loads no endpoint plugin, to all plugins that it would load and this one.

    The endpoint plugin also carries the parser of chat completions, so only both switches together leave it out.
    """
    if "VLLM_PLUGINS" in os.environ or (endpoint_is_off() and _is_off("GPTOSS_PARSER")):
        return
    others = {entry.name for group in OTHER_GROUPS for entry in importlib.metadata.entry_points(group=group)} | {NAME}
    foreign = {
        entry.name
        for entry in importlib.metadata.entry_points(group=ENDPOINT_GROUP)
        if not entry.value.startswith("vllm_gptoss.")
    }
    value = ",".join(sorted(others))
    if shared := sorted(others & foreign):
        _say(
            f"/v1/responses stays vLLM's own: allowing the plugin's would also allow that of {', '.join(shared)},"
            f" which has the name of an installed plugin of another kind. To allow both: VLLM_PLUGINS={value}"
        )
        return
    os.environ["VLLM_PLUGINS"] = value
    _say(
        f"VLLM_PLUGINS was unset; set to {value} so that the endpoint loads"
        " (GPTOSS_ENDPOINT=0 and GPTOSS_PARSER=0 leave it alone)"
    )


def _tell_ray_workers() -> None:
    """Adds the plugin's settings to vLLM's list of variables that it copies to data-parallel engines that Ray starts,
    and with 0.32's first Ray executor to workers. Otherwise engines on other nodes would use the defaults."""
    named = [name for name in os.environ.get(COPIED, "").split(",") if name]
    if missing := [name for name in FOR_WORKERS if name in os.environ and name not in named]:
        os.environ[COPIED] = ",".join([*named, *missing])


ENVIRONMENT: tuple[tuple[str, str, Callable[[], None]], ...] = (
    ("the endpoint plugin", "", _allow_endpoint),
    ("settings of Ray's workers", "", _tell_ray_workers),
    ("the parser of run-batch", "parser", _read_batches),
)


def _say(line: str) -> None:
    # Plugins load before vLLM sets its logging up: a logger's line would not appear.
    print(f"vllm-gptoss {__version__}: {line}", file=sys.stderr, flush=True)


class GptOssEndpoint:
    """vLLM's `EndpointPlugin`: the Responses API, its tools, and the parser of chat completions, for gpt-oss only."""

    name = NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._parts: Any = None

    def attach_router(self, app: Any) -> None:
        """Adds our routes, when the served model is gpt-oss; otherwise leaves the app as it is.

        vLLM's interface gives this hook no model, but the app's arguments name it and its config has been read by then.

        Raises:
            SettingsError: a setting is wrong, or requests a part that failed.
        """
        args: Namespace = app.state.args
        # `register` logs the reason. With VLLM_PLUGINS set, vLLM loads the endpoint even then.
        if _why_inactive() or _vllm.model_type(args) != spec.MODEL_TYPE:
            return
        try:
            _vllm.share_logging()  # vLLM sets its logging up between loading plugins and here
            self._attach(app, args, Settings.load(getattr(args, "additional_config", None)))
        except SettingsError:
            raise
        except Exception as error:
            _say(f"vLLM's own endpoints serve ({type(error).__name__}: {error}). Run `vllm-gptoss doctor`.")

    def _attach(self, app: Any, args: Namespace, settings: Settings) -> None:
        from vllm_gptoss import fallback
        from vllm_gptoss.server.parts import Parts
        from vllm_gptoss.tools.confined import Sizes, set_sizes

        if settings.host != "stock" and not fallback.fits("streams", "streams"):
            settings = settings.model_copy(update={"host": "stock"})
        set_sizes(Sizes(settings.workers, settings.caller_worker_queue, settings.worker_queue))
        self._parts = Parts(app, args, settings)
        if self._parts.installed:
            _bound(app, args, settings)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Starts the store and the tools, and reports routes that the app never reaches."""
        if self._parts is None:
            return
        await self._parts.start(engine_client, state, args)
        from vllm_gptoss.server.parts import shadowed

        for route in shadowed(self._parts):
            _say(f"WARNING: {route} is answered by another route, not by the plugin's. Run `vllm-gptoss doctor`.")


def _bound(app: Any, args: Namespace, settings: Settings) -> None:
    """Limits request bodies. Called after all parts have added their routes."""
    from vllm_gptoss.server.http import bodies, callers, flood

    flood.read_in_slices()
    callers.set_keys_are_checked(app, settings.checked_keys or _vllm.checks_keys(args))
    sizes = (settings.max_body_bytes, settings.max_body_values, settings.caller_body_bytes, settings.total_body_bytes)
    bodies.bound(app, bodies.BodyLimits(*sizes))


__all__ = ["GptOssEndpoint", "endpoint_is_off", "register"]
