"""The plugin's entry points never harm a server of any model."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import pkgutil
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support import warm
from tests.support.vllm_log import lines
from vllm_gptoss import _vllm, fallback, plugin, startup_line
from vllm_gptoss._vllm import compatibility
from vllm_gptoss._vllm import runner as _vllm_runner
from vllm_gptoss.server import parts
from vllm_gptoss.settings import ChoiceError, Settings

UPSTREAM = "vllm.model_executor.models.gpt_oss:GptOssForCausalLM"
DISCOVER = "from vllm.plugins import load_general_plugins as load; load(); "


Done = subprocess.CompletedProcess[str]


def python(code: str, **environ: str | None) -> Done:
    """Runs `code` in an interpreter without the plugin; a variable set to None is unset."""
    return warm.run(["-c", code], environment(environ))


def fresh(code: str, **environ: str | None) -> Done:
    """The same in an interpreter that was not forked."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment(environ), timeout=300)


def environment(changes: dict[str, str | None]) -> dict[str, str]:
    wanted = os.environ | changes
    return {name: value for name, value in wanted.items() if value is not None}


def test_importing_the_plugin_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, vllm_gptoss.plugin; print([m for m in ('vllm', 'torch', 'transformers') if m in sys.modules])"
    done = fresh(code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.vllm
def test_registering_twice_is_the_same_as_once() -> None:
    code = (
        "import json; from vllm_gptoss import plugin, _vllm; plugin.register(); plugin.register();"
        "print(json.dumps([_vllm.registered_model('GptOssForCausalLM'),"
        " _vllm.registered_quantization('gpt_oss_mxfp4')]))"
    )
    done = python(code)
    assert json.loads(done.stdout.splitlines()[-1]) == [
        "vllm_gptoss.engine.model.gpt_oss:GptOssForCausalLM",
        "vllm_gptoss._vllm",
    ]
    assert "not registered" not in done.stderr


@pytest.mark.vllm
def test_the_endpoint_loads_when_nothing_is_set() -> None:
    show = (
        "import os; from vllm_gptoss import _vllm as v; print(os.environ['VLLM_PLUGINS'], v.allowed_endpoint_plugins())"
    )
    code = DISCOVER + show
    done = python(code, VLLM_PLUGINS=None)
    names = {entry.name for group in plugin.OTHER_GROUPS for entry in importlib.metadata.entry_points(group=group)}
    value, _, loaded = done.stdout.splitlines()[-1].partition(" ")
    assert names <= set(value.split(","))
    assert "gptoss" in loaded
    assert "VLLM_PLUGINS was unset" in done.stderr


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("show", "environ", "shown"),
    [
        ("v.registered_model('GptOssForCausalLM')", {"VLLM_PLUGINS": ""}, UPSTREAM),
        ("v.registered_model('GptOssForCausalLM')", {"VLLM_PLUGINS": "someone_else"}, UPSTREAM),
        ("'VLLM_PLUGINS' in os.environ", {"GPTOSS_ENDPOINT": "off", "GPTOSS_PARSER": "0"}, "False"),
    ],
)
def test_an_allow_list_without_us_and_settings_keep_us_out(show: str, environ: dict[str, str], shown: str) -> None:
    code = DISCOVER + f"import os; from vllm_gptoss import _vllm as v; print({show})"
    assert python(code, **{"VLLM_PLUGINS": None} | environ).stdout.splitlines()[-1] == shown


@pytest.mark.vllm
def test_without_our_responses_the_parser_still_loads() -> None:
    """GPTOSS_ENDPOINT=0 is about /v1/responses: chat completions would else lose malformed output again."""
    show = "from vllm_gptoss import _vllm as v; print(v.allowed_endpoint_plugins())"
    assert "gptoss" in python(DISCOVER + show, VLLM_PLUGINS=None, GPTOSS_ENDPOINT="0").stdout.splitlines()[-1]
    parts = (
        "from fastapi import FastAPI; from tests.server.chat.arguments import arguments;"
        "from vllm_gptoss.server import parts; from vllm_gptoss import settings;"
        "made = parts.Parts(FastAPI(), arguments(), settings.Settings(endpoint=False));"
        "print([each.kind.name for each in made.installed])"
    )
    assert python(parts).stdout.splitlines()[-1] == "['completions', 'chat completions', 'event loop watch']"


@pytest.mark.vllm
@pytest.mark.parametrize("command", ["run-batch", "serve"])
def test_batches_are_read_by_our_parser(command: str) -> None:
    """`vllm run-batch` loads no endpoint plugin, so the general one installs the parser there, and only there."""
    code = f"import sys; sys.argv = ['vllm', '{command}'];" + DISCOVER
    code += "import vllm.parser.harmony as h; print(h.HarmonyParser.__module__)"
    done = python(code, VLLM_PLUGINS=None)
    is_ours = done.stdout.splitlines()[-1] == "vllm_gptoss.server.chat.vllm_parser"
    assert is_ours == (command == "run-batch"), done.stderr
    assert ("read by our parser" in done.stderr) == is_ours


@pytest.mark.vllm
def test_another_packages_endpoint_is_not_opted_in_behind_its_back(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nother = json:loads\n[vllm.endpoint_plugins]\nother = json:dumps\n"
    )
    code = "import os; from vllm_gptoss import plugin; plugin._allow_endpoint(); print('VLLM_PLUGINS' in os.environ)"
    done = python(code, VLLM_PLUGINS=None, PYTHONPATH=str(tmp_path))
    assert done.stdout.splitlines()[-1] == "False"
    assert "also allow that of other" in done.stderr
    assert "VLLM_PLUGINS=" in done.stderr


@pytest.mark.vllm
@pytest.mark.parametrize("switch", [{}, {"GPTOSS": "off"}], ids=["on", "off"])
def test_settings_of_ray_workers_are_copied_and_secrets_are_not(switch: dict[str, str]) -> None:
    """vLLM copies the variables of a list, which also has the user's entries."""
    code = DISCOVER + (
        "from vllm.ray.ray_env import get_env_vars_to_copy as copied;"
        "print(sorted(n for n in copied() if n.startswith(('GPTOSS', 'MINE'))))"
    )
    done = python(
        code, GPTOSS_EXPERTS="upstream", GPTOSS_TOOLS_KEY="secret", VLLM_RAY_EXTRA_ENV_VARS_TO_COPY="MINE",
        GPTOSS_LAYERS=None, **switch,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == str(sorted([*switch, "GPTOSS_EXPERTS", "MINE"])), done.stderr


@pytest.mark.parametrize(
    ("version", "switch", "reason"),
    [
        ("0.31.9", "on", "older than the supported range >=0.32,<0.34"),
        ("0.33.0", "off", "GPTOSS=off. vLLM serves gpt-oss without the plugin"),
        ("0.33.0", "0", "GPTOSS=off"),
    ],
)
def test_nothing_is_registered_where_the_plugin_is_inactive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str, switch: str, reason: str
) -> None:
    monkeypatch.setattr(_vllm, "version", lambda: version)
    monkeypatch.setenv("GPTOSS", switch)
    monkeypatch.setenv(plugin.COPIED, "")
    monkeypatch.setattr(plugin, "REGISTRATIONS", (("never", "", lambda: pytest.fail("registered anyway")),))
    plugin.register()
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("changed", [(), ("engine",), ("parser", "endpoint"), tuple(compatibility.PARTS)])
def test_a_newer_vllm_disables_only_the_parts_that_it_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changed: tuple[str, ...]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(_vllm, "version", lambda: "0.34.0")
    monkeypatch.setattr(compatibility, "why_not", lambda part: f"{part} moved" if part in changed else None)
    entries = tuple((part, part, lambda part=part: done.append(part)) for part in compatibility.PARTS)
    monkeypatch.setattr(plugin, "REGISTRATIONS", entries)
    monkeypatch.setattr(plugin, "ENVIRONMENT", ())
    plugin.register()
    assert done == [part for part in compatibility.PARTS if part not in changed]
    active, _, off = capsys.readouterr().err.partition("own implementation: ")
    for part, name in compatibility.PARTS.items():
        assert (f"{name} ({part} moved)" in off) is (part in changed)
        assert (name in active.partition("Active parts: ")[2]) is (part not in changed)


@pytest.mark.vllm
@pytest.mark.parametrize("wish", ["auto", "upstream", "gptoss", "marlin"])
def test_experts_named_by_the_user_are_an_error_where_the_model_is_off(
    monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    config = SimpleNamespace(additional_config={"gptoss": {"experts": wish, "host": "stock"}})
    monkeypatch.setattr(_vllm_runner, "suits", lambda config: True)
    monkeypatch.setattr(compatibility, "why_off", lambda part: "vLLM 0.34.0 differs from 0.33.0 in a:b")
    with pytest.raises(ChoiceError, match="use experts=auto") if wish in ("gptoss", "marlin") else nullcontext():
        assert plugin._wants_runner(config) is False


ATTACH = """
import json, sys, types
from argparse import Namespace
from fastapi import FastAPI
from vllm_gptoss import _vllm, plugin
import vllm.parser.harmony as harmony
_vllm.version = lambda: sys.argv[1]
plugin.register()
app = FastAPI()
structured = types.SimpleNamespace(reasoning_parser="", backend="auto")
app.state.args = Namespace(
    model=sys.argv[2], enable_auto_tool_choice=False, tool_call_parser=None, tool_strict_level=None,
    structured_outputs_config=structured, middleware=[],
)
before = len(app.routes)
plugin.GptOssEndpoint().attach_router(app)
print(json.dumps([len(app.routes) > before, harmony.HarmonyParser.__module__.startswith("vllm_gptoss")]))
"""


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("version", "switch", "attached"),
    [("0.33.1", "on", True), ("0.34.0", "on", True), ("0.31.0", "on", False), ("0.33.1", "off", False)],
)
def test_the_endpoint_is_active_where_the_other_parts_are(
    tmp_path: Path, version: str, switch: str, attached: bool
) -> None:
    """With VLLM_PLUGINS set, vLLM loads the endpoint even where `register` registers nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}))
    environ = environment({"VLLM_PLUGINS": "gptoss", "GPTOSS_STORE": "off", "GPTOSS": switch})
    done = warm.run(["-c", ATTACH, version, str(tmp_path)], environ)
    assert json.loads(done.stdout.splitlines()[-1]) == [attached, attached], done.stderr[-3000:]
    assert ("vLLM serves gpt-oss without the plugin" in done.stderr) is not attached


@pytest.mark.vllm
@pytest.mark.parametrize("why", [None, "vLLM 0.33.1 differs from 0.33.0 in a:b"])
def test_streams_are_vllms_where_its_functions_are_not_known(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, why: str | None
) -> None:
    hosts: list[str] = []

    def attach(app: object, args: object, settings: Settings) -> SimpleNamespace:
        hosts.append(settings.host)
        return SimpleNamespace(installed=[])

    monkeypatch.setattr(_vllm, "model_type", lambda args: "gpt_oss")
    monkeypatch.setattr(parts, "Parts", attach)
    monkeypatch.setattr(compatibility, "why_not", lambda part: why)
    plugin.GptOssEndpoint().attach_router(SimpleNamespace(state=SimpleNamespace(args=Namespace())))
    assert hosts == ["stock" if why else "auto"]
    assert lines(said) == ([f"streams: upstream from here on ({why})"] if why else [])


def test_a_part_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def fails() -> None:
        raise ImportError("vLLM moved it")

    monkeypatch.setattr(plugin, "REGISTRATIONS", (("first", "", fails), ("second", "", lambda: done.append("second"))))
    monkeypatch.setenv("VLLM_PLUGINS", "gptoss")
    plugin.register()
    assert done == ["second"]
    assert "not registered: first: ImportError: vLLM moved it" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.parametrize("is_set", [False, True])
def test_the_rust_front_end_is_reported_at_start(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, is_set: bool
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", str(int(is_set)))
    plugin._wants_runner(SimpleNamespace(additional_config={"gptoss": {"host": "stock"}}))
    assert lines(said) == ([plugin.RUST] if is_set else [])


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("ui", "given", "used"),
    [(True, "", startup_line.EXTENSION), (True, "team.Extension", "team.Extension"), (False, "", "")],
)
def test_workers_get_a_method_for_the_page_only_where_it_is_on(ui: bool, given: str, used: str) -> None:
    parallel = SimpleNamespace(worker_extension_cls=given)
    config = SimpleNamespace(additional_config={"gptoss": {"ui": ui, "host": "stock"}}, parallel_config=parallel)
    assert plugin._wants_runner(config) is False
    assert parallel.worker_extension_cls == used
    assert pkgutil.resolve_name(startup_line.EXTENSION) is startup_line.WorkerChoices


@pytest.mark.vllm
def test_a_configuration_that_vllm_changed_does_not_stop_the_start(said: pytest.LogCaptureFixture) -> None:
    assert plugin._wants_runner(SimpleNamespace(additional_config={})) is False
    assert ["AttributeError" in line for line in lines(said)] == [True, True], "the start and the runner"


@pytest.mark.vllm
def test_a_runner_that_was_requested_and_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vllm_runner, "suits", lambda config: False)
    with pytest.raises(ChoiceError, match="use host=auto"):
        plugin._wants_runner(SimpleNamespace(additional_config={"gptoss": {"host": "gptoss"}}))


@pytest.mark.vllm
@pytest.mark.parametrize("host", ["auto", "gptoss"])
@pytest.mark.parametrize(("worker", "is_ours"), [("auto", True), (plugin.WORKER, True), ("team.Worker", False)])
def test_the_users_own_worker_is_reported_where_it_has_vllms_runner(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, host: str, worker: str, is_ours: bool
) -> None:
    monkeypatch.setattr(_vllm_runner, "suits", lambda config: True)
    monkeypatch.setattr(fallback, "fits", lambda part, name: True)
    monkeypatch.setattr(plugin, "_shorten_start", lambda config: None)
    parallel = SimpleNamespace(worker_cls=worker, world_size=1)
    config = SimpleNamespace(additional_config={"gptoss": {"host": host}}, parallel_config=parallel)
    refused = host == "gptoss" and not is_ours
    with pytest.raises(ChoiceError, match="names another worker; use host=auto") if refused else nullcontext():
        assert plugin._wants_runner(config)
    assert len(lines(said)) == (not is_ours)


ONE = {"world_size": 1, "tensor_parallel_size": 1, "data_parallel_size": 1, "nnodes": 1}
TWO = {**ONE, "world_size": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("parallel", "suits"),
    [
        ({**ONE, "distributed_executor_backend": "uni"}, True),
        ({**ONE, "distributed_executor_backend": "external_launcher"}, True),
        (TWO, True),
        ({**TWO, "distributed_executor_backend": "ray"}, False),
        ({**TWO, "distributed_executor_backend": "external_launcher"}, False),
        ({**TWO, "distributed_executor_backend": SimpleNamespace}, False),
        ({**TWO, "nnodes": 2}, False),
        ({**TWO, "tensor_parallel_size": 1}, False),
        ({**TWO, "data_parallel_size": 2}, False),
    ],
    ids=str,
)
def test_ranks_of_one_host_under_vllms_own_executor_have_our_runner(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], suits: bool
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    model = SimpleNamespace(runner_type="generate")
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=model, use_v2_model_runner=True)
    assert _vllm_runner.suits(config) is suits


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("architecture", "host", "wanted"),
    [("sm90", "auto", False), ("sm90", "gptoss", True), ("sm100", "auto", False), ("sm100", "gptoss", None)],
)
def test_ranks_are_decided_once_for_workers_and_scheduler(
    monkeypatch: pytest.MonkeyPatch,
    said: pytest.LogCaptureFixture,
    architecture: str,
    host: str,
    wanted: bool | None,
) -> None:
    """Before they start: the scheduler is in the engine's process, each worker in its own."""
    from tests.support import vllm_configs

    monkeypatch.setattr(_vllm_runner, "suits", lambda config: True)
    monkeypatch.setattr(_vllm_runner, "gpu_architecture", lambda: architecture)
    monkeypatch.setattr(fallback, "fits", lambda part, name: True)
    monkeypatch.setattr(plugin, "_shorten_start", lambda config: None)
    config = vllm_configs.config(
        parallel_config=vllm_configs.parallel(tensor_parallel_size=4, world_size=4),
        device_config=SimpleNamespace(device_type="cuda"),
        compilation_config=vllm_configs.compilation(),
        additional_config={"gptoss": {"host": host}},
    )
    with pytest.raises(ChoiceError, match="use host=auto") if wanted is None else nullcontext():
        assert plugin._wants_runner(config) is wanted
    why = {"sm90": "never compared with vLLM's runner with 4 GPUs; host=gptoss tries it", "sm100": "made for sm_90"}
    ours = [line for line in lines(said) if line.startswith("host: ")]
    assert [why[architecture] in line for line in ours] == [True] * (host == "auto")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("wanted", "sizes", "first", "later"),
    [(True, [1, 2], [1, 2], [1, 2]), (True, None, None, "vLLM's"), (False, [1, 2], None, "vLLM's")],
)
def test_sizes_of_graphs_are_set_before_vllms_entry_sets_its_own(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, sizes: list[int] | None, first: object, later: object
) -> None:
    from vllm.model_executor.models import config as module

    class Theirs:
        @staticmethod
        def verify_and_update_config(config: SimpleNamespace) -> None:
            assert config.compilation_config.cudagraph_capture_sizes == first
            config.compilation_config.cudagraph_capture_sizes = first or "vLLM's"

    monkeypatch.setitem(module.MODELS_CONFIG_MAP, "Model", Theirs)
    _vllm_runner.use_classes("Model", "a.Worker", "a.Scheduler", lambda config: wanted, lambda config: sizes)
    parallel = SimpleNamespace(worker_cls="auto", distributed_executor_backend=None)
    scheduling = SimpleNamespace(scheduler_cls=None, async_scheduling=None)
    graphs = SimpleNamespace(cudagraph_capture_sizes=None)
    config = SimpleNamespace(parallel_config=parallel, scheduler_config=scheduling, compilation_config=graphs)
    module.MODELS_CONFIG_MAP["Model"].verify_and_update_config(config)
    assert graphs.cudagraph_capture_sizes == later
    assert (parallel.worker_cls == "a.Worker") is wanted


CONFIGURED = """
import asyncio, json, multiprocessing, sys, time
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers import hf
from vllm.tokenizers import cached_tokenizer_from_config

ENDPOINT = "vllm_gptoss.server.responses.endpoint"

async def main():
    config = EngineArgs(model=sys.argv[1]).create_engine_config().model_config
    imported, loads = [ENDPOINT in sys.modules], []
    engine = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), daemon=True)
    engine.start()
    until = time.monotonic() + float(sys.argv[2])
    while ENDPOINT not in sys.modules and time.monotonic() < until:
        await asyncio.sleep(0.1)
    hf.cached_get_processor = lambda *_, **__: loads.append(1)
    hf.resolve_chat_template(cached_tokenizer_from_config(config), None, None, model_config=config)
    print(json.dumps([*imported, ENDPOINT in sys.modules, len(loads)]))

asyncio.run(main())
"""


@pytest.mark.vllm
@pytest.mark.parametrize(("host", "expected"), [("auto", [False, True, 0]), ("stock", [False, False, 1])])
def test_a_server_imports_the_endpoint_beside_its_engine_and_loads_the_tokenizer_once(
    model_dir: Path, host: str, expected: list[object]
) -> None:
    patience = "60" if host == "auto" else "1"
    done = warm.run(["-c", CONFIGURED, str(model_dir), patience], environment({"GPTOSS_HOST": host}))
    assert json.loads(done.stdout.splitlines()[-1]) == expected, done.stderr[-3000:]


@pytest.mark.parametrize("ours_first", [False, True])
def test_a_route_that_the_app_never_reaches_is_reported(capsys: pytest.CaptureFixture[str], ours_first: bool) -> None:
    app = FastAPI()
    routes = []
    for is_ours in (ours_first, not ours_first):
        app.add_api_route("/v1/responses", lambda: None, methods=["POST"])
        routes += app.router.routes[-1:] if is_ours else []
    endpoint = plugin.GptOssEndpoint()

    async def start(*_: object) -> None: ...

    endpoint._parts = SimpleNamespace(app=app, installed=[SimpleNamespace(routes=routes)], start=start)
    asyncio.run(endpoint.init_state(None, None, Namespace()))
    assert ("POST /v1/responses is answered by another route" in capsys.readouterr().err) is not ours_first


@pytest.mark.parametrize(
    ("version", "is_known", "is_untested"),
    [
        ("0.32.0", True, False),
        ("0.32.0+cpu", True, False),
        ("0.33.1", True, False),
        ("0.33.1.dev5+g123", True, False),
        ("0.31.9", False, True),
        ("0.1.dev9+g123", True, True),
        ("0.34.0", True, True),
        ("0.34.0rc1", True, True),
        ("1.0.0", True, True),
        (None, False, False),
    ],
)
def test_the_tested_range(version: str | None, is_known: bool, is_untested: bool) -> None:
    assert (_vllm.outside_range(version) is None) is is_known
    assert _vllm.is_untested(version) is is_untested


@pytest.mark.alone
@pytest.mark.vllm
def test_registering_costs_less_than_half_a_second() -> None:
    """In the state in which vLLM calls it: its own argument parser is imported already."""
    code = (
        "import time; from vllm.engine.arg_utils import AsyncEngineArgs; t = time.perf_counter();"
        "from vllm_gptoss import plugin; plugin.register(); print(time.perf_counter() - t)"
    )
    assert any(float(python(code).stdout.splitlines()[-1]) < 0.5 for _ in range(3))
