"""`vllm-gptoss eval` and `vllm-gptoss eval compare`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from vllm_gptoss.cli.eval import data, panel, record
from vllm_gptoss.cli.eval.apis import APIS, LostSampleError, RequestSettings
from vllm_gptoss.cli.eval.client import AskLimits, EvalClient
from vllm_gptoss.cli.eval.compare import CompareError, compare
from vllm_gptoss.cli.eval.published import TABLE, size_of
from vllm_gptoss.cli.eval.runner import SamplePlan, StoppedError, progress
from vllm_gptoss.cli.eval.runner import run as run_samples
from vllm_gptoss.cli.eval.summary import summarise
from vllm_gptoss.version import __version__

FAILED = 1
INCOMPLETE = 3
"""Exit codes: a score below --fail-below; lost or missing samples. 2 is a wrong command line."""


class RequestError(ValueError):
    """A command that cannot be run; the message has the remedy."""


SETS = ", ".join(data.READERS)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """The command line of one run."""

    base_url: str
    api: str
    plan: SamplePlan
    limits: AskLimits
    settings: RequestSettings
    out: Path | None
    at_once: int
    limit: int | None
    keep_reasoning: bool
    published: str | None
    api_key: str | None


app = typer.Typer(
    invoke_without_command=True,
    help="Accuracy of a served model, every answer accounted for; any OpenAI-compatible server.",
)


@app.callback()
def run(
    context: typer.Context,
    base_url: Annotated[str, typer.Option(help="The server's API.")] = "http://127.0.0.1:8000/v1",
    evals: Annotated[str, typer.Option("--eval", help=f"Of {SETS}; several with commas.")] = "smoke",
    effort: Annotated[str, typer.Option(help="Reasoning efforts, with commas; `none` sends none.")] = "low,medium,high",
    api: Annotated[str, typer.Option(help="responses or chat.")] = "responses",
    model: Annotated[str | None, typer.Option(help="Default: the only one that the server names.")] = None,
    files: Annotated[list[str] | None, typer.Option("--data", help="NAME=FILE, again for several files.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; an earlier run there goes on.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Samples at once.")] = 64,
    repeats: Annotated[int | None, typer.Option(min=1, max=1000, help="Default: gpqa 8, aime25 4, others 1.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many questions of each set, drawn.")] = None,
    seed: Annotated[int, typer.Option(help="For the order of options, and what is drawn.")] = 0,
    temperature: Annotated[float, typer.Option(help="Negative: the server's own.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Negative: the server's own.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer, reasoning included.")] = 100_000,
    send_seed: Annotated[
        bool, typer.Option("--send-seed", help="Send the seed too, where the server takes it.")
    ] = False,
    stream: Annotated[bool, typer.Option(help="Stream answers.")] = True,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for one answer.")] = 3600.0,
    idle_timeout: Annotated[float, typer.Option(min=0.01, help="Seconds without a byte inside an answer.")] = 300.0,
    tries: Annotated[int, typer.Option(min=1, max=100, help="Of one request.")] = 5,
    extra_body: Annotated[str, typer.Option(help="JSON with further fields of every request.")] = "{}",
    keep_reasoning: Annotated[bool, typer.Option("--keep-reasoning", help="In samples.jsonl too.")] = False,
    published: Annotated[str | None, typer.Option(help="120b or 20b, where the model's name has neither.")] = None,
    fail_below: Annotated[float | None, typer.Option(help="Percent: exit 1 if an accuracy is lower.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent, and kept nowhere.")] = None,
) -> None:
    """Run, score and save: samples.jsonl, summary.json and panel.html. The same command continues."""
    if context.invoked_subcommand:
        return
    named, api = _files(files or []), _one_of("--api", api, APIS)
    published = published and _one_of("--published", published, TABLE)
    efforts = [None if one == "none" else one for one in _listed(effort)]
    settings = RequestSettings(
        model or "", max_tokens, None if temperature < 0 else temperature, None if top_p < 0 else top_p, stream,
        seed if send_seed else None, _extra(extra_body),
    )  # fmt: skip

    def evaluated() -> dict[str, Any]:
        sets = [data.load(name, named.get(name, ()), limit, seed) for name in _listed(evals)]
        plan, limits = SamplePlan(sets, efforts, seed, repeats), AskLimits(timeout, idle_timeout, tries)
        request = Request(
            base_url, api, plan, limits, settings, out, concurrency, limit, keep_reasoning, published, api_key
        )
        return asyncio.run(_evaluate(request, console))

    console = Console()
    summary = _errors_told(evaluated)
    if fail_below is not None and (low := _below(summary, fail_below)):
        console.print(f"below {fail_below}: {low}", style="bold red", markup=False)
        raise typer.Exit(FAILED)
    if not summary["complete"]:
        raise typer.Exit(INCOMPLETE)


@app.command("compare")
def compare_runs(
    before: Annotated[Path, typer.Argument(help="A run's folder.")],
    after: Annotated[Path, typer.Argument(help="Another's, over the same questions.")],
    fail_below: Annotated[
        float | None, typer.Option(help="Points, as -2: exit 1 if the interval of a difference begins lower.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Report differences of two runs, which questions flipped, and whether that is more than chance."""
    found = _errors_told(lambda: compare(before, after, seed))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=1, default=str))
    else:
        panel.show_comparison(found, Console())
    low = [row for row in found.rows if fail_below is not None and 100 * row.difference.low < fail_below]
    for row in low:
        interval = f"begins at {100 * row.difference.low:+.1f} points, below {fail_below}"
        typer.echo(f"{row.eval} {row.effort}: the interval of the difference {interval}", err=True)
    if low:
        raise typer.Exit(FAILED)


def _errors_told(work: Callable[[], T]) -> T:
    """A clear line instead of a traceback for what a user can mend."""
    try:
        return work()
    except (data.DataError, record.RecordError, CompareError, RequestError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        what = (
            f"{error.filename}: " if error.filename else "completed samples are stored, the rest could not be written: "
        )
        typer.echo(f"error: {what}{error.strerror or error}", err=True)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        typer.echo(f"error: {error}: pip install 'vllm-gptoss[eval]'", err=True)
        raise typer.Exit(2) from None


async def _evaluate(request: Request, console: Console) -> dict[str, Any]:
    """Runs the missing samples and writes the panel, also after a stop by the user or for a dead server."""
    if urllib.parse.urlsplit(request.base_url).scheme not in ("http", "https"):
        raise RequestError(f"--base-url {request.base_url!r}: http:// or https:// and what the server serves at")
    _check_tools(request)
    api, at_once = APIS[request.api](), request.at_once
    async with EvalClient(request.base_url, api, request.limits, at_once=at_once, api_key=request.api_key) as client:
        model = request.settings.model or await _only_model(client, request.base_url)
        settings = dataclasses.replace(request.settings, model=model)
        folder = request.out or Path(f"eval-{re.sub(r'[^A-Za-z0-9._-]+', '-', model).strip('-.')[:80]}")
        with record.Recorder(folder, _head(request, settings)) as recorder:
            skip = record.done(folder) & {key for key, _ in request.plan.samples()}
            with progress(len(request.plan), len(skip), console) as told:
                try:
                    await run_samples(
                        client, settings, request.plan, recorder, skip, told,
                        at_once=at_once, keep_reasoning=request.keep_reasoning,
                    )  # fmt: skip
                except StoppedError as stop:
                    console.print(f"stopped: {stop}", style="bold red", markup=False)
                except asyncio.CancelledError:  # Ctrl-C: completed samples are stored and shown
                    console.print("stopped; the same command goes on", style="bold red")
    return _written(folder, console)


def _written(folder: Path, console: Console) -> dict[str, Any]:
    summary = summarise(folder)
    record.put(folder / "summary.json", summary)
    (folder / "panel.html").write_text(panel.page(summary), encoding="utf-8")
    panel.show(summary, console)
    console.print(f"written to {folder}/", markup=False, highlight=False)
    return summary


def _head(request: Request, settings: RequestSettings) -> dict[str, Any]:
    """Settings that a later command must repeat to continue the run."""
    plan = request.plan
    evals = {
        of.name: {"questions": len(of.questions), "repeats": plan.times(of), "sha256": of.digest} for of in plan.sets
    }
    return {
        "model": settings.model, "base_url": _without_user(request.base_url), "api": request.api, "evals": evals,
        "efforts": [effort or "" for effort in plan.efforts], "seed": plan.seed, "limit": request.limit,
        "temperature": settings.temperature, "top_p": settings.top_p, "max_tokens": settings.max_tokens,
        "sent_seed": settings.seed is not None, "stream": settings.stream, "extra_body": dict(settings.extra),
        "published": request.published or size_of(settings.model), "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _below(summary: Mapping[str, Any], percent: float) -> str:
    """Rows below a score, lost samples counted as wrong: none may hide a loss."""
    low = [row for row in summary["rows"] if row["worst"] is None or 100 * row["worst"] < percent]
    return ", ".join(f"{row['eval']} {row['effort'] or ''} {panel.percent(row['worst'])}" for row in low)


async def _only_model(client: EvalClient, base_url: str) -> str:
    try:
        names = await client.models()
    except LostSampleError as lost:
        raise RequestError(f"{base_url}/models: {lost.detail}. Is the server up? Else name --model") from None
    if len(names) != 1:
        raise RequestError(f"the server has {len(names)} models ({', '.join(names[:20])}): name one with --model")
    return names[0]


def _check_tools(request: Request) -> None:
    kinds = {str(tool["type"]) for of in request.plan.sets for question in of.questions for tool in question.tools}
    if request.api == "chat" and (others := kinds - {"function"}):
        raise RequestError(f"chat completions know functions only, no {', '.join(sorted(others))}: --api responses")


def _without_user(url: str) -> str:
    """The address without its password."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _listed(text: str) -> list[str]:
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise typer.BadParameter("nothing is named")
    return found


def _one_of(option: str, value: str, among: Mapping[str, Any]) -> str:
    if value not in among:
        raise typer.BadParameter(f"{value!r}: one of {', '.join(among)}", param_hint=option)
    return value


def _files(given: Sequence[str]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not equals or name not in data.READERS:
            raise typer.BadParameter(f"{one!r}: NAME=FILE, with NAME of {SETS}", param_hint="--data")
        found.setdefault(name, []).append(Path(path))
    return found


def _extra(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter("no JSON object", param_hint="--extra-body")
    return value
