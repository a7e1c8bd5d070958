"""`vllm-gptoss bench consistency`: log-probabilities of decoded tokens against those of the same tokens in a prompt.

    vllm-gptoss bench consistency --url http://127.0.0.1:8000                      # a running server
    vllm-gptoss bench consistency --model DIR --after reload --reload-from OTHER   # offline, after an operation

Decode and prompts are computed by different kernels over the same weights. The mean difference is a few hundredths
where both read the weights that were loaded, and above a tenth where one of them reads others: weights that were
replaced, moved or discarded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from vllm_gptoss.cli.bench import operations, worker
from vllm_gptoss.cli.bench.worker import is_plugin, variant_options

VOCABULARY = 8192
"""Token ids of the prompts to a server."""
TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Completion:
    """One request. prompt, tokens: token ids; decoded, read: log-probabilities of `tokens`, by decode and by prompt."""

    prompt: list[int]
    tokens: list[int]
    decoded: list[float]
    read: list[float]


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests at once, prompt tokens and answer tokens of each, and the vocabulary that prompts are drawn from."""

    sizes: tuple[int, ...]
    prompt: int
    tokens: int
    vocabulary: int

    def prompts(self, size: int) -> list[list[int]]:
        """The same for every variant."""
        draw = random.Random(size)  # noqa: S311  no secret
        return [[draw.randrange(10, self.vocabulary) for _ in range(self.prompt)] for _ in range(size)]


def summary(answers: Sequence[Completion]) -> dict[str, float]:
    """Mean, median and largest absolute difference of decode and prompt over all tokens."""
    decoded = [value for answer in answers for value in answer.decoded]
    return distance(decoded, [value for answer in answers for value in answer.read])


def is_consistent(row: dict[str, Any], limit: float) -> bool:
    """Whether every mean difference of a row is at most `limit`; NaN is not."""
    return all(value <= limit for name, value in row.items() if name.endswith("mean"))


def distance(a: Sequence[float], b: Sequence[float], name: str = "") -> dict[str, float]:
    """Absolute differences of `a` and `b`, each key prefixed with `name`."""
    gaps = sorted(abs(x - y) for x, y in zip(a, b, strict=True))
    middle = gaps[len(gaps) // 2]
    return {f"{name}mean": sum(gaps) / len(gaps), f"{name}median": middle, f"{name}max": gaps[-1]}


# Offline


def offline(engine: Any, load: Load, size: int) -> list[Completion]:
    """Answers of a `vllm.LLM` to `size` requests at once."""
    from vllm import SamplingParams

    prompts = load.prompts(size)
    same: dict[str, Any] = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    say, read = (
        SamplingParams(max_tokens=load.tokens, logprobs=1, **same),
        SamplingParams(max_tokens=1, prompt_logprobs=1, **same),
    )
    said = engine.generate([{"prompt_token_ids": p} for p in prompts], say, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in said]
    whole = [{"prompt_token_ids": p + t} for p, t in zip(prompts, tokens, strict=True)]
    seen = engine.generate(whole, read, use_tqdm=False)
    return [
        Completion(
            p,
            t,
            [at[token].logprob for token, at in zip(t, one.outputs[0].logprobs, strict=True)],
            [at[token].logprob for token, at in zip(t, other.prompt_logprobs[len(p) :], strict=True)],
        )
        for p, t, one, other in zip(prompts, tokens, said, seen, strict=True)
    ]


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one engine in this process, with their answers: each operation of the job in turn, each size after it."""
    if is_plugin(job["variant"]):
        from vllm_gptoss.plugin import register

        register()
    from vllm import LLM

    load = Load(**{**job["load"], "sizes": tuple(job["load"]["sizes"])})
    options: dict[str, Any] = {
        "model": job["model"],
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": load.prompt + load.tokens + 8,
        "max_num_seqs": max(load.sizes),
        "enable_sleep_mode": any(name.startswith("sleep") for name in job["after"]),
    }
    options |= variant_options(job["variant"])
    engine, rows, weights = LLM(**{**options, **job["engine"]}), [], job["model"]
    for name in ("none", *job["after"]):
        weights = operations.apply(name, engine, weights, job["reload_from"])
        for size in load.sizes:
            answers = offline(engine, load, size)
            rows.append({"after": name, "requests": size, "weights": weights, "answers": answers})
    return rows


def _run(job: dict[str, Any]) -> list[dict[str, Any]]:
    rows = measure(job)
    for row in rows:
        row |= summary(row.pop("answers"))
    return rows


def offline_rows(module: str, job: dict[str, Any], variants: Sequence[str], load: Load) -> Iterator[dict[str, Any]]:
    """Rows of every variant, each in a new process. module: its `__main__` calls `worker.answer`; job: `job_of`."""
    vocabulary = int(json.loads((Path(job["model"]) / "config.json").read_text())["vocab_size"])
    sizes = dataclasses.asdict(dataclasses.replace(load, vocabulary=min(vocabulary, 190_000)))
    for variant in variants:
        for row in worker.in_process(module, {**job, "variant": variant, "load": sizes}):
            yield {"variant": variant, **row}


def job_of(model: Path, reload_from: Path | None, after: str, engine: str) -> dict[str, Any]:
    """The part of a job that all variants share.

    Raises:
        typer.BadParameter: an unknown operation in `after`.
    """
    wanted = tuple(filter(None, after.split(",")))
    if unknown := sorted(set(wanted) - set(operations.NAMES)):
        raise typer.BadParameter(f"unknown operations {', '.join(unknown)}; there are {', '.join(operations.NAMES)}")
    other = str(reload_from or model)
    return {"model": str(model), "reload_from": other, "after": wanted, "engine": json.loads(engine)}


# A running server


async def served(url: str, model: str, load: Load, size: int, key: str | None = None) -> list[Completion]:
    """Answers of a server's `/v1/completions` to `size` requests at once.

    Raises:
        httpx.HTTPError: the server refused a request or did not answer.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=size)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        return await asyncio.gather(*(_one(client, model, prompt, load.tokens) for prompt in load.prompts(size)))


async def _one(client: httpx.AsyncClient, model: str, prompt: list[int], tokens: int) -> Completion:
    same = {"model": model, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    say = await _post(client, {**same, "prompt": prompt, "max_tokens": tokens, "logprobs": 1})
    said = list(say["token_ids"])
    read = await _post(client, {**same, "prompt": prompt + said, "max_tokens": 1, "prompt_logprobs": 1})
    seen = read["prompt_logprobs"][len(prompt) :]
    return Completion(
        prompt,
        said,
        list(say["logprobs"]["token_logprobs"]),
        [at[str(token)]["logprob"] for token, at in zip(said, seen, strict=True)],
    )


async def _post(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return dict(answer.json()["choices"][0])


def _measure_server(url: str, load: Load, key: str | None) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        model = httpx.get(f"{url}/v1/models", headers=headers, timeout=30).raise_for_status().json()["data"][0]["id"]
        return [
            {"after": "none", "requests": size, **summary(asyncio.run(served(url, model, load, size, key)))}
            for size in load.sizes
        ]
    except (httpx.HTTPError, KeyError) as error:
        raise typer.BadParameter(f"{url} gave no log-probabilities: {type(error).__name__}: {error}") from None


# The command


def main(
    url: Annotated[str | None, typer.Option(help="a running server, for example http://127.0.0.1:8000")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="of that server")] = None,
    model: Annotated[Path | None, typer.Option(help="a checkpoint directory, measured offline")] = None,
    variants: Annotated[list[str] | None, typer.Option("--variant", help="plugin, or a --moe-backend of vLLM")] = None,
    engine: Annotated[str, typer.Option(help="engine arguments of vllm.LLM, as JSON")] = "{}",
    after: Annotated[str, typer.Option(help=f"operations in turn: {', '.join(operations.NAMES)}")] = "",
    reload_from: Annotated[Path | None, typer.Option(help="other weights of the same shape for a reload")] = None,
    concurrency: Annotated[str, typer.Option(help="requests at once, one size after the other")] = "1,8,40,200",
    prompt: Annotated[int, typer.Option(help="tokens of each prompt")] = 150,
    tokens: Annotated[int, typer.Option(help="tokens of each answer")] = 16,
    limit: Annotated[float, typer.Option(help="the largest mean difference that is no error")] = 0.3,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
) -> None:
    """Compares decode with prompt log-probabilities; exit status 1 where a mean difference is above --limit."""
    if bool(url) == bool(model) or (url and (after or variants)):
        raise typer.BadParameter(
            "either --url of a server, measured as it is, or --model with --variant and --after, offline"
        )
    load = Load(tuple(map(int, concurrency.split(","))), prompt, tokens, VOCABULARY)
    if model:
        job = job_of(model, reload_from, after, engine)
        rows = list(offline_rows(__name__, job, variants or ["plugin"], load))
    else:
        rows = [{"variant": "server", **row} for row in _measure_server(str(url), load, api_key)]
    report(rows, load, limit, out)


def report(rows: list[dict[str, Any]], load: Load, limit: float, out: Path | None) -> None:
    """Prints the rows and writes them to `out`.

    Raises:
        typer.Exit: status 1 where a mean difference is above `limit`.
    """
    record = {"command": sys.argv[1:], "load": dataclasses.asdict(load), "limit": limit, "rows": rows}
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        typer.echo(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}))
    if bad := [row for row in rows if not is_consistent(row, limit)]:
        typer.echo(f"{len(bad)} of {len(rows)} rows are above {limit}: the kernels read other weights", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    worker.answer(_run)
