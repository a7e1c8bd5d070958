"""The `vllm-gptoss` command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from vllm_gptoss.tools.missing import reason
from vllm_gptoss.version import __version__

try:
    import typer
    from typer.core import TyperCommand, TyperGroup
except ImportError as error:
    raise SystemExit(f"vllm-gptoss cannot run: {reason(error)}") from None


def _tools() -> typer.Typer:
    from vllm_gptoss.tools.check import check
    from vllm_gptoss.tools.serve import serve

    tools = typer.Typer(no_args_is_help=True, help=GROUPS["tools"][1])
    tools.command("check", help="Start every configured tool, run one call each, print a table.")(check)
    tools.command("serve", help="Serve our python and browser tools as MCP servers, for any engine.")(serve)
    return tools


def _bench() -> typer.Typer:
    from vllm_gptoss.cli.bench import consistency, start

    bench = typer.Typer(no_args_is_help=True, help=GROUPS["bench"][1])
    bench.command("consistency", help="Log-probabilities of decode against those of prompts, also after a reload.")(
        consistency.main
    )
    bench.command("start", help="The phases of a start of vllm serve.")(start.main)
    return bench


def _recipe() -> typer.Typer:
    from vllm_gptoss.cli.recipes.cli import app

    return app


def _eval() -> typer.Typer:
    try:
        from vllm_gptoss.cli.eval.command import app
    except ImportError as error:
        raise SystemExit(f"vllm-gptoss eval cannot run: {error}; pip install 'vllm-gptoss[eval]'") from None
    return app


GROUPS: Final[Mapping[str, tuple[Callable[[], typer.Typer], str]]] = {
    "tools": (_tools, "The tools that the model calls inside /v1/responses."),
    "bench": (_bench, "Checks of what an engine computes, with the plugin and without."),
    "recipe": (_recipe, "Which command for which machine, checked with vLLM's own parser."),
    "eval": (_eval, "GPQA, AIME and other evaluations of a running server."),
}
"""Groups of commands, which are imported when one of their commands runs, and their lines in `--help`."""


class _Groups(TyperGroup):
    """The commands of this file, and `GROUPS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *GROUPS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in GROUPS:
            return TyperCommand(cmd_name, help=GROUPS[cmd_name][1])
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or name not in GROUPS:
            return name, command, rest
        try:
            return name, typer.main.get_group(GROUPS[name][0]()), rest
        except ImportError as error:  # the other commands need no such package; `doctor` names all that are missing
            raise SystemExit(f"vllm-gptoss {name} cannot run: {reason(error)}; see vllm-gptoss doctor") from None


app = typer.Typer(name="vllm-gptoss", cls=_Groups, no_args_is_help=True, add_completion=False, help="gpt-oss on vLLM.")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def doctor(
    command: Annotated[list[str] | None, typer.Argument(help="A `vllm serve` line to check, after `--`.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint directory to check as well.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Report what runs a step of so many tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
) -> None:
    """Report whether the plugin is active here, what it chose and why, and which settings have no effect."""
    try:
        import rich  # noqa: F401  (for `_print`)

        from vllm_gptoss.cli.doctor import Status, examine
    except ImportError as error:
        raise SystemExit(f"vllm-gptoss cannot run: {reason(error)}") from None

    findings = examine(model, command or (), tokens)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.status is Status.PROBLEM for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[Any]) -> None:
    from rich.table import Table

    from vllm_gptoss.cli.recipes import draw

    styles = {"ok": "green", "info": "cyan", "warning": "yellow", "problem": "bold red"}
    table = Table(box=None, show_header=False, padding=(0, 1))
    for column in ("status", "check", "detail"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        detail = f"{finding.detail}\n-> {finding.fix}" if finding.fix else finding.detail
        table.add_row(f"[{styles[finding.status]}]{finding.status}[/]", finding.check, detail)
    draw.console().print(table)
