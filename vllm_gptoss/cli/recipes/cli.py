"""`vllm-gptoss recipe …`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from vllm_gptoss.cli.recipes import check as rules
from vllm_gptoss.cli.recipes import defaults, drafts, draw, find, flags, here, load, plan, probe, render, verdicts
from vllm_gptoss.cli.recipes.check import Case, Trouble
from vllm_gptoss.cli.recipes.load import RecipeError
from vllm_gptoss.cli.recipes.plan import PlanError
from vllm_gptoss.cli.recipes.probe import Parsed, ProbeError, Release
from vllm_gptoss.cli.recipes.schema import SPECS, Family, Goal, Recipe, size_of
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.choose.devices import DeviceError
from vllm_gptoss.tools import yaml_file

app = typer.Typer(no_args_is_help=True, help="Which command for which machine, checked with vLLM's own parser.")

USAGE = 2
"""Exit code of a wrong command line; 1 is that of findings."""


def _whole(model: str) -> str:
    """The whole name of `20b`, `safeguard-120b` or `openai/gpt-oss-20b`; empty stays empty."""
    if model and not any(size in model for size in SPECS):
        raise typer.BadParameter(f"{model!r} is neither 20b nor 120b")
    other = not model or ("/" in model and not model.startswith("openai/"))
    return model if other else f"openai/gpt-oss-{model.removeprefix('openai/').removeprefix('gpt-oss-')}"


Checked = Annotated[list[str] | None, typer.Argument(help="an id, a path, or a `vllm serve` line after `--`")]
Memory = Annotated[float, typer.Option(min=0, help="GiB of one GPU, for a device that no table has")]
Planned = Annotated[list[str] | None, typer.Argument(help="an id, or a `vllm serve` line after `--`")]


def _stop(error: Exception) -> typer.Exit:
    typer.echo(str(error), err=True)
    return typer.Exit(USAGE)


def machine(name: str, memory_gib: float = 0.0) -> Device:
    """`auto` is this machine; else a row of the table, as `8xH100`. memory_gib: of one GPU, instead of the row's.

    Raises:
        DeviceError: no row is called that.
    """
    if name != "auto":
        return devices.named(name, memory_gib)
    return replace(here.detect(), memory_gib=memory_gib) if memory_gib else here.detect()


@app.command("list")
def list_(
    device: Annotated[str, typer.Option(help="`auto` for this machine, or as H200, 8xH100; empty: all")] = "",
    model: Annotated[str, typer.Option(help="only of 20b or 120b", callback=_whole)] = "",
    goal: Annotated[Goal | None, typer.Option(help="only for this goal")] = None,
    fits: Annotated[bool, typer.Option("--fits", help="all that fit --device, also those of other GPUs")] = False,
    memory_gib: Memory = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="evidence, as in recipes/README.md")] = False,
) -> None:
    """Device, model, goal, evidence, and what we measured."""
    size = size_of(model) if model else ""
    recipes = [recipe for recipe in load.shipped() if size in ("", recipe.model) and goal in (None, recipe.goal)]
    if device or fits:
        try:
            place = machine(device or "auto", memory_gib)
        except DeviceError as error:
            raise _stop(error) from None
        found = find.fitting(recipes, place) if fits else find.for_device(recipes, place)
        recipes = list(found.recipes)
        if found.why:
            typer.echo(found.why, err=True)
    if as_json:
        typer.echo(json.dumps([render.data(recipe) for recipe in recipes], indent=2))
        return
    if markdown:
        evidence = render.table(recipes)
        typer.echo(evidence, nl=False)
        if recipes and not evidence:
            typer.echo(f"no measurement of these {len(recipes)} recipes exists: `recipe list` shows them", err=True)
        return
    rows = [render.row(recipe) for recipe in recipes]
    if not rows:
        return  # `find` has printed why
    table = Table(box=None, padding=(0, 1))
    for column in rows[0]:
        table.add_column(column, no_wrap=column in ("id", "status"))
    for each in rows:
        table.add_row(*each.values())
    draw.console().print(table)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a recipe's id", metavar="ID")],
    config: Annotated[bool, typer.Option("--config", help="the file for `vllm serve --config`")] = False,
    env: Annotated[bool, typer.Option("--env", help="variables, for `source`")] = False,
    command: Annotated[bool, typer.Option("--command", help="one line for a shell")] = False,
    docker: Annotated[bool, typer.Option("--docker", help="`docker run`")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="a Deployment with its volumes and Service")] = False,
) -> None:
    """One recipe, all of it or in one form."""
    recipe = _recipe(name)
    forms = ((config, render.config), (env, render.env), (command, render.command), (docker, render.docker))
    wanted = [form for asked, form in (*forms, (kubernetes, render.kubernetes)) if asked]
    if wanted:
        typer.echo("\n".join(form(recipe) for form in wanted), nl=False)
        return
    typer.echo(f"{recipe.id}: {recipe.status.value}, {recipe.place}")
    expects = recipe.entry.expects
    typer.echo(f"chooses: attention {expects.attention}, experts {expects.experts}, layers {expects.layers}")
    for claim in recipe.claims:
        stock = f", stock vLLM {claim.stock_ms:.2f}" if claim.stock_ms else ""
        typer.echo(f"measured: {claim.tpot_ms:.2f} ms per token, {claim.requests} at once{stock} ({claim.results})")
    for each in recipe.published:
        typer.echo(f"published: {each.says} ({each.source})")
    if recipe.entry.note:
        typer.echo(f"note: {recipe.entry.note}")
    if "speculative-config" in recipe.config:
        typer.echo("\n".join(f"drafts: {line}" for line in drafts.advice(recipe.spec, recipe.device, recipe.config)))
    typer.echo(f"command: {render.command(recipe)}", nl=False)
    typer.echo("\n" + render.env(recipe) + render.config(recipe), nl=False)


def _recipe(name: str) -> Recipe:
    try:
        return find.by_id(load.shipped(), name)
    except RecipeError as error:
        raise _stop(error) from None


@app.command()
def schema() -> None:
    """JSON Schema of a file of recipes."""
    typer.echo(json.dumps(Family.model_json_schema(), indent=2))


@app.command()
def check(
    what: Checked = None,
    device: Annotated[str, typer.Option(help="for a command: the machine that runs it")] = "auto",
    memory_gib: Memory = 0.0,
    source: Annotated[list[Path] | None, typer.Option(help="an unpacked vLLM release to check with as well")] = None,
    release: Annotated[
        bool, typer.Option("--release", help="measurements may be neither old nor of an older vLLM")
    ] = False,
    today: Annotated[str, typer.Option(help="the date of the release, as 2026-11-23", show_default="today")] = "",
) -> None:
    """Check recipes, a file, or a `vllm serve` line with vLLM's parser and engine, the tables and the results."""
    try:
        day, place = _day(today, release), functools.partial(machine, device, memory_gib)
        if not what:
            found = _check_named([str(load.FOLDER)], place, source or (), day)
        elif all(map(_is_named, what)) or (len(what) == 1 and what != ["vllm"]):
            found = _check_named(what, place, source or (), day)
        else:
            found = _check_words(what, place(), source or ())
    except (RecipeError, DeviceError, ProbeError, ValueError) as error:
        raise _stop(error) from None
    for trouble in found:
        typer.echo(f"{'error' if trouble.fatal else 'advice'}: {trouble}")
    if any(trouble.fatal for trouble in found):
        raise typer.Exit(1)


def _day(today: str, release: bool) -> date | None:
    """The date of our release; None: no release is made."""
    if today and not release:
        raise RecipeError("--today is the date of a release: give --release as well")
    return (date.fromisoformat(today) if today else date.today()) if release else None


def _is_named(word: str) -> bool:
    """Whether a word is a file, a folder or a recipe's id, not part of a command."""
    if word.startswith("-") or word == "vllm" or "=" in word:
        return False
    return Path(word).exists() or Path(word).suffix in (".yaml", ".yml") or "/" not in word


def _check_named(
    names: Sequence[str], place: Callable[[], Device], sources: Sequence[Path], day: date | None
) -> list[Trouble]:
    """Findings of paths and of recipes' ids."""
    recipes: list[Recipe] = []
    found: list[Trouble] = []
    for name in names:
        path = Path(name)
        if not (path.exists() or path.suffix or os.sep in name):
            recipes.append(find.by_id(load.shipped(), name))
        elif (theirs := _recipes_in(path)) is not None:
            recipes += theirs
        else:
            words, on = ["vllm", "serve", "--config", str(path.absolute())], place()
            keys, root = load.read(path)
            found += [rules.in_file(each, path, root, keys) for each in _check_words(words, on, sources)]
    return [*found, *(_check_recipes(recipes, sources, day) if recipes else ())]


def _recipes_in(path: Path) -> list[Recipe] | None:
    """Recipes of a file or folder; None: it is a file for `vllm serve --config`."""
    files = yaml_file.files(path)
    if not files:
        raise RecipeError(f"{path}: no .yaml file is here")
    first, _ = load.read(files[0])
    if isinstance(first, dict) and not path.is_dir() and not {"recipes", "family"} & set(first):
        return None
    return [recipe for file in files for recipe in load.load(file)]


def _check_recipes(recipes: Sequence[Recipe], sources: Sequence[Path], day: date | None) -> list[Trouble]:
    releases = [probe.ask([recipe.config for recipe in recipes], root) for root in probe.roots_of(sources)]
    found = []
    for index, recipe in enumerate(recipes):
        found += rules.recipe(recipe, [(each, each.parsed[index]) for each in releases], today=day)
    many = f"{len(recipes)} recipes" if len(recipes) != 1 else recipes[0].id
    versions = _versions([(each, each.parsed[0]) for each in releases])
    typer.echo(f"{many}, {versions}: {len(found)} found wrong")
    return found


def _check_words(words: Sequence[str], device: Device, sources: Sequence[Path]) -> list[Trouble]:
    environ = {**os.environ, **flags.variables(words)}
    values, releases = probe.of_line(flags.words(words), environ, sources)
    if not all(parsed.error for _, parsed in releases) or not releases:
        _print_guess(values)
    found = rules.command(rules.case_of(values, device, environ), releases)
    if not releases:
        typer.echo("vLLM is not installed: unknown flags are not found", err=True)
    if not found:
        typer.echo(f"{devices.label(device)}, {_versions(releases)}: nothing found wrong")
    return found


def _versions(releases: Sequence[tuple[Release, Parsed]]) -> str:
    return "vLLM " + " and ".join(release.version for release, _ in releases) if releases else "no vLLM"


def _print_guess(values: Mapping[str, Any]) -> None:
    """A line where the model's name does not contain its size."""
    if guess := rules.guessed(values):
        typer.echo(f"{values.get('model', 'a model without a name')} is taken for {guess}", err=True)


@app.command("plan")
def plan_(
    what: Planned = None,
    device: Annotated[str, typer.Option(help="on what: `auto`, or as 2xH100; a recipe has its own")] = "",
    memory_gib: Memory = 0.0,
    model: Annotated[str, typer.Option(help="20b or 120b, instead of a recipe or a line", callback=_whole)] = "",
    context: Annotated[str, typer.Option(help="tokens of a request, as 32k: search settings for it")] = "",
    users: Annotated[int, typer.Option(min=0, help="requests at the same time: search settings for them")] = 0,
    accepted: Annotated[float | None, typer.Option(min=1, help="tokens per step of your drafts: do they pay?")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Memory of one GPU by part, requests that fit at once, and the settings that fit where it does not.

    With --context or --users, the `vllm serve` command that serves them, or the nearest one that fits.
    """
    try:
        case = _case([model] if model else what or [], device, memory_gib, line=bool(model))
        if context:
            length = flags.values(["--max-model-len", context])
            case = replace(case, config={**case.config, **length})
        command, reached = "", True
        if context or users:
            case, command, reached = _searched(case, max(users, 1))
        found = plan.plan(case.spec, case.device, case.config, case.env)
        lines = drafts.advice(case.spec, case.device, case.config, users, accepted)
    except (RecipeError, DeviceError, PlanError) as error:
        raise _stop(error) from None
    if as_json:
        extra = {"command": command} if command else {}
        typer.echo(json.dumps({**draw.data(found, case.place), **extra, "drafts": lines}, indent=2))
    else:
        if command:
            typer.echo(command)
        draw.console().print(draw.text(found, case.place))
        typer.echo("".join(f"drafts: {line}\n" for line in lines), nl=False)
    if not (found.fits and reached):
        raise typer.Exit(1)


def _searched(case: Case, users: int) -> tuple[Case, str, bool]:
    """The case with the settings that serve `users`, its command, and whether it does: else it is the nearest."""
    found = plan.search(case.spec, case.device, case.config, case.env, users)
    if found is None:
        plan.plan(case.spec, case.device, case.config, case.env)  # raises for a CPU, and a GPU that vLLM refuses
        instead = plan.instead(case.spec, case.device, case.env)
        raise PlanError(f"no settings make {case.spec.name} fit {devices.label(case.device)}: use {instead}")
    config, result = found
    words = ["vllm", "serve", str(config.get("model") or f"openai/{case.spec.name}")]
    words += [word for key, value in config.items() if key != "model" for word in render.flag(key, value)]
    wanted = defaults.filled(case.device, case.config)["max-model-len"]
    reached = result.length >= wanted and result.requests * result.replicas >= users
    if not reached:
        typer.echo(f"nothing serves {users} requests of {wanted:,} tokens; this is the nearest that fits", err=True)
    own = {name: value for name, value in case.env.items() if os.environ.get(name) != value}
    return replace(case, config=config), render.line(own, words).strip(), reached


def _case(what: Sequence[str], device: str, memory_gib: float, line: bool) -> Case:
    """A recipe on its device or another, or the words of a command, which `plan` reads without vLLM."""
    several = len(what) > 1 and all(map(_is_named, what))
    if not what or several or (what[0] == "vllm" and len(what) < 3):
        raise RecipeError("plan what? the id of one recipe, a `vllm serve` line after `--`, or --model")
    if len(what) == 1 and not line:
        recipe = find.by_id(load.shipped(), what[0])
        place = machine(device, memory_gib) if device else recipe.device
        return Case(recipe.id, recipe.spec, place, recipe.config, recipe.env)
    if means := [means for name, means in flags.RENAMED.items() if any(name in word for word in what)]:
        raise RecipeError(f"vLLM does not take this line: {means[0]}")
    values, environ = flags.values(flags.words(what)), {**os.environ, **flags.variables(what)}
    if unread := [key for key in values if not flags.COUNTED.fullmatch(key)]:
        typer.echo(f"the plan does not depend on --{', --'.join(unread)}", err=True)
    _print_guess(values)
    case = rules.case_of(values, machine(device or "auto", memory_gib), environ)
    if refused := next(verdicts.refused(case.device, case.config, case.env), None):
        raise PlanError("; ".join(refused))
    return case


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="a recipe's id", metavar="ID")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command instead")] = False,
) -> None:
    """Run `vllm serve` with a recipe's flags; flags after `--` win over them."""
    recipe = _recipe(name)
    try:
        words = render.words(recipe, [word for word in context.args if word != "--"])
        other = find.elsewhere(recipe, here.detect())
    except (RecipeError, DeviceError) as error:
        raise _stop(error) from None
    for line in filter(None, (other, *render.overridden(recipe, os.environ))):
        typer.echo(line, err=True)
    if dry_run:
        typer.echo(render.line(recipe.env, words), nl=False)
        return
    os.environ.update(recipe.env)
    try:
        os.execvp(words[0], words)  # noqa: S606  the server takes this process's place, and its signals
    except FileNotFoundError:
        typer.echo("vllm is not on PATH; `vllm-gptoss doctor` reports what to install", err=True)
        raise typer.Exit(1) from None
