"""`vllm-gptoss recipe …`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_gptoss.cli.recipes import check as rules
from vllm_gptoss.cli.recipes import command as typed
from vllm_gptoss.cli.recipes import draw, find, launch, load, plan, probe, render
from vllm_gptoss.cli.recipes.check import Case, Trouble
from vllm_gptoss.cli.recipes.load import RecipeError
from vllm_gptoss.cli.recipes.plan import PlanError
from vllm_gptoss.cli.recipes.probe import Parsed, ProbeError
from vllm_gptoss.cli.recipes.schema import Family, Recipe
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device, detect
from vllm_gptoss.engine.choose.devices import DeviceError
from vllm_gptoss.tools import yaml_file

app = typer.Typer(no_args_is_help=True, help="Which command for which machine, held against vLLM's own parser.")

USAGE = 2
"""Exit code for what was asked wrongly; 1 is for what was found wrong."""

Checked = Annotated[list[str] | None, typer.Argument(help="an id, a path, or a `vllm serve` line after `--`")]
Planned = Annotated[list[str] | None, typer.Argument(help="an id, or a `vllm serve` line after `--`")]


def _stop(error: Exception) -> typer.Exit:
    typer.echo(str(error), err=True)
    return typer.Exit(USAGE)


def machine(name: str) -> Device:
    """`auto` is this machine; else a row of the table, as `8xH100`.

    Raises:
        DeviceError: no row is called that.
    """
    return detect() if name == "auto" else devices.named(name)


@app.command("list")
def list_(
    device: Annotated[str, typer.Option(help="`auto` for this machine, or as H200, 8xH100; empty: all")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="as the table of recipes/README.md")] = False,
) -> None:
    """Device, model, goal, who has run it, and what we measured."""
    recipes = load.shipped()
    if device:
        try:
            found = find.for_device(recipes, machine(device))
        except DeviceError as error:
            raise _stop(error) from None
        recipes = list(found.recipes)
        if found.why:
            typer.echo(found.why, err=True)
    if as_json:
        typer.echo(json.dumps([render.data(recipe) for recipe in recipes], indent=2))
        return
    rows = [render.row(recipe) for recipe in recipes]
    if markdown:
        typer.echo(render.table(recipes), nl=False)
        return
    if not rows:
        return  # said above
    table = Table(box=None, padding=(0, 1))
    for column in rows[0]:
        table.add_column(column, no_wrap=column in ("id", "status"))
    for each in rows:
        table.add_row(*each.values())
    Console().print(table)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a recipe's id", metavar="ID")],
    config: Annotated[bool, typer.Option("--config", help="the file for `vllm serve --config`")] = False,
    env: Annotated[bool, typer.Option("--env", help="variables, for `source`")] = False,
    command: Annotated[bool, typer.Option("--command", help="one line for a shell")] = False,
    docker: Annotated[bool, typer.Option("--docker", help="`docker run`")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="a Deployment with its volumes and Service")] = False,
    upstream: Annotated[bool, typer.Option("--upstream", help="as vllm-project/recipes writes it")] = False,
) -> None:
    """One recipe, all of it or in one form."""
    recipe = _recipe(name)
    forms = ((config, render.config), (env, render.env), (command, render.command), (docker, render.docker))
    wanted = [form for asked, form in (*forms, (kubernetes, render.kubernetes), (upstream, render.upstream)) if asked]
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
    device: Annotated[str, typer.Option(help="for a command: on what it shall run")] = "auto",
    source: Annotated[list[Path] | None, typer.Option(help="an unpacked vLLM release to ask as well")] = None,
    release: Annotated[
        bool, typer.Option("--release", help="measurements may be neither old nor of an older vLLM")
    ] = False,
    today: Annotated[str, typer.Option(help="the date of the release, as 2026-11-23", show_default="today")] = "",
) -> None:
    """Hold recipes, a file, or a `vllm serve` line against vLLM's parser, the tables and the results."""
    try:
        day = _day(today, release)
        if not what:
            found = _check_named([str(load.FOLDER)], device, source or (), day)
        elif all(map(_is_named, what)) or (len(what) == 1 and what != ["vllm"]):
            found = _check_named(what, device, source or (), day)
        else:
            found = _check_words(what, machine(device), source or ())
    except (RecipeError, DeviceError, ProbeError, ValueError) as error:
        raise _stop(error) from None
    for trouble in found:
        typer.echo(f"{'error' if trouble.fatal else 'advice'}: {trouble}")
    if any(trouble.fatal for trouble in found):
        raise typer.Exit(1)


def _day(today: str, release: bool) -> date | None:
    """Of the release that is being made; None: none is."""
    if today and not release:
        raise RecipeError("--today is the date of a release: give --release as well")
    return (date.fromisoformat(today) if today else date.today()) if release else None


def _is_named(word: str) -> bool:
    """Whether a word is a file, a folder or a recipe's id, and no part of a command."""
    if word.startswith("-") or word == "vllm" or "=" in word:
        return False
    return Path(word).exists() or Path(word).suffix in (".yaml", ".yml") or "/" not in word


def _check_named(names: Sequence[str], device: str, sources: Sequence[Path], day: date | None) -> list[Trouble]:
    """Of paths, and of the recipes that are called so."""
    recipes: list[Recipe] = []
    found: list[Trouble] = []
    for name in names:
        path = Path(name)
        if not (path.exists() or path.suffix or os.sep in name):
            recipes.append(find.by_id(load.shipped(), name))
        elif (theirs := _recipes_in(path)) is not None:
            recipes += theirs
        else:
            found += _check_config(path, device, sources)
    return [*found, *(_check_recipes(recipes, sources, day) if recipes else ())]


def _recipes_in(path: Path) -> list[Recipe] | None:
    """Of a file or folder of recipes; None: it is a file that `vllm serve --config` reads."""
    files = yaml_file.files(path)
    if not files:
        raise RecipeError(f"{path}: no .yaml file is here")
    first, _ = load.read(files[0])
    if isinstance(first, dict) and not path.is_dir() and not {"recipes", "family"} & set(first):
        return None
    return [recipe for file in files for recipe in load.load(file)]


def _check_config(path: Path, device: str, sources: Sequence[Path]) -> list[Trouble]:
    keys, root = load.read(path)
    found = _check_words(["vllm", "serve", "--config", str(path.absolute())], machine(device), sources)
    return [rules.in_file(trouble, path, root, keys) for trouble in found]


def _check_recipes(recipes: Sequence[Recipe], sources: Sequence[Path], day: date | None) -> list[Trouble]:
    releases = [probe.ask([recipe.config for recipe in recipes], root) for root in (None, *sources)]
    found = []
    for index, recipe in enumerate(recipes):
        found += rules.recipe(recipe, [(each, each.parsed[index]) for each in releases], today=day)
    versions = " and ".join(each.version for each in releases)
    many = f"{len(recipes)} recipes" if len(recipes) != 1 else recipes[0].id
    typer.echo(f"{many}, vLLM {versions}: {len(found)} found wrong")
    return found


def _check_words(words: Sequence[str], device: Device, sources: Sequence[Path]) -> list[Trouble]:
    releases = [probe.ask([typed.words(words)], root) for root in (None, *sources)]
    _say_what_is_guessed(releases[0].parsed[0])
    environ = {**os.environ, **typed.variables(words)}
    found = rules.line(device, environ, [(each, each.parsed[0]) for each in releases])
    if not found:
        versions = " and ".join(each.version for each in releases)
        typer.echo(f"{devices.label(device)}, vLLM {versions}: nothing found wrong")
    return found


def _say_what_is_guessed(parsed: Parsed) -> None:
    """A line where the model's name does not tell which of the two it is."""
    if not parsed.error and (guess := rules.guessed(parsed.values)):
        typer.echo(f"{parsed.values.get('model', 'a model without a name')} is taken for {guess}", err=True)


@app.command("plan")
def plan_(
    what: Planned = None,
    device: Annotated[str, typer.Option(help="on what: `auto`, or as 2xH100; a recipe has its own")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Memory of one GPU by part, requests that fit at once, and what to turn where it does not fit."""
    try:
        case = _case(what or [], device)
        found = plan.plan(case.spec, case.device, case.config, case.env)
    except (RecipeError, DeviceError, ProbeError, PlanError) as error:
        raise _stop(error) from None
    if as_json:
        typer.echo(json.dumps(draw.data(found, case.place), indent=2))
    else:
        Console().print(draw.text(found, case.place))
    if not found.fits:
        raise typer.Exit(1)


def _case(what: Sequence[str], device: str) -> Case:
    """A recipe on its device or another, or the words of a command."""
    several = len(what) > 1 and all(map(_is_named, what))
    if not what or several or (what[0] == "vllm" and len(what) < 3):
        raise RecipeError("plan what? the id of one recipe, or a `vllm serve` line after `--`")
    if len(what) == 1:
        recipe = find.by_id(load.shipped(), what[0])
        return Case(recipe.id, recipe.spec, machine(device) if device else recipe.device, recipe.config, recipe.env)
    release = probe.ask([typed.words(what)])
    (parsed,) = release.parsed
    if parsed.error:
        means = rules.since_then(parsed.error, release)
        raise RecipeError("; ".join(filter(None, (f"vLLM does not take this line: {parsed.error}", means))))
    _say_what_is_guessed(parsed)
    return rules.case_of(parsed.values, machine(device or "auto"), {**os.environ, **typed.variables(what)})


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="a recipe's id", metavar="ID")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command instead")] = False,
) -> None:
    """Run `vllm serve --config` with a recipe; flags after `--` win over it."""
    recipe = _recipe(name)
    try:
        words = launch.words(recipe, [word for word in context.args if word != "--"])
    except RecipeError as error:
        raise _stop(error) from None
    if dry_run:
        typer.echo(render.line(recipe.env, words), nl=False)
        return
    for line in launch.overridden(recipe, os.environ):
        typer.echo(line, err=True)
    os.environ.update(recipe.env)
    try:
        os.execvp(words[0], words)  # noqa: S606  the server takes this process's place, and its signals
    except FileNotFoundError:
        typer.echo("vllm is not on PATH; `vllm-gptoss doctor` says what to install", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    sys.exit(app())
