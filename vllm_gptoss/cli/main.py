"""The `vllm-gptoss` command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

from vllm_gptoss.tools.missing import reason
from vllm_gptoss.version import __version__

try:
    import typer
    from rich.console import Console
    from rich.table import Table

    from vllm_gptoss.cli.doctor import Finding, Status, examine
except ImportError as error:
    raise SystemExit(f"vllm-gptoss cannot run: {reason(error)}") from None

app = typer.Typer(name="vllm-gptoss", no_args_is_help=True, add_completion=False, help="gpt-oss on vLLM.")


def _add_tools() -> None:
    from vllm_gptoss.tools.check import check
    from vllm_gptoss.tools.serve import serve

    tools = typer.Typer(no_args_is_help=True, help="The tools that the model calls inside /v1/responses.")
    tools.command("check", help="Start every configured tool, run one call each, print a table.")(check)
    tools.command("serve", help="Serve our python and browser tools as MCP servers, for any engine.")(serve)
    app.add_typer(tools, name="tools")


def _add_bench() -> None:
    from vllm_gptoss.cli.bench import consistency, decode, host, streams

    bench = typer.Typer(no_args_is_help=True, help="Benchmarks of the plugin against stock vLLM on this machine.")
    bench.command("decode", help="TPOT and GPU time per step, shapes of 20b and 120b with dummy weights.")(decode.main)
    bench.command("merge", help="Add the measurements of several results files up.")(decode.merge)
    bench.command("consistency", help="Log-probabilities of decode against those of prompts, also after a reload.")(
        consistency.main
    )
    bench.command("host", help="CPU time of the API server for each streamed token, stock and plugin; needs no GPU.")(
        host.main
    )
    bench.command("streams", help="Time between tokens of a running server, and its engine's processor time.")(
        streams.main
    )
    app.add_typer(bench, name="bench")


def _add_recipes() -> None:
    from vllm_gptoss.cli.recipes.cli import app as recipes

    app.add_typer(recipes, name="recipe")


def _add_eval() -> None:
    from vllm_gptoss.cli.eval.command import app as evaluate

    app.add_typer(evaluate, name="eval")


for _add in (_add_tools, _add_bench, _add_recipes, _add_eval):
    try:
        _add()
    except ImportError as _error:  # where packages are missing, `doctor` must run and name them all
        _what = _add.__name__.removeprefix("_add_")
        typer.echo(f"no `{_what}` commands: {reason(_error)}", err=True)

_STYLE = {Status.OK: "green", Status.INFO: "cyan", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def doctor(
    command: Annotated[list[str] | None, typer.Argument(help="A `vllm serve` line to judge, after `--`.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint directory to check as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
) -> None:
    """Say whether the plugin is active here, what it chose and why, and which settings do nothing."""
    findings = examine(model, command or ())
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.status is Status.PROBLEM for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for column in ("status", "check", "detail"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        detail = f"{finding.detail}\n-> {finding.fix}" if finding.fix else finding.detail
        table.add_row(f"[{_STYLE[finding.status]}]{finding.status}[/]", finding.check, detail)
    Console().print(table)
