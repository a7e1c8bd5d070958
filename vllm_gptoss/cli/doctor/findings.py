"""The checks of doctor. A `problem` makes the exit code non-zero."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import compatibility
from vllm_gptoss.cli.doctor import cuda
from vllm_gptoss.cli.recipes import check as rules
from vllm_gptoss.cli.recipes import find, flags, load, variables
from vllm_gptoss.cli.recipes.deployment import choices
from vllm_gptoss.cli.recipes.here import AMD, detect
from vllm_gptoss.cli.recipes.probe import ProbeError, answer_of, of_line
from vllm_gptoss.engine import choose, spec
from vllm_gptoss.engine.choose import bands
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.choose.devices import DeviceError
from vllm_gptoss.plugin import endpoint_is_off
from vllm_gptoss.settings import Settings
from vllm_gptoss.version import __version__


class Status(StrEnum):
    """How bad a finding is; only `PROBLEM` fails."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. fix: the remedy, if there is one."""

    status: Status
    check: str
    detail: str
    fix: str = ""


Findings = Iterator[Finding]

ABSENT = "not installed"
ROCM = "vLLM's ROCm wheels, or its image vllm/vllm-openai-rocm: docs/guide.md"
INSTALL = f"pip install 'vllm{_vllm.RANGE}'; for AMD {ROCM}"

TRITONS = {"triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-nightly", "triton-rocm"}
"""Distributions that own the module `triton`."""


def examine(model: Path | None = None, command: Sequence[str] = (), tokens: int = 0) -> list[Finding]:
    """Runs every check, in the order of the report. `command` is a `vllm serve` line to check, if one is given; tokens:
    of a step to report, 0 for none.

    Without vLLM or torch, checks that need them are left out: `packages` reports each once.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    has_vllm = bool(_vllm.version())
    with ThreadPoolExecutor(3) as pool:  # each starts a process that imports vLLM
        probes = [pool.submit(_probe, each) for each in ("discovery", "parts") if has_vllm and has_torch]
        line = pool.submit(lambda: list(serve_line(command)) if command else [])
        here = [*_guarded(lambda: settings_and_choices(tokens)), *_guarded(recipes_here)]
        checks = [clashes, *([toolkit] if has_torch else []), orphaned_engines, python_tool, browser_tool]
        others = [finding for check in checks for finding in _guarded(check)]
        found = {**probes[1].result(), **probes[0].result()} if probes else {}
    return [
        *_guarded(packages),
        *(_guarded(lambda: versions(found)) if has_vllm else ()),
        *(_guarded(lambda: active(found)) if found else ()),
        *here,
        *_guarded(lambda: dead_variables(found)),
        *others,
        *_guarded(lambda: serve_command(command)),
        *_guarded(line.result),
        *_guarded(lambda: checkpoint(model)),
    ]


def _guarded(check: Callable[[], Iterable[Finding]]) -> Findings:
    try:
        yield from check()
    except Exception as error:  # one broken check must not hide the others
        if isinstance(error, ModuleNotFoundError | DeviceError) and any(packages()):  # they report what to install
            yield Finding(Status.INFO, "doctor", f"a check was left out: {error}")
            return
        what = f"a check failed: {type(error).__name__}: {error}"
        yield Finding(Status.PROBLEM, "doctor", what, "please report this")


def _probe(question: str) -> dict[str, Any]:
    try:
        return answer_of("vllm_gptoss.cli.doctor.probe", "vLLM's plugin discovery", question)
    except ProbeError as error:
        return {"error": str(error)}


def packages() -> Findings:
    """Missing packages: vLLM, torch, and the requirements of this package."""
    if not _vllm.version():
        yield Finding(Status.PROBLEM, "package vllm", "not installed", INSTALL)
    if importlib.util.find_spec("torch") is None:
        yield Finding(Status.PROBLEM, "package torch", "not installed", f"vLLM brings the torch it needs: {INSTALL}")
    for requirement in _requirements():
        found, wanted = _version(requirement.name), requirement.specifier
        if found != ABSENT and wanted.contains(found, prereleases=True):
            continue
        detail = ABSENT if found == ABSENT else f"{found} is installed, {wanted} is needed"
        fix = f"pip install '{requirement.name}{wanted}'"
        yield Finding(Status.PROBLEM, f"package {requirement.name}", detail, fix)


def _requirements() -> Iterator[Requirement]:
    """Of this package's metadata, without extras; none where the package is not installed."""
    try:
        lines = importlib.metadata.requires("vllm-gptoss") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def versions(found: dict[str, Any]) -> Findings:
    """Whether vLLM is in the supported range, and versions of related packages."""
    version = _vllm.version()
    if why := _vllm.outside_range(version):
        yield Finding(Status.PROBLEM, "versions", f"vllm-gptoss {__version__}: {why}", INSTALL)
    elif _vllm.is_untested(version):
        yield Finding(Status.WARNING, "versions", f"vllm-gptoss {__version__}: {compatibility.summary()}", INSTALL)
    else:
        others = ", ".join(f"{name} {_version(name)}" for name in ("torch", "oss-harmony", "mcp"))
        yield Finding(Status.OK, "versions", f"vllm-gptoss {__version__}, vLLM {version}, {others}")
    if "error" in found:
        yield Finding(Status.PROBLEM, "vLLM", found["error"], "fix this first: the plugin cannot be active")


def active(probe: dict[str, Any]) -> Findings:
    """The result of vLLM's plugin discovery in a new interpreter."""
    if "error" in probe:
        return
    for part, name in (("model", spec.ARCHITECTURE), ("quantization", spec.QUANTIZATION)):
        ours = str(probe.get(part, "")).startswith("vllm_gptoss")
        status, fix = (Status.OK, "") if ours else (Status.PROBLEM, _inactive(probe))
        yield Finding(status, f"plugin: {part}", f"{name} is {probe.get(part)}", fix)
    for part, name in (("runner and scheduler", "runner"), ("streams", "streams")):
        why = compatibility.why_not(name)
        detail = f"vLLM's own: {why}" if why else "vllm-gptoss: vLLM has the tested functions"
        yield Finding(Status.INFO if why else Status.OK, f"plugin: {part}", detail)
    for part, why in (probe.get("parts") or {}).items():
        what = f"vLLM's own implementation is used: {why.partition('; ')[0]}"
        yield Finding(Status.PROBLEM, f"plugin: {part}", what, why.partition("; ")[2] or "reinstall vllm-gptoss")
    endpoint = "gptoss" in (probe.get("endpoint_plugins") or ())
    if probe.get("rust_frontend"):
        what = "VLLM_USE_RUST_FRONTEND is set: vLLM's Rust program loads no plugin and has no /v1/responses or tools"
        yield Finding(Status.WARNING, "Rust front end", what, "unset VLLM_USE_RUST_FRONTEND; the kernels run anyway")
    if endpoint_is_off():
        yield Finding(Status.INFO, "plugin: endpoint", "/v1/responses is vLLM's own: GPTOSS_ENDPOINT is off")
    elif endpoint and "Responses API" not in (probe.get("parts") or {}):
        yield Finding(Status.OK, "plugin: endpoint", f"/v1/responses is ours (VLLM_PLUGINS={probe['VLLM_PLUGINS']})")
    elif not endpoint:
        yield Finding(Status.PROBLEM, "plugin: endpoint", "/v1/responses is vLLM's own", _inactive(probe))


def _inactive(probe: dict[str, Any]) -> str:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "gptoss" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves us out: add gptoss to it, or unset it"
    return "start vLLM and read its first lines: it logs why a plugin failed to load"


def settings_and_choices(tokens: int = 0) -> Findings:
    """The device, what the tables choose for it, and what runs a step of `tokens` tokens (0: none) of the 20b."""
    settings = Settings.load()
    device, deployment = detect(), choose.Deployment(spec.GPT_OSS_20B, aiter=describe.uses_aiter())
    yield Finding(Status.INFO, "device", f"{device}: {choose.family(device)} row" + (_unknown(device)))
    for model in (spec.GPT_OSS_20B, spec.GPT_OSS_120B):
        ranks = choose.tensor_parallel(device, model)
        yield Finding(Status.INFO, f"{model.name}: tensor parallel", str(ranks))
    attention = choose.attention(device, deployment)
    yield Finding(Status.OK, "attention", str(attention))
    chosen: dict[str, str] = {}
    for what, table, wish in (
        ("layers", choose.layers, settings.layers),
        ("experts", choose.experts, settings.experts),
    ):
        try:
            choice = table(device, deployment, wish)
            chosen[what] = choice.value
            yield Finding(Status.OK, what, str(choice))
        except choose.ChoiceError as error:
            yield Finding(Status.PROBLEM, what, str(error), f"change or unset GPTOSS_{what.upper()}")
    yield Finding(Status.OK, "KV cache", str(choose.kv_cache_dtype(device)))
    if tokens and len(chosen) == 2:  # else a setting was refused, which is reported
        yield step(tokens, {"layers": chosen["layers"], "attention": attention.value, "experts": chosen["experts"]})


def step(tokens: int, chosen: Mapping[str, str]) -> Finding:
    """What runs a step of so many tokens, by `bands` where the layers are the plugin's. chosen: by part."""
    band = bands.of(tokens)
    ours = {"layers": band.layers, "attention": band.attention} if chosen["layers"] == bands.GPTOSS else {}
    ran = "; ".join(f"{part}: {value}" for part, value in {**chosen, **ours}.items())
    return Finding(Status.INFO, f"a step of {tokens} tokens", ran)


def recipes_here() -> Findings:
    """Recipes for this machine, or for the nearest one."""
    found = find.for_device(load.shipped(), detect())
    many = f"{len(found.recipes)} for this machine" if not found.why else found.why
    yield Finding(Status.INFO, "recipes", f"{many}: `vllm-gptoss recipe list --device auto`")


def _unknown(device: Device) -> str:
    if why := choose.unserved(device):
        return f"; {why}"
    return "; no table knows it, vLLM decides everything" if choose.family(device) is choose.OTHER else ""


def dead_variables(probe: dict[str, Any]) -> Findings:
    """Variables that do nothing today, with what to set instead."""
    found = variables.dead(os.environ, probe.get("variables") or ())
    for name, instead in found.items():
        yield Finding(Status.PROBLEM, f"variable {name}", "this vLLM does not read it", variables.remedy(instead))
    for name, why in variables.IGNORED_BY_US.items():
        if name in os.environ:
            yield Finding(Status.INFO, f"variable {name}", f"not needed: {why}")
    if not found:
        yield Finding(Status.OK, "variables", "no dead VLLM_* variable is set")


def clashes() -> Findings:
    """Distributions that own the same files: the last installed one wins, without a warning of pip."""
    present = {str(d.metadata["Name"]).lower().replace("_", "-") for d in importlib.metadata.distributions()}
    if {"openai-harmony", "oss-harmony"} <= present:
        both = "openai-harmony and oss-harmony both own the module openai_harmony"
        what = f"{both}; openai-harmony fetches its vocabulary from the network at start"
        fix = "pip uninstall -y openai-harmony oss-harmony; pip install oss-harmony; install gpt-oss with --no-deps"
        yield Finding(Status.PROBLEM, "harmony", what, fix)
    elif "oss-harmony" in present:
        yield Finding(Status.OK, "harmony", f"oss-harmony {_version('oss-harmony')} alone owns openai_harmony")
    tritons = sorted(present & TRITONS)
    if len(tritons) > 1:
        fix = "keep the one that torch names in its metadata: pip uninstall -y the others, then reinstall it"
        yield Finding(Status.PROBLEM, "triton", f"{' and '.join(tritons)} own the same module", fix)


def toolkit() -> Findings:
    """A driver or CUDA toolkit older than torch's CUDA breaks kernels that are compiled at run time."""
    import torch

    if detect().vendor != "nvidia":
        if AMD.exists() and torch.version.hip is None:
            yield Finding(Status.WARNING, "ROCm", "an AMD GPU is here, and torch was built without ROCm", f"use {ROCM}")
        return
    wanted = torch.version.cuda or "0"
    driver = cuda.driver_cuda()
    if driver and cuda.number(driver)[0] < cuda.number(wanted)[0]:
        what = f"torch was built for CUDA {wanted}, the driver supports {driver}"
        yield Finding(Status.PROBLEM, "CUDA", what, "update the driver")
    else:
        yield Finding(Status.OK, "CUDA", f"torch {wanted}, driver {driver or 'unknown'}")
    home = os.environ.get("CUDA_HOME")
    if home and (found := cuda.nvcc(Path(home))) and cuda.number(found)[0] != cuda.number(wanted)[0]:
        what = f"{home} is CUDA {found}, torch is {wanted}: kernels compiled with it may give garbage"
        yield Finding(Status.PROBLEM, "CUDA_HOME", what, f"point CUDA_HOME at a {wanted} toolkit or unset it")


def orphaned_engines() -> Findings:
    """Engines without a server; one that holds a GPU's memory makes the next start fail."""
    from vllm_gptoss.cli.doctor.orphans import orphans

    found = list(orphans())
    for orphan in found:
        status = Status.PROBLEM if orphan.gpu_memory else Status.WARNING
        fix = f"kill {orphan.pid}; if it is still there after ten seconds, kill -9 {orphan.pid}"
        yield Finding(status, "engine without a server", f"{orphan}, and the server that started it is gone", fix)
    if not found:
        yield Finding(Status.OK, "engines", "none runs on without its server")


def python_tool() -> Findings:
    """How the python tool would hold programs here, tried for real (`docs/security.md`)."""
    from vllm_gptoss.tools.python import PythonOptions, tiers

    tier, reason = asyncio.run(tiers.diagnose(PythonOptions(preload=())))
    if tier is None:
        fix = "allow user namespaces, or pip install 'vllm-gptoss[portable]'; docs/security.md"
        yield Finding(Status.WARNING, "python tool", f"off, no isolation: {reason}", fix)
        return
    status = Status.INFO if tier is tiers.PORTABLE else Status.OK
    yield Finding(status, "python tool", f"{tier.name}: {tier.what}{f' (because {reason})' if reason else ''}")


def browser_tool() -> Findings:
    """Whether the browser tool can search; opening pages needs no backend."""
    from vllm_gptoss.tools.browser.provider import BrowserProvider

    note, _, fix = (BrowserProvider().note or "").partition(": ")
    found = "no search backend: `open` works, `search` finds nothing" if note else "search has a backend"
    yield Finding(Status.INFO if note else Status.OK, "browser tool", found, fix.partition(";")[0])


def serve_command(command: Sequence[str]) -> Findings:
    """Judges a `vllm serve` line: flags that gpt-oss needs or that change what the plugin may choose."""
    if not command:
        return
    text = list(command)
    if "--enable-auto-tool-choice" not in text or not any(word.startswith("--tool-call-parser") for word in text):
        parser = Settings.load().parser
        missing = "--enable-auto-tool-choice --tool-call-parser openai are missing"
        if parser:
            what = f"{missing}: the plugin reads tool calls without them"
            yield Finding(Status.INFO, "tool parser flags", what)
        else:
            what, fix = f"{missing}: chat completions drop every tool call", "add both flags, or set GPTOSS_PARSER=1"
            yield Finding(Status.PROBLEM, "tool parser flags", what, fix)
    if not any(word.startswith("--api-server-count") or word == "-asc" for word in text):
        what = "one process streams about 40,000 tokens a second, what one core can; vLLM lets no plugin start more"
        yield Finding(Status.INFO, "API servers", what, "for more: --api-server-count 4; docs/host.md")
    for flag in ("--moe-backend", "--attention-backend", "--kv-cache-dtype"):
        if (word := next((w for w in text if w.startswith(flag)), None)) is not None:
            yield Finding(Status.INFO, flag, f"{word} decides instead of the plugin's tables")


def serve_line(command: Sequence[str]) -> Findings:
    """A `vllm serve` line as this vLLM's own parser reads it: what `recipe check` finds, and what it chooses."""
    environ = {**os.environ, **flags.variables(command)}
    try:
        values, releases = of_line(flags.words(command), environ)
        case = rules.case_of(values, detect(), environ)
    except (ProbeError, ValueError) as error:
        yield Finding(Status.WARNING, "serve line", f"not judged: {error}")
        return
    troubles = rules.command(case, releases)
    for trouble in troubles:
        if trouble.rule != "variables" or trouble.what.split()[-1] not in os.environ:  # reported above
            status = Status.PROBLEM if trouble.fatal else Status.WARNING
            yield Finding(status, f"serve line: {trouble.rule}", trouble.what, trouble.remedy)
    if any(trouble.fatal for trouble in troubles):
        return
    for what, choice in choices(case.device, case.config, case.env, case.spec).items():
        yield Finding(Status.OK, f"serve line: {what}", str(choice))


def checkpoint(model: Path | None) -> Findings:
    """The headers of a local checkpoint, against what gpt-oss must have."""
    if model is None:
        return
    from vllm_gptoss.engine.checkpoint.check import CheckpointError
    from vllm_gptoss.engine.checkpoint.check import check as check_files

    try:
        check_files(model)
    except CheckpointError as error:
        yield Finding(Status.PROBLEM, "checkpoint", str(error), "download it again, or name another directory")
    else:
        yield Finding(Status.OK, "checkpoint", f"{model}: every tensor is there, whole and of its shape")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT
