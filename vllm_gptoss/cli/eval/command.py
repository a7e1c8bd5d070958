"""`vllm-gptoss eval` and `vllm-gptoss eval compare`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import openai
import typer
from rich.console import Console

from vllm_gptoss.cli.eval import compare, data, record, report
from vllm_gptoss.cli.eval.client import APIS, EvalClient
from vllm_gptoss.cli.eval.judge import LOST, Outcome
from vllm_gptoss.cli.eval.published import size_of
from vllm_gptoss.cli.eval.questions import EvalError
from vllm_gptoss.cli.eval.run import run
from vllm_gptoss.version import __version__

SETS = ", ".join(data.READERS)

app = typer.Typer(
    invoke_without_command=True,
    help="Accuracy of a served model, every answer accounted for; any OpenAI-compatible server.",
)


@app.callback()
def evaluate(
    context: typer.Context,
    base_url: Annotated[str, typer.Option(help="The server's API.")] = "http://127.0.0.1:8000/v1",
    evals: Annotated[str, typer.Option("--eval", help=f"Of {SETS}; several with commas.")] = "smoke",
    effort: Annotated[str, typer.Option(help="Reasoning efforts, with commas; `none` sends none.")] = "low,medium,high",
    api: Annotated[str, typer.Option(help="responses or chat.")] = "responses",
    model: Annotated[str | None, typer.Option(help="Default: the only one that the server names.")] = None,
    files: Annotated[list[str] | None, typer.Option("--data", help="NAME=FILE, again for several files.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; an earlier run there continues.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="Samples at once.")] = 64,
    repeats: Annotated[int | None, typer.Option(min=1, max=1000, help="Default: gpqa 8, aime25 4, others 1.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many questions of each set, drawn.")] = None,
    seed: Annotated[int, typer.Option(help="For the order of options, and the drawn questions.")] = 0,
    temperature: Annotated[float, typer.Option(help="Negative: the server's own.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Negative: the server's own.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer, reasoning included.")] = 100_000,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for one answer with all its tries.")] = 3600.0,
    idle_timeout: Annotated[float, typer.Option(min=0.01, help="Seconds without a byte of an answer.")] = 900.0,
    tries: Annotated[int, typer.Option(min=1, max=100, help="Of one request.")] = 5,
    extra_body: Annotated[str, typer.Option(help="JSON: more fields of every request. Secrets are not stored.")] = "{}",
    fail_below: Annotated[float | None, typer.Option(help="Percent: exit 1 if an accuracy is lower.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent, and stored nowhere.")] = None,
) -> None:
    """Run, score and save: samples.jsonl, summary.json and panel.html. The same command continues. Exit code 1: a score
    below --fail-below, 2: a wrong command, 3: lost or missing samples."""
    if context.invoked_subcommand:
        return
    console = Console(record=True)
    head: dict[str, Any] = {
        "model": model, "api": _one_of("--api", api, APIS), "seed": seed, "limit": limit, "max_tokens": max_tokens,
        "efforts": ["" if one == "none" else one for one in _listed(effort)], "extra_body": _extra(extra_body),
        "temperature": None if temperature < 0 else temperature, "top_p": None if top_p < 0 else top_p,
    }  # fmt: skip
    if not base_url.startswith(("http://", "https://")):
        raise typer.BadParameter("http:// or https:// and the server's path", param_hint="--base-url")
    with _errors():
        sets = _sets(_listed(evals), _files(files or []), head, repeats)
        limits = openai.Timeout(None, connect=30.0, read=idle_timeout)
        http = openai.AsyncOpenAI(base_url=base_url, api_key=api_key or "none", max_retries=tries - 1, timeout=limits)
        summary = asyncio.run(_run(http, head, sets, timeout, out, concurrency, console))
    # Lost samples count as wrong: none may hide a loss.
    if fail_below is not None and (low := [row for row in summary["rows"] if 100 * row["worst"] < fail_below]):
        named = ", ".join(f"{row['eval']} {row['effort']} {report.percent(row['worst'])}" for row in low)
        console.print(f"below {fail_below}: {named}", style="bold red", markup=False)
        raise typer.Exit(1)
    if not summary["complete"]:
        raise typer.Exit(3)


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
    failed = False
    with _errors():
        found = compare.compare(before, after, seed)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        compare.show(found, Console())
    for row in found["rows"]:
        if fail_below is not None and 100 * (low := row["difference"]["low"]) < fail_below:
            interval = f"begins at {100 * low:+.1f} points, below {fail_below}"
            typer.echo(f"{row['eval']} {row['effort']}: the interval of the difference {interval}", err=True)
            failed = True
    if failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """One line instead of a traceback for errors that a user can correct."""
    try:
        yield
    except EvalError as error:
        detail = str(error)
    except OSError as error:
        detail = f"{error.filename or 'completed samples are stored, the rest could not be written'}: {error.strerror}"
    else:
        return
    typer.echo(f"error: {detail}", err=True)
    raise typer.Exit(2)


def _sets(
    names: Sequence[str], files: Mapping[str, Sequence[Path]], head: Mapping[str, Any], repeats: int | None
) -> list[data.QuestionSet]:
    sets = [data.load(name, files.get(name, ()), head["limit"], head["seed"]) for name in names]
    kinds = {tool["type"] for one in sets for question in one.questions for tool in question.tools}
    if head["api"] == "chat" and (others := kinds - {"function"}):
        raise EvalError(f"chat completions know functions only, no {', '.join(sorted(others))}: --api responses")
    return [one._replace(repeats=repeats or one.repeats) for one in sets]


async def _run(
    http: openai.AsyncOpenAI, head: dict[str, Any], sets: Sequence[data.QuestionSet], timeout_s: float,
    out: Path | None, at_once: int, console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Runs the missing samples and writes the summary, also after a stop by the user or for a dead server."""
    address = str(http.base_url.copy_with(userinfo=b""))
    async with http:
        model = head["model"] or await _only_model(http, address)
        head |= {
            "model": model, "published": size_of(model), "version": __version__,
            "evals": {
                one.name: {"questions": len(one.questions), "repeats": one.repeats, "sha256": one.digest}
                for one in sets
            },
            "base_url": address, "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }  # fmt: skip
        fields = {name: head[name] for name in ("model", "temperature", "top_p")} | head["extra_body"]
        head["extra_body"] = record.without_secrets(head["extra_body"])
        client = EvalClient(http, APIS[head["api"]], fields, head["max_tokens"], timeout_s)
        samples = [
            ((one.name, effort, question.id, repeat), question.asked(head["seed"], repeat))
            for one in sets
            for effort in head["efforts"]
            for repeat in range(one.repeats)
            for question in one.questions
        ]
        folder = out or Path(f"eval-{re.sub(r'[^A-Za-z0-9._-]+', '-', model).strip('-.')[:80]}")
        with record.recording(folder, head) as add:
            there = {key for key, one in record.kept(folder).items() if one["outcome"] not in LOST}
            left = [sample for sample in samples if sample[0] not in there]
            try:
                await run(client, left, at_once, _told(len(samples), len(samples) - len(left), add, console))
            except EvalError as stop:
                console.print(f"stopped: {stop}", style="bold red", markup=False)
            except asyncio.CancelledError:  # Ctrl-C
                console.print("stopped; the same command continues", style="bold red")
    summary = report.summarise(folder)
    record.put(folder / "summary.json", summary)
    report.show(summary, console)
    (folder / "panel.html").write_text(console.export_html(), encoding="utf-8")
    console.print(f"written to {folder}/", markup=False, highlight=False)
    return summary


def _told(total: int, there: int, add: Callable[[Any], None], console: Console) -> Callable[[dict[str, Any]], None]:
    """The function that takes the line of every sample, passes it to `add`, and prints twenty times how far it is."""
    if there:
        console.print(f"{there} of {total} samples are there already", highlight=False)
    counts: Counter[Outcome] = Counter()
    began = time.monotonic()

    def told(line: dict[str, Any]) -> None:
        add(line)
        counts[line["outcome"]] += 1
        new, right, lost = counts.total(), counts[Outcome.RIGHT], sum(counts[one] for one in LOST)
        if 20 * (there + new) // total > 20 * (there + new - 1) // total:
            left = (time.monotonic() - began) / new * (total - there - new)
            state = f"{right} right, {new - lost - right} not, {lost} lost; {left:.0f} s left"
            text = f"{there + new} of {total}: {line['eval']} {line['effort']}: {state}"
            console.print(text, markup=False, highlight=False)

    return told


async def _only_model(http: openai.AsyncOpenAI, address: str) -> str:
    try:
        names = [model.id async for model in http.with_options(timeout=60).models.list()]
    except openai.OpenAIError as error:
        raise EvalError(f"{address}models: {error}. Is the server up? Else name --model") from None
    if len(names) != 1:
        raise EvalError(f"the server has {len(names)} models ({', '.join(names[:20])}): name one with --model")
    return names[0]


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
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise typer.BadParameter("no JSON object", param_hint="--extra-body")
