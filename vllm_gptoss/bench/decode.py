"""Decode speed of gpt-oss shapes: the plugin against vLLM's own backends on the same GPU.

    vllm-gptoss bench decode --models 20b,120b --batches 1,2,4,8,16,32 --rounds 2

Each variant runs in a process of its own (vLLM's in-process engine, dummy weights, greedy, random prompts, no prefix
cache); rounds interleave the variants, repeats are inside a process. TPOT = (time for the whole output - time for one
token) / (output - 1). GPU time is the union of kernel intervals of torch.profiler, so overlapping launches count once;
a long run minus a short run, so the prompt cancels. Dummy weights route about uniformly; `--skew` sends every token to
the same experts.

Writes `decode-<gpu>-<date>.json` (and a PNG where matplotlib is there): medians over repeats and rounds, and
the spread (largest - smallest) / median.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_gptoss import spec

BANDWIDTH = 4.3e12
"""Bytes per second that one H200 reads (measured: copy 4.21, read-only reduction 4.39 TB/s)."""
SPECS = {"20b": spec.GPT_OSS_20B, "120b": spec.GPT_OSS_120B}
PLUGIN = "plugin"
STOCK = ("triton", "marlin", "humming")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    model: str
    variant: str
    batches: tuple[int, ...]
    prompt: int
    output: int
    repeats: int
    tensor_parallel: int
    skew: bool
    profile: bool
    options: dict[str, Any]


def model_config(model: spec.ModelSpec) -> dict[str, Any]:
    """`config.json` of a gpt-oss shape."""
    return {
        "architectures": [spec.ARCHITECTURE],
        "model_type": spec.MODEL_TYPE,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.active_experts,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "vocab_size": model.vocabulary,
        "sliding_window": spec.WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (model.layers // 2),
        "max_position_embeddings": spec.MAX_POSITIONS,
        "initial_context_length": spec.ROPE_ORIGINAL_CONTEXT,
        "rms_norm_eps": spec.RMS_NORM_EPS,
        "rope_theta": spec.ROPE_THETA,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": spec.ROPE_SCALING_FACTOR,
            "beta_fast": spec.ROPE_BETA_FAST,
            "beta_slow": spec.ROPE_BETA_SLOW,
            "original_max_position_embeddings": spec.ROPE_ORIGINAL_CONTEXT,
            "truncate": False,
        },
        "swiglu_limit": spec.SWIGLU_LIMIT,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


def floor_ms(model: spec.ModelSpec, batch: int, context: int, tensor_parallel: int = 1, skew: bool = False) -> float:
    """Time to read once what a decode step must read, at `BANDWIDTH`.

    Experts that `batch` tokens hit under uniform routing, attention, router and head weights, and the keys and values
    of `context` tokens (128 in window layers).
    """
    missed = (1 - model.active_experts / model.experts) ** batch
    hit = model.active_experts if skew else model.experts * (1 - missed)
    expert = 3 * model.hidden * model.intermediate * (4 + 8 / spec.MXFP4_GROUP) / 8
    attention = 2 * model.hidden * model.head_size * 2 * (model.query_heads + model.kv_heads)
    router = 2 * model.hidden * model.experts
    key_value = 2 * 2 * model.kv_heads * model.head_size * (min(context, spec.WINDOW) + context) / 2 * batch
    layer = (hit * expert + attention + key_value) / tensor_parallel + router
    return 1e3 * (model.layers * layer + 2 * model.vocabulary * model.hidden / tensor_parallel) / BANDWIDTH


def busy_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of (start, end) intervals."""
    total, until = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def _engine(job: Job, directory: Path) -> Any:
    (directory / "config.json").write_text(json.dumps(model_config(SPECS[job.model])))
    from vllm import LLM

    sizes = sorted({*job.batches, 1})
    backend = {} if job.variant.startswith(PLUGIN) else {"moe_backend": job.variant}
    options = {
        "model": str(directory),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": job.prompt + job.output + 64,
        "max_num_seqs": max(sizes),
        "tensor_parallel_size": job.tensor_parallel,
        "compilation_config": {"cudagraph_capture_sizes": sizes},
    }
    return LLM(**{**options, **backend, **job.options})


def _skew(model: Any) -> None:
    """Sends every token to the first four experts."""
    for layer in model.model.layers:
        layer.mlp.router.bias.data[:4] = 1e4


def measure(job: Job) -> dict[str, Any]:
    """Runs one job in this process and returns its figures."""
    import numpy as np
    import torch

    if job.variant.startswith(PLUGIN):
        from vllm_gptoss.plugin import register

        register()
    from vllm import SamplingParams

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        engine = _engine(job, Path(directory))
    start_s = time.perf_counter() - started
    if job.skew:
        engine.apply_model(_skew)
    random = np.random.default_rng(0)

    def run(batch: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": random.integers(0, 190_000, job.prompt).tolist()} for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    rows = []
    for batch in job.batches:
        run(batch, 8)
        tpots, prefills = [], []
        for _ in range(job.repeats):
            first, whole = run(batch, 1), run(batch, job.output)
            tpots.append(1e3 * (whole - first) / (job.output - 1))
            prefills.append(1e3 * first)
        row: dict[str, Any] = {"batch": batch, "tpot_ms": tpots, "prefill_ms": prefills}
        if job.profile:
            row.update(_profile(run, batch))
        rows.append(row)
    return {
        "start_s": start_s,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "memory_gib": torch.cuda.max_memory_reserved() / 2**30,
        "kv_blocks": engine.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "rows": rows,
    }


def _profile(run: Callable[[int, int], float], batch: int) -> dict[str, Any]:
    short, long = 4, 36
    (short_busy, short_sum, short_names), (long_busy, long_sum, long_names) = (
        _kernels(run, batch, short),
        _kernels(run, batch, long),
    )
    steps = long - short
    names = {name: (time_ - short_names.get(name, 0)) / steps / 1e3 for name, time_ in long_names.items()}
    return {
        "gpu_ms": (long_busy - short_busy) / steps / 1e6,
        "kernel_sum_ms": (long_sum - short_sum) / steps / 1e6,
        "kernels_us": dict(sorted(names.items(), key=lambda entry: -entry[1])[:25]),
    }


def _kernels(run: Callable[[int, int], float], batch: int, tokens: int) -> tuple[int, int, dict[str, int]]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(batch, tokens)
    names: dict[str, int] = {}
    intervals = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() != DeviceType.CUDA:
            continue
        intervals.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        name = event.name()[:80]
        names[name] = names.get(name, 0) + event.duration_ns()
    return busy_ns(intervals), sum(end - start for start, end in intervals), names


def _child(job: Job, environment: dict[str, str]) -> dict[str, Any]:
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
        "VLLM_PLUGINS": "gptoss" if job.variant.startswith(PLUGIN) else "none",
        **environment,
    }
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        module = "vllm_gptoss.bench.decode"
        command = [sys.executable, "-m", module, "--child", json.dumps(dataclasses.asdict(job)), result.name]
        done = subprocess.run(command, env=env, stdout=sys.stderr)
        if done.returncode:
            raise RuntimeError(f"{job.model} {job.variant} ended with {done.returncode}")
        return json.loads(result.read())  # type: ignore[no-any-return]


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """(median, (largest - smallest) / median)."""
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / middle


def summarise(results: dict[tuple[str, str], list[dict[str, Any]]], job: Job) -> list[dict[str, Any]]:
    """One row per model and batch: the best stock backend at that batch against every plugin variant."""
    rows = []
    for model in dict.fromkeys(model for model, _ in results):
        for index, batch in enumerate(job.batches):
            figures = {}
            for (of, variant), rounds in results.items():
                if of == model:
                    values = [value for one in rounds for value in one["rows"][index]["tpot_ms"]]
                    gpu = [one["rows"][index]["gpu_ms"] for one in rounds if "gpu_ms" in one["rows"][index]]
                    figures[variant] = (*median_and_spread(values), statistics.median(gpu) if gpu else None)
            stock = min((v for v in figures if not v.startswith(PLUGIN)), key=lambda v: figures[v][0], default=None)
            context = job.prompt + job.output // 2
            floor = floor_ms(SPECS[model], batch, context, job.tensor_parallel, job.skew)
            for variant in (v for v in figures if v.startswith(PLUGIN)):
                tpot, spread, gpu_ms = figures[variant]
                row = {
                    "model": model,
                    "batch": batch,
                    "stock_backend": stock,
                    "stock_tpot_ms": stock and figures[stock][0],
                    "stock_spread": stock and figures[stock][1],
                    "stock_gpu_ms": stock and figures[stock][2],
                    "plugin": variant,
                    "plugin_tpot_ms": tpot,
                    "plugin_spread": spread,
                    "plugin_gpu_ms": gpu_ms,
                    "floor_ms": floor,
                    "share_of_floor": floor / gpu_ms if gpu_ms else None,
                    "tokens_per_s_user": 1e3 / tpot,
                    "tokens_per_s_gpu": 1e3 * batch / tpot / job.tensor_parallel,
                }
                rows.append(row)
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """TPOT of stock, plugin and floor over the batch, one panel per model."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(5.5 * len(models), 4), layout="constrained")
    for axis, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        batches = [row["batch"] for row in mine]
        for key, label, style in (
            ("stock_tpot_ms", f"vLLM ({', '.join(sorted({str(row['stock_backend']) for row in mine}))})", "s--"),
            ("plugin_tpot_ms", "vllm-gptoss", "o-"),
            ("plugin_gpu_ms", "vllm-gptoss, GPU busy", "o:"),
            ("floor_ms", "memory floor", "k-"),
        ):
            if all(row[key] is not None for row in mine):
                axis.plot(batches, [row[key] for row in mine], style, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("requests decoding at once")
        axis.set_ylabel("ms per token")
        axis.set_title(f"gpt-oss-{model}")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=150)


def main(
    models: Annotated[str, typer.Option(help="shapes, of 20b and 120b")] = "20b",
    batches: Annotated[str, typer.Option(help="requests decoding at once")] = "1,2,4,8,16,32",
    variants: Annotated[str, typer.Option(help="plugin and vLLM's --moe-backend names")] = ",".join((PLUGIN, *STOCK)),
    prompt: Annotated[int, typer.Option(help="prompt tokens")] = 512,
    output: Annotated[int, typer.Option(help="output tokens")] = 128,
    rounds: Annotated[int, typer.Option(help="processes per variant, interleaved")] = 1,
    repeats: Annotated[int, typer.Option(help="measurements per batch in a process")] = 3,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs; above 1 the engine runs in processes, no GPU time")] = 1,
    skew: Annotated[bool, typer.Option(help="send every token to the same four experts")] = False,
    profile: Annotated[bool, typer.Option(help="GPU time per step from torch.profiler")] = True,
    options: Annotated[str, typer.Option(help="further engine arguments, JSON")] = "{}",
    out: Annotated[Path, typer.Option(help="where results go")] = Path("benchmarks/results"),
) -> None:
    """Measures TPOT and GPU time per step of the plugin and of vLLM's own backends."""
    sizes = tuple(int(batch) for batch in batches.split(","))
    profile = profile and tensor_parallel == 1 and not skew
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    job = None
    for _ in range(rounds):
        for model in models.split(","):
            for variant in variants.split(","):
                job = Job(
                    model, variant, sizes, prompt, output, repeats, tensor_parallel, skew, profile, json.loads(options)
                )
                results.setdefault((model, variant), []).append(_child(job, {}))
                last = results[model, variant][-1]
                typer.echo(f"{model} {variant}: start {last['start_s']:.0f} s, KV blocks {last['kv_blocks']}")
                for row in last["rows"]:
                    gpu = f", GPU {row['gpu_ms']:.3f}" if "gpu_ms" in row else ""
                    typer.echo(f"  batch {row['batch']}: TPOT {statistics.median(row['tpot_ms']):.3f} ms{gpu}")
    assert job is not None
    rows = summarise(results, job)
    first = next(iter(results.values()))[0]
    out.mkdir(parents=True, exist_ok=True)
    stem = f"decode-{first['gpu'].replace('NVIDIA ', '').replace(' ', '-').lower()}-{date.today()}"
    record = {
        "gpu": first["gpu"],
        "vllm": _version(),
        "torch": first["torch"],
        "date": str(date.today()),
        "command": "vllm-gptoss bench decode " + " ".join(a for a in sys.argv[1:] if a not in ("bench", "decode")),
        "rows": rows,
        "measurements": [
            {"model": model, "variant": variant, "rounds": of} for (model, variant), of in results.items()
        ],
    }
    (out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    try:
        plot(rows, out / f"{stem}.png")
    except ImportError as error:
        typer.echo(f"no plot: {error}")
    typer.echo(f"written: {out / stem}.json")


def _version() -> str:
    from vllm_gptoss import _vllm

    return _vllm.version() or "unknown"


if __name__ == "__main__":  # the child: --child JOB RESULT
    fields = json.loads(sys.argv[2])
    fields["batches"] = tuple(fields["batches"])
    Path(sys.argv[3]).write_text(json.dumps(measure(Job(**fields))))
