"""All layers of a step of one token: one launch (`step`) against six launches a layer (`chain`), weights cold in L2.

    python benchmarks/step.py [--model 20b] [--keys 640,7683] [--layers N] [--trace] [--out FILE]

Times are of CUDA graph replays, median of 20. `difference` compares the two results after as many layers as are given
to `--check`: both round to bf16 at the same places, sums differ in order. `--trace` prints where a block's time goes.
The floor is the bytes of the weights that must be read over 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from timing import BYTES_PER_SECOND, microseconds, on_hopper, write

from vllm_gptoss.engine import spec
from vllm_gptoss.engine.kernels import dense, step
from vllm_gptoss.engine.kernels.experts import FewTokenExperts, Projection
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests
from vllm_gptoss.engine.model import layer_upto16

HEAD, BLOCK = 64, 16
MODELS = {"20b": spec.GPT_OSS_20B, "120b": spec.GPT_OSS_120B}
MARKS = (
    "wait for down, input", "q/k/v", "epilogue", "attend", "wait for attend", "out", "sums, router's share",
    "choose", "up", "wait for up", "down", "to the next",
)  # fmt: skip


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda").mul_(scale).bfloat16()


def projection(experts: int, rows: int, columns: int) -> Projection:
    """Random bytes: each word is eight e2m1 values, in any order."""
    values = torch.randint(0, 256, (experts, rows // 4, columns * 2), dtype=torch.uint8, device="cuda")
    pairs = -(-columns // 128) * 2
    scales = torch.randint(113, 120, (experts, -(-rows // 256) * 8, pairs * 64), dtype=torch.uint8, device="cuda")
    return Projection(values, scales, torch.randn(experts, rows, device="cuda"))


class Model:
    """Layers of one model with random weights, and a request that decodes its token number `keys`."""

    def __init__(self, model: spec.ModelSpec, layers: int, keys: int) -> None:
        hidden, heads, kv_heads = model.hidden, model.query_heads, model.kv_heads
        blocks = -(-keys // BLOCK)
        cos_sin = torch.randn(keys, HEAD, device="cuda")
        self.layers = [
            LayerTensors(
                norm=draw(hidden),
                qkv_weight=draw((heads + 2 * kv_heads) * HEAD, hidden, scale=hidden**-0.5),
                qkv_bias=draw((heads + 2 * kv_heads) * HEAD),
                cos_sin=cos_sin,
                sinks=draw(heads),
                window=0 if index % 2 else spec.WINDOW,
                out_weight=draw(hidden, heads * HEAD, scale=(heads * HEAD) ** -0.5),
                out_bias=draw(hidden),
                post_norm=draw(hidden),
                router_weight=draw(model.experts, hidden, scale=hidden**-0.5),
                router_bias=draw(model.experts),
                active=model.active_experts,
                experts=FewTokenExperts(
                    projection(model.experts, 2 * model.intermediate, hidden),
                    projection(model.experts, hidden, model.intermediate),
                    model.active_experts,
                    model.experts,
                    alpha=spec.SWIGLU_ALPHA,
                    limit=spec.SWIGLU_LIMIT,
                ),
            )
            for index in range(layers)
        ]
        self.caches = [draw(blocks, kv_heads, BLOCK, 2 * HEAD) for _ in range(layers)]
        self.step = step.Step(self.layers, eps=spec.RMS_NORM_EPS)
        table = torch.arange(blocks, device="cuda", dtype=torch.int32)[None]
        lens = torch.tensor([keys], device="cuda", dtype=torch.int32)
        starts = torch.tensor([0, 1], device="cuda", dtype=torch.int32)
        self.positions = lens.long() - 1
        self.requests = Requests(table, lens, starts, self.positions)
        self.x = draw(1, hidden)

    def chain(self) -> tuple[Tensor, Tensor]:
        """Six launches a layer."""
        x, residual = self.x, None
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x, residual = layer_upto16.layer(layer, cache, self.requests, self.positions, x, residual)
        assert residual is not None
        return x, residual

    def fused(self, trace: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One launch."""
        table = self.step.table([0] * len(self.layers), self.caches)
        assert table is not None
        return self.step(self.x, None, self.positions, [self.requests], table, trace)

    def bytes_of(self) -> float:
        """What a step must read of the weights."""
        layer = self.layers[0]
        dense_bytes = 2 * (layer.qkv_weight.numel() + layer.out_weight.numel() + layer.router_weight.numel())
        assert layer.experts is not None
        expert = sum(p.rows * p.tiles * 64 * (4 + 8 / 32) / 8 for p in (layer.experts.up, layer.experts.down))
        return len(self.layers) * (dense_bytes + step.ACTIVE * expert)


def difference(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def check(model: spec.ModelSpec, layers: int, keys: int) -> dict[str, float]:
    """Distance between the two after `layers` layers; the same twice, to the bit."""
    made = Model(model, layers, keys)
    wanted, wanted_hidden = made.chain()
    got, hidden = made.fused()
    torch.cuda.synchronize()
    again, again_hidden = made.fused()
    torch.cuda.synchronize()
    return {
        "out": difference(got, wanted),
        "hidden": difference(hidden, wanted_hidden),
        "same": float(torch.equal(got, again) and torch.equal(hidden, again_hidden)),
    }


def traced(made: Model) -> list[tuple[str, float, float, float]]:
    """(what, mean, least, most) of microseconds at 1.98 GHz that block time goes to, over blocks and inner layers."""
    marks = torch.zeros(len(made.layers), 14, dense.multiprocessors(0), device="cuda", dtype=torch.int64)
    for _ in range(3):
        made.fused(marks)
    torch.cuda.synchronize()
    spans = torch.cat([marks[:-1, :12], marks[1:, :1]], dim=1).diff(dim=1)[2:].double() / 1980
    found = [
        (name, float(spans[:, i].mean()), float(spans[:, i].amin(1).mean()), float(spans[:, i].amax(1).mean()))
        for i, name in enumerate(MARKS)
    ]
    return found + [
        (f"attending: {name}, {what}", float(took.mean()), float(took.min()), float(took.max()))
        for what, first in (("window", 2), ("all keys", 3))
        for name, took in attending(marks[first::2])
    ]


def attending(marks: Tensor) -> list[tuple[str, Tensor]]:
    """The parts of attention in the blocks that attend."""
    parts = torch.stack([marks[:, i] for i in (3, 12, 13, 4)], dim=1).diff(dim=1).double() / 1980
    parts = parts[:, :, marks[-1, 12] > 0]
    return [(name, parts[:, i]) for i, name in enumerate(("queries", "keys", "merge"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="20b")
    parser.add_argument("--keys", default="640", help="lengths of the request, this step's token included")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--check", type=int, default=2)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    model, rows = MODELS[options.model], []
    for keys in map(int, options.keys.split(",")):
        row: dict[str, Any] = {"model": options.model, "keys": keys}
        row["difference"] = check(model, options.check, keys)
        print(row, flush=True)
        made = Model(model, options.layers or model.layers, keys)
        count = len(made.layers)
        row["chain_us"], row["step_us"] = (microseconds(run, count) for run in (made.chain, made.fused))
        row["floor_us"] = made.bytes_of() / count / BYTES_PER_SECOND * 1e6
        if options.trace:
            row["trace"] = traced(made)
            for name, *times in row["trace"]:
                print(f"  {name:26}" + "".join(f"{time:8.2f}" for time in times))
        rows.append(row)
        print({key: value for key, value in row.items() if key != "trace"}, flush=True)
        del made
    if options.out:
        write(options.out, rows)


if __name__ == "__main__":
    on_hopper(main)
