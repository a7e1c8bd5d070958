"""Checks a configuration against a vLLM release, the tables and its claims. One rule is one function. `recipe` applies
all of them to a recipe, `command` those for users to a `vllm serve` line.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import yaml

from vllm_gptoss import _vllm
from vllm_gptoss.cli.recipes import defaults, flags, plan, variables, verdicts
from vllm_gptoss.cli.recipes.deployment import NUMBERS, bounds, choices, deployment, gpus, no_numbers, section
from vllm_gptoss.cli.recipes.load import FOLDER
from vllm_gptoss.cli.recipes.plan import PlanError
from vllm_gptoss.cli.recipes.probe import Parsed, Release
from vllm_gptoss.cli.recipes.schema import SPECS, Claim, Recipe, size_of
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import ChoiceError, devices
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import ModelSpec
from vllm_gptoss.settings import SettingsError
from vllm_gptoss.tools.yaml_file import line_of

RESULTS: Final = FOLDER.resolve().parent / "benchmarks" / "results"
"""Measurements behind the claims; a wheel has none."""

VALID: Final = timedelta(days=180)
"""How long a measurement counts in a release check."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One finding. fatal: the server does not start, or the recipe is wrong; else it is advice."""

    place: str
    rule: str
    what: str
    remedy: str = ""
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Case:
    """A configuration on a device. place: what a message starts with."""

    place: str
    spec: ModelSpec
    device: Device
    config: Mapping[str, Any]
    env: Mapping[str, str]


Rule = Callable[[Case], Iterator[Trouble]]


def parses(case: Case, release: Release, parsed: Parsed) -> Iterator[Trouble]:
    """The release's parser accepts all of it."""
    where = f"{case.place} (vLLM {release.version})"
    if parsed.error:
        yield Trouble(where, "parses", f"does not start: {parsed.error}", flags.since_then(parsed.error, release.flags))
    for key in parsed.dropped:
        yield Trouble(where, "parses", f"{key}: false is dropped by --config without a word", f"write no-{key}: true")


def names_exist(case: Case, release: Release) -> Iterator[Trouble]:
    """Names that the parser does not check: backends, draft keys, cache dtypes."""
    where = f"{case.place} (vLLM {release.version})"
    draft = section(case.config, "speculative-config")
    asked: list[tuple[str, Iterable[Any], frozenset[str]]] = [
        ("attention-backend", [case.config.get("attention-backend")], release.attention_backends),
        ("kv-cache-dtype", [case.config.get("kv-cache-dtype")], release.cache_dtypes),
        ("speculative-config", list(draft), release.speculative_keys),
        ("speculative-config.method", [draft.get("method")], release.speculative_methods),
    ]
    for key, given, known in asked:
        for name in given:
            if name is not None and name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                remedy = f"did you mean {near[0]}?" if near else ""
                yield Trouble(where, "names", f"{key}: this release knows no {name!r}", remedy)


def numbers(case: Case) -> Iterator[Trouble]:
    """Numbers that the parser accepts and the engine refuses at the start."""
    for key in no_numbers(case.config):
        value = case.config[key]
        accepted = key == "max-cudagraph-capture-size" or (key, value) == ("max-model-len", -1)  # 0, and `auto`
        if isinstance(value, NUMBERS[key]) and not (isinstance(value, bool) or accepted):
            yield Trouble(case.place, "numbers", f"--{key} {value} is refused at the start", f"it is {bounds(key)}")


def numbers_agree(case: Case) -> Iterator[Trouble]:
    """Numbers that are valid separately, but not together."""
    if why := defaults.refused(case.device, case.config):
        yield Trouble(case.place, "numbers", why, "raise the first, or lower the second")


def settings_and_tables(case: Case) -> Iterator[Trouble]:
    """vLLM runs on that GPU, our settings exist, the model divides over the GPUs, and there are so many GPUs."""
    if why := choose.unserved(case.device):
        yield Trouble(case.place, "tables", why)
    try:
        choices(case.device, case.config, case.env, case.spec)
    except (ChoiceError, SettingsError) as error:
        yield Trouble(case.place, "tables", str(error))
    if (used := gpus(case.config)) > case.device.count and case.device.vendor != "cpu":
        what = f"uses {used} GPUs, {devices.label(case.device)} has {case.device.count}"
        yield Trouble(case.place, "tables", what, "lower the parallel sizes, or name more GPUs")


def reads_sinks(case: Case) -> Iterator[Trouble]:
    """The named attention backend reads sinks on that GPU: otherwise vLLM refuses it at the start."""
    named = case.config.get("attention-backend")
    if named is not None and not choose.reads_sinks(case.device, str(named)):
        what = f"--attention-backend {named} reads no sinks on {case.device.name}"
        yield Trouble(case.place, "tables", what, "leave it out: one that does is chosen")


def engine_starts(case: Case, releases: Sequence[tuple[Release, Parsed]]) -> Iterator[Trouble]:
    """vLLM's engine accepts the arguments: its own verdict, else that of `verdicts`."""
    verdict = [(release, parsed.refused) for release, parsed in releases if not parsed.error]
    if verdict and not any(why for _, why in verdict):
        return
    table = list(verdicts.refused(case.device, case.config, case.env))
    for what, remedy in table:
        yield Trouble(case.place, "engine", what, remedy)
    for release, why in verdict if not table else ():
        if why:
            yield Trouble(f"{case.place} (vLLM {release.version})", "engine", f"refused at the start: {why}")


def ignored(case: Case) -> Iterator[Trouble]:
    """Flags without effect on gpt-oss."""
    if "chat-template" in case.config:
        what = "--chat-template is ignored: the prompt of gpt-oss is Harmony"
        yield Trouble(case.place, "ignored", what, "leave it out", fatal=False)


def fits(case: Case) -> Iterator[Trouble]:
    """The memory plan holds the weights and one request of full length."""
    try:
        found = plan.plan(case.spec, case.device, case.config, case.env)
    except PlanError:
        return  # a CPU, or reported by settings_and_tables
    if not found.fits:
        what = f"does not fit {devices.label(case.device)}: {found.why}"
        yield Trouble(case.place, "plan", what, f"this would: {', or '.join(found.advice)}")


def room_on_host(case: Case) -> Iterator[Trouble]:
    """A CPU's weights fit into the host's memory, where that is known."""
    have = case.device.memory_gib
    if case.device.vendor != "cpu" or not have or case.spec.name not in str(case.config.get("model", "")):
        return
    try:
        need = plan.on_cpu(case.spec, case.device, case.config, case.env)
    except PlanError:
        return  # reported by settings_and_tables
    if need > have:
        what = f"the weights take {need:.0f} GiB, this host has {have:.0f}"
        yield Trouble(case.place, "host", what, "take a host with more memory, or a GPU", fatal=False)


def room_for_several(case: Case) -> Iterator[Trouble]:
    """A utilisation at which others ran out of memory."""
    if caution := plan.caution(case.device, case.config):
        what = f"--gpu-memory-utilization {case.config.get('gpu-memory-utilization', defaults.UTILIZATION)} may run out"
        yield Trouble(case.place, "utilization", what, caution, fatal=False)


def aiter_is_on(case: Case) -> Iterator[Trouble]:
    """AITER is on where it is named."""
    asked = deployment(case.spec, case.device, case.config, case.env)
    names = [case.config.get("attention-backend"), case.config.get("moe-backend")]
    named = [name for name in names if name and "aiter" in str(name).lower()]
    if named and not asked.aiter:
        remedy = "set VLLM_ROCM_USE_AITER=1, which is off by default"
        yield Trouble(case.place, "aiter", f"{' and '.join(named)} is AITER's, which is off", remedy)


def keeps_fused_layers(case: Case) -> Iterator[Trouble]:
    """The fused layers read a KV cache of bf16 or e4m3 only."""
    asked = deployment(case.spec, case.device, case.config, case.env)
    exact = replace(asked, kv_cache_dtype="auto")
    if asked.kv_cache_dtype == exact.kv_cache_dtype or choose.layers(case.device, exact).value != "gptoss":
        return
    if choose.layers(case.device, asked).value != "gptoss":
        what = f"--kv-cache-dtype {asked.kv_cache_dtype} costs the fused layers for few tokens"
        yield Trouble(case.place, "fp8", what, "--kv-cache-dtype fp8, which is e4m3, keeps them", fatal=False)


def needless(case: Case) -> Iterator[Trouble]:
    """`--async-scheduling` of old guides."""
    if case.config.get("async-scheduling") is not True:
        return
    if section(case.config, "speculative-config").get("method") == "ngram":
        what = "--async-scheduling with n-gram drafts is a start error with vLLM's first model runner"
        yield Trouble(case.place, "async", what, "leave --async-scheduling out: vLLM turns it off")
    else:
        yield Trouble(case.place, "async", "--async-scheduling is on by default", "leave it out", fatal=False)


def dead_variables(case: Case, release: Release) -> Iterator[Trouble]:
    """Variables that this release does not read."""
    for name, instead in variables.dead(case.env, release.variables).items():
        where = f"{case.place} (vLLM {release.version})"
        yield Trouble(where, "variables", f"nothing reads {name}", variables.remedy(instead))


# Rules for recipes only


def expected(case: Case, recipe: Recipe) -> Iterator[Trouble]:
    """`choose` equals `expects`."""
    try:
        found = choices(case.device, case.config, case.env, case.spec)
    except (ChoiceError, SettingsError):
        return  # reported by settings_and_tables
    for part, choice in found.items():
        if (wanted := getattr(recipe.entry.expects, part)) != choice.value:
            yield Trouble(case.place, "expects", f"expects.{part} is {wanted!r}, the tables choose {choice}")


def no_default(case: Case, parsed: Parsed) -> Iterator[Trouble]:
    """No flag repeats vLLM's default."""
    filled = defaults.of(case.device)
    same = {key for key, value in case.config.items() if key in filled and filled[key] == value}
    for key in sorted(same.union(parsed.restated)):
        yield Trouble(case.place, "defaults", f"{key}: {case.config[key]} is the default", "leave it out")


def claims_hold(case: Case, recipe: Recipe, results: Path) -> Iterator[Trouble]:
    """Each claim's figures are in its results file, of that device and these flags."""
    for claim in recipe.claims:
        where = f"{case.place}: claim of {claim.requests} requests"
        try:
            data = json.loads((results / claim.results).read_text())
        except (OSError, ValueError) as error:
            yield Trouble(where, "claims", f"{claim.results}: {error}")
            continue
        if case.device.name not in data["gpu"]:
            yield Trouble(where, "claims", f"{claim.results} was measured on {data['gpu']}, not on {case.device.name}")
        rows = [row for row in data["rows"] if _same(row, claim, case)]
        if not any(_equal(row, claim) for row in rows):
            found = ", ".join(f"{row['plugin_tpot_ms']:.2f}" for row in rows) or "no such row"
            yield Trouble(where, "claims", f"{claim.results} says {found}, the recipe {claim.tpot_ms:.2f} ms")


def _same(row: Mapping[str, Any], claim: Claim, case: Case) -> bool:
    return (
        (row["model"], row["batch"]) == (claim.model, claim.requests)
        and row["tensor_parallel"] == case.config.get("tensor-parallel-size", 1)
        and row["eagle3"] == section(case.config, "speculative-config").get("num_speculative_tokens", 0)
        and not row["skew"]
        and row["options"] == {k.replace("-", "_"): v for k, v in case.config.items() if k not in _NOT_OPTIONS}
        and row["plugin"] == "plugin"
    )


_NOT_OPTIONS = {"model", "tensor-parallel-size", "speculative-config", "tool-server", "no-enable-prefix-caching"}
"""Flags that a results file has in other fields, that no engine reads, or that every measurement has. The others are
what `python -m benchmarks.decode run --options` was given where it measured this very configuration."""


def _equal(row: Mapping[str, Any], claim: Claim) -> bool:
    ours = round(row["plugin_tpot_ms"], 2) == claim.tpot_ms
    return ours and (claim.stock_ms is None or round(row["stock_tpot_ms"], 2) == claim.stock_ms)


def still_valid(case: Case, recipe: Recipe, results: Path, today: date) -> Iterator[Trouble]:
    """At a release, a measurement is not older than `VALID` and of the newest vLLM that is supported."""
    newest = f"{_vllm.SUPPORTED[1][0]}.{_vllm.SUPPORTED[1][1] - 1}"
    for name in dict.fromkeys(claim.results for claim in recipe.claims):
        try:
            data = json.loads((results / name).read_text())
        except (OSError, ValueError):
            continue  # reported by claims_hold
        measured = date.fromisoformat(data["date"])
        if today - measured > VALID:
            yield Trouble(case.place, "release", f"{name} is {(today - measured).days} days old", "measure again")
        if not data["vllm"].startswith(newest):
            yield Trouble(case.place, "release", f"{name} is of vLLM {data['vllm']}, not {newest}", "measure again")


def recipe(
    recipe: Recipe, releases: Sequence[tuple[Release, Parsed]], results: Path = RESULTS, today: date | None = None
) -> list[Trouble]:
    """Every rule on one recipe. releases: each with its answer to `recipe.config`; today: the date of our release."""
    case = Case(f"{recipe.place} {recipe.id}", recipe.spec, recipe.device, recipe.config, recipe.env)
    found = [each for each in command(case, releases) if each.fatal]  # a recipe may accept a cost
    if wrong := no_numbers(case.config):
        said = Trouble(case.place, "numbers", f"{wrong[0]}: {case.config[wrong[0]]!r} is no number")
        return found if any(each.rule == "numbers" for each in found) else [*found, said]
    found += expected(case, recipe)
    if gpus(case.config) != case.device.count:
        found.append(Trouble(case.place, "gpus", f"uses {gpus(case.config)} of {devices.label(case.device)}"))
    if releases:
        found += no_default(case, releases[-1][1])
    if results.is_dir():
        found += claims_hold(case, recipe, results)
        found += still_valid(case, recipe, results, today) if today is not None else ()
    return found


def command(case: Case, releases: Sequence[tuple[Release, Parsed]]) -> list[Trouble]:
    """Errors and advice for a user's configuration."""
    by_release = [
        trouble
        for release, parsed in releases
        for rule in (parses(case, release, parsed), names_exist(case, release), dead_variables(case, release))
        for trouble in rule
    ]
    countable = not no_numbers(case.config)  # else the parser refused it, or it is `auto`
    rooms: tuple[Rule, ...] = (fits, room_on_host, room_for_several)
    rules: tuple[Rule, ...] = (settings_and_tables, reads_sinks, numbers_agree, *rooms, aiter_is_on, keeps_fused_layers)
    found = [trouble for rule in ((*rules, needless) if countable else (numbers,)) for trouble in rule(case)]
    started = () if any(each.fatal and each.rule != "plan" for each in found) else engine_starts(case, releases)
    return [*by_release, *found, *ignored(case), *started]


def case_of(values: Mapping[str, Any], device: Device, env: Mapping[str, str]) -> Case:
    """The case of a user's command; its name decides the model's size."""
    return Case("vllm serve", SPECS[size_of(str(values.get("model", "")))], device, values, env)


def guessed(values: Mapping[str, Any]) -> str:
    """The size assumed for a model without one in its name; empty where the name has one."""
    name = str(values.get("model", ""))
    return "" if any(size in name for size in SPECS) else SPECS[size_of(name)].name


def in_file(trouble: Trouble, path: Path, root: yaml.Node, keys: Iterable[str]) -> Trouble:
    """The same finding of a file for `vllm serve --config`, with the line of the key that it names."""
    said = re.findall(r"[\w-]+", trouble.what)
    key = next((key for key in keys if f"--{key}" in said or key == said[0]), None)
    place = str(path) if key is None else f"{path}:{line_of(root, [key])}"
    return replace(trouble, place=trouble.place.replace("vllm serve", place, 1))
