"""Writes the measured tables of the documents from the result files.

    python benchmarks/tables.py            # rewrites them in place
    python benchmarks/tables.py --check    # exit 1 and the names of documents that are not up to date

A table is between two comments, `<!-- table: KIND [FILE ...] -->` and `<!-- /table -->`. FILE is in
benchmarks/results/. KIND is a function of `KINDS`. `hardware`, `bands`, `features` and `capacity` need no file: they
call `vllm_gptoss.engine.choose`. `drafts` reads every file, also for recipes/drafts.json. The rest of a
document is unchanged.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_gptoss.engine import choose, spec
from vllm_gptoss.engine.choose import bands as token_bands
from vllm_gptoss.engine.choose.device import Device

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DRAFTS = ROOT / "recipes" / "drafts.json"
BLOCK = re.compile(r"(<!-- table: (\S+) ?([^>]*?) -->\n).*?(<!-- /table -->)", re.DOTALL)

H200 = Device("nvidia", "NVIDIA H200", "sm90", 139.8)
Row = dict[str, Any]
Cells = Sequence[str]


def documents() -> list[Path]:
    """Every document that may hold a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def result(name: str) -> Row:
    """A result file of this project, and its name as `file`."""
    return json.loads((RESULTS / name).read_text()) | {"file": name}


def markdown(head: Cells, rows: Iterable[Cells]) -> str:
    """A table in GitHub's form, with a line break at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def number(value: float | None, digits: int = 2) -> str:
    """`value` rounded, or nothing where it was not measured."""
    return "" if value is None else f"{value:.{digits}f}"


def _with_gpu(milliseconds: float | None, gpu: float | None) -> str:
    return (number(milliseconds) + _in_brackets(gpu)).strip()


SIZES = ("kv_cache_memory_bytes", "max_num_batched_tokens")
"""Options of vLLM that fit an engine to its GPU's memory; tables leave them out."""


def _accepted(row: Row) -> str:
    accepted = f"{row['accepted']} tokens a step" if row.get("accepted") else "none accepted"
    return accepted + (f", a draft vocabulary of {row['draft_vocabulary']:,}" if row.get("draft_vocabulary") else "")


def _setting(row: Row) -> str:
    """The columns of a decode row besides the protocol: 512 + 128 tokens, one GPU."""
    lengths = f"{row.get('prompt', 512):,} + {row.get('output', 128):,} tokens"
    said = {
        lengths: lengths != "512 + 128 tokens",
        f"{row.get('tensor_parallel', 1)} GPUs": row.get("tensor_parallel", 1) > 1,
        "every token to the same four experts": row.get("skew"),
        f"EAGLE3, {row.get('eagle3')} drafts, {_accepted(row)}": row.get("eagle3"),
    }
    names = [name for name, applies in said.items() if applies]
    options = {key: value for key, value in (row.get("options") or {}).items() if key not in SIZES}
    names += [f"`{key}={json.dumps(value)}`" for key, value in options.items()]
    plugin = row.get("plugin", "plugin")
    return ", ".join(names + ([f"`{plugin}`"] if plugin != "plugin" else []))


def decode(files: Sequence[Row]) -> str:
    """ms a token (`decode_ms`), GPU time of a step in brackets, with the best stock backend and the memory floor of
    that GPU. Of several rows with the same setting, model and requests, only that of the last file."""
    newest = {(_setting(row), row["model"], row["batch"]): row for file in files for row in file["rows"]}
    head = ["model", "requests", "stock", "stock ms", "vllm-gptoss ms", "ratio", "floor", "floor / GPU"]
    settings = any(setting for setting, *_ in newest)
    table = []
    groups = list(dict.fromkeys(key[:2] for key in newest))
    for key in sorted(newest, key=lambda key: (groups.index(key[:2]), key[2])):
        (setting, model, batch), row = key, newest[key]
        stock, plugin = decode_ms(row)
        share = row.get("share_of_floor")
        cells = [model, str(batch), row["stock_backend"] or "", _with_gpu(stock, row.get("stock_gpu_ms"))]
        cells += [f"**{number(plugin)}**" + _in_brackets(row.get("plugin_gpu_ms")), _ratio(stock, plugin)]
        cells += [number(row.get("floor_ms")), f"{share:.0%}" if share else ""]
        table.append([setting, *cells] if settings else cells)
    return markdown(["setting", *head] if settings else head, table)


def _in_brackets(value: float | None) -> str:
    return "" if value is None else f" ({number(value)})"


def decode_ms(row: Row) -> tuple[float | None, float | None]:
    """ms a token of stock and of the plugin: a step while all requests decode where each measured side has it, else
    TPOT, which also holds steps that read prompts."""
    if row.get("plugin_decode_ms") and (row.get("stock_decode_ms") or not row["stock_tpot_ms"]):
        return row.get("stock_decode_ms"), row["plugin_decode_ms"]
    return row["stock_tpot_ms"], row["plugin_tpot_ms"]


def by_batch(files: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Rows of decode files, of each model and number of requests that of the last file that has it."""
    models: dict[str, dict[int, Row]] = {}
    for row in (row for file in files for row in file["rows"]):
        models.setdefault(row["model"], {})[row["batch"]] = row
    return models


def speed(files: Sequence[Row]) -> str:
    """The short form of `decode` for the README: one line a number of requests, both models side by side."""
    models = by_batch(files)
    head = ["requests at once", *(f"{model}: {what}" for model in models for what in ("stock", "vllm-gptoss", "ratio"))]
    batches = sorted({batch for rows in models.values() for batch in rows})
    table = [[str(batch), *(cell for rows in models.values() for cell in _short(rows.get(batch)))] for batch in batches]
    return markdown(head, table)


def _short(row: Row | None) -> Cells:
    if row is None:
        return ["", "", ""]
    stock, plugin = decode_ms(row)
    return [number(stock), f"**{number(plugin)}**", _ratio(stock, plugin)]


def prompts(files: Sequence[Row]) -> str:
    """How fast prompts are read, all requests' at once, tokens a second."""
    table = []
    for row in (row for file in files for row in file["rows"]):
        stock, plugin = (prompt_speed(row, side) for side in ("stock", "plugin"))
        speeds = [f"{each:,.0f}" if each else "" for each in (stock, plugin)]
        table.append([row["model"], str(row["batch"]), *speeds, _ratio(plugin, stock, 2)])
    return markdown(["model", "requests", "stock", "vllm-gptoss", "ratio"], table)


def prompt_speed(row: Row, side: str) -> float | None:
    """Tokens a second of a decode row's prompts, read all at once, by `stock` or `plugin`."""
    milliseconds = row[f"{side}_prefill_ms"]
    return 1e3 * row["batch"] * row["prompt"] / milliseconds if milliseconds else None


def _ratio(more: float | None, less: float | None, digits: int = 1) -> str:
    return number(more / less if more and less else None, digits)


def engines(files: Sequence[Row]) -> str:
    """Start and memory of the engines of decode files."""
    head = ["model", "variant", "start, s", "KV cache, GiB", "peak of loading, GiB"]
    table = []
    for file in files:
        for engine in file.get("engines", []):
            cells = [engine["model"], engine["variant"], number(engine.get("start_s"), 0)]
            table.append([*cells, number(engine.get("kv_gib")), number(engine.get("load_peak_gib"))])
    return markdown(head, table)


ROUTINGS = {"uniform": "even", "four": "all to the same four", "half": "half to one", "zipf": "Zipf"}


def _routing(row: Row) -> str:
    return row.get("routing", "four" if row["skewed"] else "uniform")


def kernels(files: Sequence[Row]) -> str:
    """The pair of expert kernels in us a layer; stock with its routing. Of several rows of a case, the last."""
    head = ["model", "tokens", "routing", "experts read", "up", "down", "pair", "floor / pair", "stock up / down"]
    newest = {(r["model"], r["tokens"], _routing(r)): r for file in files for r in file["rows"]}
    table = []
    for (model, tokens, routing), row in newest.items():
        stock = [number(row.get(f"stock_{part}_us"), 1) for part in ("up", "down")]
        cells = [model.removeprefix("gpt-oss-"), str(tokens), ROUTINGS[routing], number(row["active_experts"], 1)]
        cells += [number(row.get(f"{part}_us"), 1) for part in ("up", "down", "pair")]
        share = row.get("pair_share_of_floor")
        cells += [f"{share:.0%}" if share else "", " / ".join(stock) if any(stock) else ""]
        table.append([*cells, number(row.get("stock_with_routing_us"), 1)])
    return markdown([*head, "stock with routing"], table)


def layers(files: Sequence[Row]) -> str:
    """The four launches around the experts, us a launch in a chain; and cuBLAS alone."""
    parts = ("qkv_rope", "attend", "out_proj", "router")
    table = []
    for row in (row for file in files for row in file["rows"]):
        cells = [str(row["tokens"]), str(row["keys"]), str(row["window"] or "all")]
        cells += [number(row[part]["us"], 1) for part in parts] + [number(row["layer_us"], 1)]
        table.append([*cells, ", ".join(number(row[part].get("stock_us"), 1) for part in ("qkv_rope", "out_proj"))])
    return markdown(["tokens", "keys", "window", *parts, "the four chained", "cuBLAS q/k/v, o alone"], table)


def step(files: Sequence[Row]) -> str:
    """A layer of a one-token step, us: six launches against one."""
    table = []
    for row in (row for file in files for row in file["rows"]):
        share = f"{row['floor_us'] / row['step_us']:.0%}"
        cells = [row["model"], f"{row['keys']:,}", number(row["chain_us"], 1), number(row["step_us"], 1)]
        table.append([*cells, number(row["floor_us"], 1), share])
    return markdown(["model", "keys", "six launches", "one launch", "floor", "share of floor"], table)


def accuracy(files: Sequence[Row]) -> str:
    """Mean distance of log-probabilities from float64, and how far stock's two backends lie apart."""
    head = ["tokens a step", "GPUs", "positions", "triton - marlin", "vllm-gptoss - nearer", "vllm-gptoss - float64"]
    table = []
    for run in (run for file in files for run in file["runs"]):
        ours, apart = run["candidate"], run["distances"]
        nearer = min(apart[f"{ours} - {stock}"]["mean"] for stock in ("triton", "marlin"))
        means = run["float64"]["means"]
        cells = [str(run["chunk"]), str(run["tensor_parallel"]), f"{run['positions']:,}"]
        cells += [number(value, 3) for value in (apart["triton - marlin"]["mean"], nearer, means[ours])]
        table.append([*cells, *(number(means[stock], 3) for stock in ("triton", "marlin"))])
    return markdown([*head, "triton - float64", "marlin - float64"], table)


def consistency(files: Sequence[Row]) -> str:
    """Mean difference of decode and prompt log-probabilities after operations, by the number of requests."""
    rows = [row for file in files for row in file["rows"] if row["router"] == "random"]
    kinds = dict.fromkeys((row["operation"], row["mode"]) for row in rows)
    sizes = sorted({row["requests"] for row in rows if "requests" in row})
    head = ["operation", *(f"{side}, {' / '.join(map(str, sizes))}" for side in ("stock", "plugin"))]
    return markdown(
        head,
        (
            [f"{name}, {mode}", *(_means(rows, sizes, name, mode, variant) for variant in ("triton", "plugin"))]
            for name, mode in kinds
        ),
    )


def _means(rows: Sequence[Row], sizes: Sequence[int], *wanted: str) -> str:
    found = [row for row in rows if (row["operation"], row["mode"], row["variant"]) == wanted]
    if not found:
        return "not run"
    if error := found[0].get("error"):
        return f"`{error.partition(':')[0]}`"
    by_size = {row["requests"]: row["mean"] for row in found}
    return " / ".join("NaN" if by_size[size] is None else number(by_size[size], 3) for size in sizes)


def float64(files: Sequence[Row]) -> str:
    """Mean distance of decode and of prompts from float64, without an operation, by the router's margins."""
    rows = [row for file in files for row in file["rows"] if row["operation"] == "none" and row["mode"] == "graphs"]
    head = ["router", "requests", *(f"{side} {part}" for side in ("stock", "plugin") for part in ("decode", "prompt"))]
    sides = [(variant, f"{part}_float64_mean") for variant in ("triton", "plugin") for part in ("decode", "prompt")]
    by = {(row["router"], row["requests"], row["variant"]): row for row in rows}
    kinds = dict.fromkeys((router, requests) for router, requests, _ in by)
    return markdown(head, ([r, str(n), *(number(by[r, n, v][name], 4) for v, name in sides)] for r, n in kinds))


def compiled(files: Sequence[Row]) -> str:
    """Registers of a thread, spilled bytes, and KB of shared memory of a block, by architecture; alike ones once."""
    rows = [row for file in files for row in file["rows"]]
    archs, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("arch", "kernel"))
    cells = {
        (row["kernel"], row["arch"]): f"{row['registers']} / {row['spilled']} / {number(row['shared'] / 1024, 0)}"
        for row in rows
    }
    alike: dict[tuple[str, ...], list[str]] = {}
    for arch in archs:
        alike.setdefault(tuple(cells[name, arch] for name in names), []).append(arch)
    return markdown(["kernel", *map(", ".join, alike.values())], zip(names, *alike, strict=True))


def sm80(files: Sequence[Row]) -> str:
    """Experts for sm_80 in blocks of 99 KB and vLLM's Marlin, us a layer: with the fewest multiprocessors, and all."""
    by = {(r["tokens"], r["grid"]): r for file in files for r in file["rows"] if r["shared"] == 99 * 1024}
    few, every = (pick(grid for _, grid in by) for pick in (min, max))
    head = ["tokens", *(cell for n in (few, every) for cell in (f"{n} blocks", f"Marlin on {n}")), "ratio"]
    table = []
    for tokens in dict.fromkeys(tokens for tokens, _ in by):
        held, whole = by[tokens, few], by[tokens, every]
        times = [held["us"], held["marlin_held_us"], whole["us"], whole["marlin_us"]]
        table.append([str(tokens), *(number(us, 1) for us in times), _ratio(whole["marlin_us"], whole["us"])])
    return markdown(head, table)


def hardware(files: Sequence[Row]) -> str:
    """What `choose` gives for one GPU of each family, AITER on for AMD; `vllm-gptoss doctor` prints the same there."""
    del files
    table = []
    for family in choose.FAMILIES:
        arch = (family.archs or ("x86_64",))[0]
        vendor = "cpu" if not family.archs else "amd" if arch.startswith("gfx") else "nvidia"
        device = Device(vendor, family.name, arch, memory_gib=80.0)
        deployment = choose.Deployment(spec.GPT_OSS_20B, device_type="cpu" if vendor == "cpu" else "cuda", aiter=True)
        picked = [ask(device, deployment) for ask in (choose.attention, choose.experts)]
        fused = choose.layers(device, deployment).value
        ran = "measured" if fused == "gptoss" else "tested" if vendor == "cpu" else "not run by us"
        table.append([family.name, ", ".join(family.archs), *(f"`{choice.value}`" for choice in picked), fused, ran])
    return markdown(["family", "architecture", "attention", "experts", "fused layers", "status"], table)


def bands(files: Sequence[Row]) -> str:
    """What runs a step on Hopper, by how many tokens it has."""
    del files
    table, least = [], 1
    for band in token_bands.SM90:
        last = {None: " or more", least: ""}.get(band.most, f" to {band.most}")
        table.append([f"{least}{last}", band.layers, band.attention, band.experts])
        least = (band.most or 0) + 1
    return markdown(["tokens in the step", "layers", "attention", "experts"], table)


FEATURES: dict[str, Row] = {
    "one GPU": {},
    "two GPUs, tensor parallel": {"tensor_parallel": 2},
    "four GPUs, tensor parallel": {"tensor_parallel": 4},
    "pipeline parallel": {"pipeline_parallel": 2},
    "data parallel": {"data_parallel": 2},
    "expert parallel": {"tensor_parallel": 2, "expert_parallel": True},
    "decode context parallel": {"tensor_parallel": 2, "decode_context_parallel": 2},
    "LoRA": {"lora": True},
    "LoRA limited to attention": {"lora": True, "lora_on_attention": True},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    "n-gram drafts": {"drafts": "ngram", "draft_tokens": 3},
    "EAGLE3 drafts": {"drafts": "eagle3", "draft_tokens": 3},
    "other drafts": {"drafts": "draft_model"},
    "OffloadingConnector": {"kv_connectors": ("OffloadingConnector",)},
    "NixlConnector": {"kv_connectors": ("NixlConnector",)},
    "weights offloaded": {"offloaded": True},
    "load balancing of experts": {"tensor_parallel": 2, "expert_parallel": True, "moves_experts": True},
    "dual batch overlap": {"micro_batches": True},
    "batch invariance": {"batch_invariant": True},
    "`cudagraph_mode=PIECEWISE`": {"piecewise_graphs": True},
    "`--enforce-eager`": {"graphs": False},
    "another process through MPS": {"mps": True},
    "`--moe-backend marlin`": {"moe_backend": "marlin"},
}
"""Options of a deployment of the 20b on H200: changes of `choose.Deployment`."""


def features(files: Sequence[Row]) -> str:
    """Which parts of the plugin run with a feature, and why vLLM's do, by `choose`."""
    del files
    table = []
    for name, changes in FEATURES.items():
        found = choose.Deployment(spec.GPT_OSS_20B, **changes)
        layers, experts, runner = (ask(H200, found) for ask in (choose.layers, choose.experts, choose.runner))
        # the layers' attention plans nothing on the host, which the runner requires
        if runner.value == "gptoss" and layers.value != "gptoss":
            runner = choose.Choice("upstream", "not gptoss: the layers are vLLM's")
        few = f" up to {token_bands.FUSED_TOKENS} tokens"
        part = few if choose.many_tokens(H200, found).value != token_bands.AROUND_CUBLAS else ""
        table.append([name, _part(layers) + part * (layers.value == "gptoss"), _part(experts), _part(runner)])
    return markdown(["feature", "layers", "experts", "runner"], table)


def _part(choice: choose.Choice[str]) -> str:
    why = choice.reason.rpartition("not gptoss: ")[2].partition(";")[0]
    return choice.value if choice.value == "gptoss" else f"{choice.value}: {why}"


def drafts(files: Sequence[Row]) -> str:
    """TPOT with and without drafts, and the tokens per step from which drafts pay, of every result file."""
    del files
    head = ["model", "GPU", "requests", "drafts", "plain ms", "ms per accepted token (tokens per step)", "break-even"]
    table = []
    for row in _drafts():
        device = f"{row['gpus']} x {row['device']}" if row["gpus"] > 1 else row["device"]
        cells = [row["model"], device, *(str(row[key]) for key in ("requests", "drafts"))]
        token = f"{number(row['drafts_ms'])} ({row['accepted']:.1f})"
        table.append([*cells, number(row["plain_ms"]), token, f"**{number(row['break_even'])}**"])
    return markdown(head, table)


@functools.cache
def _drafts() -> list[Row]:
    from benchmarks.drafts import compared

    return compared(result(path.name) for path in sorted(RESULTS.glob("*.json")))


def advice() -> str:
    """recipes/drafts.json: the rows of `drafts` for `vllm-gptoss recipe plan`, one a line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in _drafts()) + "\n]\n"


def capacity(files: Sequence[Row]) -> str:
    """What numbers of users need, by `benchmarks/capacity.py` with its own assumptions."""
    del files
    from benchmarks import capacity as model

    return markdown(model.HEAD, model.table())


KINDS: dict[str, Callable[[Sequence[Row]], str]] = {
    "decode": decode,
    "speed": speed,
    "prompts": prompts,
    "engines": engines,
    "kernels": kernels,
    "layers": layers,
    "step": step,
    "accuracy": accuracy,
    "consistency": consistency,
    "float64": float64,
    "compiled": compiled,
    "sm80": sm80,
    "hardware": hardware,
    "bands": bands,
    "features": features,
    "capacity": capacity,
    "drafts": drafts,
}


class TableError(ValueError):
    """A table that cannot be written; the message names the document's line and the remedy."""


def render(text: str) -> str:
    """`text` with every table rewritten.

    Raises:
        TableError: an unknown kind, or a result file that is missing or lacks a field.
    """

    def filled(found: re.Match[str]) -> str:
        opening, kind, names, closing = found.groups()
        if kind not in KINDS:
            raise TableError(f"{opening.strip()}: there is no such table, only {', '.join(KINDS)}")
        try:
            table = KINDS[kind]([result(name) for name in names.split()])
        except (OSError, ValueError, KeyError) as error:
            raise TableError(f"{opening.strip()}: {error!r}") from None
        return opening + table + closing

    return BLOCK.sub(filled, text)


def main(arguments: Sequence[str]) -> int:
    """Rewrites the documents, or with `--check` names those that it would change."""
    stale = []
    for path in (*documents(), DRAFTS):
        text = path.read_text()
        if (new := advice() if path == DRAFTS else render(text)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(new)
    print("\n".join(f"{name}: tables {'are old' if '--check' in arguments else 'written'}" for name in stale))
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
