"""Logits and perplexity of the plugin against vLLM's own backends over one fixed token stream.

    python -m benchmarks.numerics --shape 20b:6                              # random weights, six layers
    python -m benchmarks.numerics --model DIR --stream text.txt --chunk 1    # real weights, token by token

Every variant runs in a separate process and reads the same stream, a few tokens a step (`--chunk`). For every position,
it reports the log-probabilities of the next token and of the `TOP` likeliest tokens. The fused path runs small steps.
Speculative decoding verifies 2 to 16 tokens a step. 1 is plain decode in vLLM's graphs: the first tokens of each piece
of the stream (`--prompt`) are the prompt, the number of the piece is the seed, and as many tokens are decoded as the
piece has left. These are compared up to the position where two variants first choose different tokens.

Two distances of two variants: the mean difference of log-probabilities that both report, and the difference of mean
negative log-likelihoods. The plugin is within the spread where its distance to the nearest stock backend is, with 95 %
confidence (bootstrap over blocks of positions), at most `--slack` times the largest distance of two stock backends; its
log perplexity where it differs from one of them by no more than they differ, or than two standard errors of that.

Stock backends differ only in their experts and share every other rounding. The plugin cannot share those roundings.
`--truth` also reports the distance of each variant to float64 (`truth.py`). A variant that is nearer to float64 than
the farther stock backend also counts as within the spread.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import checkpoint, shapes, truth
from benchmarks.paths import paths
from vllm_gptoss.cli.bench import worker
from vllm_gptoss.cli.bench.worker import is_plugin, variant_options

TOP = 20
"""Log-probabilities per position, in addition to the one of the token; vLLM's default limit."""
VOCABULARY = 32_768
"""Of random checkpoints: the head is no part of what is compared, and would be most of the file."""
BLOCK = 32
"""Positions that the bootstrap keeps together: neighbours share their past."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One variant's results for the stream. likely: log-probability of each token; top: {token: log-probability}."""

    likely: list[float]
    top: list[dict[int, float]]

    @property
    def nll(self) -> float:
        return -sum(self.likely) / len(self.likely)


# One process


def read(job: dict[str, Any]) -> dict[str, Any]:
    """Reads the stream in this process: `Reading`'s fields, and which plugin paths were active."""
    variant, options = job["variant"], job["options"]
    if is_plugin(variant):
        from vllm_gptoss.plugin import register

        register()
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "model": job["model"],
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": max(map(len, job["stream"])) + 8,
        "max_num_seqs": 1,
        # vLLM decodes one token a step anyway, and takes no less than one request's
        "max_num_batched_tokens": max(job["chunk"] if job["chunk"] > 1 else job["prompt"], 2),
        "tensor_parallel_size": job["tensor_parallel"],
        # several tokens a step must not fall into piecewise graphs, which are upstream's
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, job["chunk"]]},
    }
    arguments |= variant_options(variant)
    engine = LLM(**{**arguments, **options})
    if job["chunk"] == 1:
        return {**decode(engine, job["stream"], job["prompt"]), "paths": engine.apply_model(paths)[0]}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": tokens} for tokens in job["stream"]], params, use_tqdm=False)
    likely, top = [], []
    for tokens, output in zip(job["stream"], outputs, strict=True):
        for token, found in zip(tokens[1:], output.prompt_logprobs[1:], strict=True):
            if token not in found:
                raise RuntimeError(f"vLLM gave no log-probability of prompt token {token}, only of {sorted(found)}")
            likely.append(found[token].logprob)
            top.append({each: entry.logprob for each, entry in found.items()})
    return {"likely": likely, "top": top, "paths": engine.apply_model(paths)[0]}


def decode(engine: Any, stream: Sequence[Sequence[int]], prompt: int) -> dict[str, Any]:
    """Tokens decoded one a step after the first `prompt` of each piece of `stream`, as many as it has more, and
    `Reading`'s fields of them, by piece."""
    from vllm import SamplingParams

    found: dict[str, Any] = {"decoded": [], "likely": [], "top": []}
    for seed, piece in enumerate(stream):
        params = SamplingParams(
            temperature=1, seed=seed, max_tokens=len(piece) - prompt, ignore_eos=True, logprobs=TOP, detokenize=False
        )
        output = engine.generate([{"prompt_token_ids": list(piece[:prompt])}], params, use_tqdm=False)[0].outputs[0]
        found["decoded"].append(list(output.token_ids))
        found["likely"].append(
            [each[token].logprob for token, each in zip(output.token_ids, output.logprobs, strict=True)]
        )
        found["top"].append([{token: entry.logprob for token, entry in each.items()} for each in output.logprobs])
    return found


def cut(found: dict[str, dict[str, Any]], stream: Sequence[Sequence[int]], prompt: int) -> list[list[int]]:
    """Cuts what the variants decoded where two of them first choose differently, and joins the pieces.

    Returns the tokens of each piece up to there, what it began with included.
    """
    ends = [
        next((at for at, tokens in enumerate(zip(*pieces, strict=True)) if len(set(tokens)) > 1), len(pieces[0]))
        for pieces in zip(*(one["decoded"] for one in found.values()), strict=True)
    ]
    for one in found.values():
        for name in ("likely", "top"):
            one[name] = [each for piece, end in zip(one[name], ends, strict=True) for each in piece[:end]]
    decoded = next(iter(found.values()))["decoded"]
    return [[*piece[:prompt], *own[:end]] for piece, own, end in zip(stream, decoded, ends, strict=True)]


# The statistic


def differences(a: Reading, b: Reading) -> list[float]:
    """Mean absolute difference, at each position, of the log-probabilities that both report."""
    found = []
    for first, second in zip(a.top, b.top, strict=True):
        shared = first.keys() & second.keys()
        found.append(sum(abs(first[token] - second[token]) for token in shared) / len(shared))
    return found


def distance(a: Reading, b: Reading) -> dict[str, float]:
    """All reported figures for two variants."""
    per_position = sorted(differences(a, b))
    best = sum(max(x, key=x.__getitem__) == max(y, key=y.__getitem__) for x, y in zip(a.top, b.top, strict=True))
    paired = [y - x for x, y in zip(a.likely, b.likely, strict=True)]
    return {
        "mean": sum(per_position) / len(per_position),
        "p99": per_position[int(0.99 * (len(per_position) - 1))],
        "largest": per_position[-1],
        "same_best": best / len(a.top),
        "nll": abs(a.nll - b.nll),
        "nll_error": _standard_error(paired),
    }


def _blocks(values: Sequence[float]) -> list[float]:
    parts = [values[at : at + BLOCK] for at in range(0, len(values), BLOCK)]
    return [sum(part) / len(part) for part in parts]


def _standard_error(values: Sequence[float]) -> float:
    """Of the mean, from blocks of neighbours."""
    blocks = _blocks(values)
    middle = sum(blocks) / len(blocks)
    return float((sum((block - middle) ** 2 for block in blocks) / max(1, len(blocks) - 1) / len(blocks)) ** 0.5)


def ratio_bound(ours: Sequence[float], stock: Sequence[float], draws: int = 2000) -> float:
    """Upper end of the 95 % bootstrap interval of mean(`ours`) / mean(stock). Both use the same drawn positions."""
    import numpy as np

    pairs = np.array([_blocks(ours), _blocks(stock)])
    drawn = np.random.default_rng(0).integers(0, pairs.shape[1], (draws, pairs.shape[1]))
    means = pairs[:, drawn].mean(-1)
    return float(np.quantile(means[0] / np.maximum(means[1], 1e-12), 0.975))


def verdict(readings: dict[str, Reading], candidate: str, slack: float) -> dict[str, Any]:
    """Whether the candidate is as near to the others as they are to each other, see the head of this file.

    Raises:
        ValueError: fewer than two others: there is no spread.
    """
    others = [name for name in readings if name != candidate]
    if len(others) < 2:
        raise ValueError(f"two other variants are needed to know their spread, there are {others}")
    pairs = {f"{a} - {b}": (distance(readings[a], readings[b]), a, b) for a, b in itertools.combinations(readings, 2)}
    stock = max((p for p in pairs.values() if candidate not in p[1:]), key=lambda pair: pair[0]["mean"])
    ours = min((p for p in pairs.values() if candidate in p[1:]), key=lambda pair: pair[0]["mean"])
    near, spread = (differences(readings[a], readings[b]) for _, a, b in (ours, stock))
    bound = ratio_bound(near, spread)
    nearest = min(p[0]["nll"] for p in pairs.values() if candidate in p[1:])
    allowed = max(max(p[0]["nll"], 2 * p[0]["nll_error"]) for p in pairs.values() if candidate not in p[1:])
    return {
        "candidate": candidate,
        "logits_within": bound <= slack,
        "ratio": ours[0]["mean"] / max(stock[0]["mean"], 1e-12),
        "ratio_bound": bound,
        "slack": slack,
        "perplexity_within": nearest <= allowed,
        "nll_difference": nearest,
        "nll_allowed": allowed,
        "nll": {name: reading.nll for name, reading in readings.items()},
        "distances": {name: found for name, (found, _, _) in pairs.items()},
    }


def from_truth(readings: dict[str, Reading], truth: Reading, candidate: str, slack: float) -> dict[str, Any]:
    """How far each reading is from float64, and whether the candidate is no farther than the farthest of the others."""
    errors = {name: differences(reading, truth) for name, reading in readings.items()}
    means = {name: sum(error) / len(error) for name, error in errors.items()}
    farthest = max((name for name in means if name != candidate), key=means.__getitem__)
    bound = ratio_bound(errors[candidate], errors[farthest])
    return {"nll": truth.nll, "means": means, "farthest": farthest, "ratio_bound": bound, "within": bound <= slack}


# The command


def _stream(path: Path | None, vocabulary: int, sequences: int, tokens: int, prompt: int = 1) -> list[list[int]]:
    """Random tokens, or a file's: a JSON list of ids, or text in o200k_harmony; no rest that is all prompt."""
    if path is None:
        import numpy as np

        return [[int(t) for t in row] for row in np.random.default_rng(1).integers(0, vocabulary, (sequences, tokens))]
    if path.suffix == ".json":
        ids = json.loads(path.read_text())
    else:
        from vllm_gptoss.server.harmony.tokens import encode

        ids = encode(path.read_text())
    whole = [ids[at : at + tokens] for at in range(0, min(len(ids), sequences * tokens), tokens)]
    return [part for part in whole if len(part) > prompt]


def _variant(text: str) -> tuple[str, str, dict[str, Any]]:
    """`triton`, or `name={"variant": "plugin", ...engine arguments}`, as (name, variant, engine arguments)."""
    name, _, rest = text.partition("={")
    options = json.loads("{" + rest) if rest else {}
    return name, options.pop("variant", name), options


def _all(jobs: Sequence[dict[str, Any]], together: bool) -> list[dict[str, Any]]:
    """What each job read: one after another, or all at once, on memory that they share."""
    if not together:
        return [_run(job) for job in jobs]
    part = {"gpu_memory_utilization": round(0.9 / len(jobs), 2)}
    # The first job measures free memory as vLLM does. The others get a fixed cache size, because a measurement would
    # count the first job's memory.
    shares = [part, *({**part, "kv_cache_memory_bytes": 2**31} for _ in jobs[1:])]
    shared = [{**job, "options": {**share, **job["options"]}} for job, share in zip(jobs, shares, strict=True)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(_run, shared))


def _run(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = worker.in_process("benchmarks.numerics", job)
    return found


def _reading(one: dict[str, Any]) -> Reading:
    """From what a process wrote, where JSON has made the token ids strings."""
    return Reading(one["likely"], [{int(token): value for token, value in top.items()} for top in one["top"]])


def compare(
    job: dict[str, Any], specs: Sequence[tuple[str, str, dict[str, Any]]], together: bool, exact: bool, slack: float
) -> dict[str, Any]:
    """Has every variant of `specs` read the job's stream; the verdict on the first, and with `exact` float64's."""
    read_by = _all([{**job, "variant": of, "options": options} for _, of, options in specs], together)
    found = dict(zip((name for name, _, _ in specs), read_by, strict=True))
    first, pieces = (
        (job["prompt"], cut(found, job["stream"], job["prompt"])) if job["chunk"] == 1 else (1, job["stream"])
    )
    readings = {name: _reading(one) for name, one in found.items()}
    candidate = specs[0][0]
    result = verdict(readings, candidate, slack)
    if exact:
        wanted = [set().union(*tops) for tops in zip(*(reading.top for reading in readings.values()), strict=True)]
        read = Reading(**truth.read(Path(job["model"]), pieces, first, wanted))
        result["float64"] = from_truth(readings, read, candidate, slack)
    result["positions"] = len(readings[candidate].likely)
    result["paths"] = {name: one["paths"] for name, one in found.items()}
    return result


def main(
    shape: Annotated[str, typer.Option(help="random weights of this shape; 20b:6 is six layers")] = "20b:6",
    model: Annotated[Path | None, typer.Option(help="a checkpoint instead")] = None,
    variants: Annotated[list[str] | None, typer.Option("--variant", help="plugin, triton, or NAME={JSON}")] = None,
    chunk: Annotated[int, typer.Option(help="tokens a step")] = 8,
    sequences: Annotated[int, typer.Option(help="how many pieces the stream has")] = 4,
    tokens: Annotated[int, typer.Option(help="tokens of a piece")] = 400,
    prompt: Annotated[int, typer.Option(help="of these, what --chunk 1 reads before it decodes")] = 1,
    stream: Annotated[Path | None, typer.Option(help="a text, or a JSON list of token ids")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share the model")] = 1,
    together: Annotated[bool, typer.Option(help="all variants at once on the same GPUs")] = False,
    truth_: Annotated[bool, typer.Option("--truth", help="also the distance of each to float64")] = False,
    slack: Annotated[float, typer.Option(help="how much farther than two stock backends is still near")] = 1.1,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
) -> None:
    """Compares log-probabilities and perplexity; exit status 1 where the first variant is outside the spread."""
    if not 0 < prompt < tokens:
        raise typer.BadParameter(f"--prompt {prompt}: at least 1, and fewer than the {tokens} tokens of a piece")
    specs = [_variant(text) for text in variants or ["plugin", "triton", "marlin"]]
    with tempfile.TemporaryDirectory() as folder:
        directory = model or Path(folder)
        if model is None:
            checkpoint.write(dataclasses.replace(shapes.shape(shape), vocabulary=VOCABULARY), directory)
        vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
        same: dict[str, Any] = {"chunk": chunk, "prompt": prompt, "tensor_parallel": tensor_parallel}
        job = {
            **same,
            "model": str(directory),
            "stream": _stream(stream, min(vocabulary, 190_000), sequences, tokens, prompt),
        }
        result = compare(job, specs, together, truth_, slack)
    result |= {"model": str(model or shape), **same, "command": sys.argv[1:]}
    text = json.dumps(result, indent=1)
    typer.echo(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    near = result["logits_within"] or (truth_ and result["float64"]["within"])
    if not (near and result["perplexity_within"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir():
        worker.answer(read)
    else:
        typer.run(main)
