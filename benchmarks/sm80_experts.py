"""experts.cu compiled to `compute_80` PTX and run on Hopper, against vLLM's Marlin experts there.

    python benchmarks/sm80_experts.py [--tokens 1,2,4,8,16,32,64] [--out FILE] [--seconds 100]

Blocks have at most the shared memory, and grids the blocks, of GPUs that vLLM serves with Marlin (`sm80_plan.py`). Only
the ratio to Marlin on the same GPU is meant: the times say nothing about another GPU.

A launch is one layer of the 20b from top-k ids to the sum over experts. Weights are cold in L2: graphs have eight
launches with different routings, which alternate between two layers. `fused_marlin_moe` has weights from vLLM's own
preparation, with vLLM's padding to 3,072 columns. vLLM's routing kernel is not measured; experts.cu can choose the
experts itself. `native` is what the plugin runs on Hopper. `marlin_held_us`: a kernel occupies all but `grid`
multiprocessors, because Marlin uses all that there are.

Errors are relative, in the norm, against benchmarks/reference.py in float64.
"""

from __future__ import annotations

import ctypes
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from kernels import LAUNCHES, projection, routings, weights
from sm80_plan import LIMITS, ExpertsPlan, experts_plan_for
from sm80_run import ARCH, GRIDS, Clock, collect, error, parser, ratio, show
from timing import on_hopper
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reference
from vllm_gptoss.engine import spec
from vllm_gptoss.engine.kernels import experts, nvrtc
from vllm_gptoss.engine.kernels.experts_plan import NARROW_TOKENS, staged_rows

MODEL = spec.GPT_OSS_20B


class Experts:
    """A layer's experts by experts.cu as PTX, in blocks of at most `limit` bytes of shared memory."""

    loaded: ClassVar[dict[tuple[tuple[str, int | str], ...], nvrtc.Kernel]] = {}

    def __init__(self, up: experts.Projection, down: experts.Projection, limit: int) -> None:
        self.up, self.down, self.limit = up, down, limit

    def kernel(self, plan: ExpertsPlan) -> nvrtc.Kernel:
        macros = plan.macros(MODEL)
        key = tuple(sorted(macros.items()))
        if key not in self.loaded:
            module = nvrtc.load(0, experts.SOURCE, ARCH, macros)
            self.loaded[key] = module.kernel(plan.which, max(LIMITS.values()))
        return self.loaded[key]

    def launch(self, which: str, tensors: list[Tensor | None], tokens: int, grid: int, *numbers: float) -> None:
        plan = experts_plan_for(which, tokens, self.limit)
        rows = staged_rows(which, tokens)[1] if plan.most == NARROW_TOKENS else plan.rows
        arguments = [*map(experts.pointer, tensors), ctypes.c_int(tokens), ctypes.c_int(rows), experts.TWO_23]
        arguments += map(ctypes.c_float, numbers)
        self.kernel(plan)(grid, plan.tuning.warps * 32, arguments, plan.shared, dependent=False)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, grid: int) -> None:
        tokens, active = ids.shape
        act = torch.empty(tokens * active, MODEL.intermediate, device="cuda", dtype=torch.bfloat16)
        up, down = ([p.values, p.scales, p.bias] for p in (self.up, self.down))
        numbers = (spec.SWIGLU_ALPHA, spec.SWIGLU_LIMIT)
        self.launch("experts_up", [*up, x, ids, None, None, act], tokens, grid, *numbers)
        parts = experts.partial_sums(0, active * MODEL.hidden, experts.partial_tokens(tokens))
        self.launch("experts_down", [*down, act, ids, weights, None, parts, out], tokens, grid)


Parts = tuple[Tensor, Tensor, Tensor]


class Marlin:
    """The same by vLLM's Marlin, padded and prepared as vLLM does."""

    HIDDEN, INTERMEDIATE = -(-MODEL.hidden // 256) * 256, -(-MODEL.intermediate // 128) * 128

    def __init__(self, up: Parts, down: Parts) -> None:
        from vllm.model_executor.layers.quantization.utils.marlin_utils import get_marlin_workspace
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

        w13, s13, b13 = self.padded(up, 2 * self.INTERMEDIATE, self.HIDDEN)
        w2, s2, b2 = self.padded(down, self.HIDDEN, self.INTERMEDIATE)
        layer: Any = SimpleNamespace(params_dtype=torch.bfloat16)
        made = prepare_moe_mxfp4_layer_for_marlin(layer, w13, w2, s13, s2, b13, b2)
        names = ("w1", "w2", "w1_scale", "w2_scale", "bias1", "bias2")
        self.tensors = dict(zip(names, made, strict=True))
        self.tensors["workspace"] = get_marlin_workspace(torch.device("cuda:0"))

    @staticmethod
    def padded(parts: Parts, rows: int, columns: int) -> Parts:
        blocks, scales, bias = parts
        more = rows - blocks.shape[1]
        pad = torch.nn.functional.pad
        return (
            pad(blocks, (0, columns // 2 - blocks.shape[2], 0, more)),
            pad(scales, (0, columns // 32 - scales.shape[2], 0, more)),
            pad(bias, (0, more)),
        )

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        from vllm import _custom_ops
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        fused_marlin_moe(
            hidden_states=x,
            **self.tensors,
            topk_weights=weights,
            topk_ids=ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            global_num_experts=MODEL.experts,
            activation=MoEActivation.SWIGLUOAI,
            moe_sum=_custom_ops.moe_sum,
            output=out,
        )


def expert_weights(seed: int) -> tuple[Parts, Parts]:
    """Blocks, scales and bias of both projections. The biases are bf16, as a checkpoint has them."""
    up = weights(MODEL.experts, 2 * MODEL.intermediate, MODEL.hidden, seed)
    down = weights(MODEL.experts, MODEL.hidden, MODEL.intermediate, seed + 1)
    return (*up[:2], up[2].bfloat16().float()), (*down[:2], down[2].bfloat16().float())


def true_experts(parts: tuple[Parts, Parts], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The layer in float64, one expert after another."""
    total = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for expert in ids.unique().tolist():
        gate_up, down = (
            reference.mxfp4_dequantise(blocks[expert].unflatten(-1, (-1, 16)), scales[expert], torch.float64)[None]
            for blocks, scales, _ in parts
        )
        biases = [bias[expert].double()[None] for _, _, bias in parts]
        share = torch.where(ids == expert, weights.double(), 0.0).sum(-1, keepdim=True)
        first = torch.zeros(len(x), 1, dtype=torch.int64, device="cuda")
        total += reference.experts_forward(x.double(), share, first, gate_up, biases[0], down, biases[1])
    return total


class ExpertsCase:
    """Inputs of eight launches of a number of tokens."""

    def __init__(self, tokens: int) -> None:
        logits = routings(tokens, MODEL.experts, MODEL.active_experts, "uniform")
        chosen = [each.float().topk(MODEL.active_experts) for each in logits]
        self.ids = [each[1].int() for each in chosen]
        self.weights = [each[0].softmax(-1) for each in chosen]
        self.x = torch.randn(tokens, MODEL.hidden, device="cuda").bfloat16()
        self.padded = torch.nn.functional.pad(self.x, (0, Marlin.HIDDEN - MODEL.hidden))
        self.out, self.wide = torch.empty_like(self.x), torch.empty_like(self.padded)

    def ours(self, layers: list[Experts], grid: int) -> None:
        for i in range(LAUNCHES):
            layers[i % len(layers)](self.x, self.ids[i], self.weights[i], self.out, grid)

    def native(self, layers: list[experts.FewTokenExperts]) -> None:
        for i in range(LAUNCHES):
            layers[i % len(layers)](self.x, self.ids[i], self.weights[i], self.out)

    def marlin(self, layers: list[Marlin]) -> None:
        for i in range(LAUNCHES):
            layers[i % len(layers)](self.padded, self.ids[i], self.weights[i], self.wide)

    def one(self, call: Callable[..., None], *more: int) -> Tensor:
        """The first launch's output."""
        wide = isinstance(call, Marlin)
        out = self.wide if wide else self.out
        out.fill_(math.nan)
        call(self.padded if wide else self.x, self.ids[0], self.weights[0], out, *more)
        return out[:, : MODEL.hidden].clone()


def measure(tokens: int, layers: dict[str, Any], clock: Clock) -> Iterator[dict[str, Any]]:
    """Rows of a number of tokens: one for each limit of shared memory and grid. Marlin's time is the better of two."""
    case = ExpertsCase(tokens)
    true = true_experts(layers["parts"], case.x, case.ids[0], case.weights[0])

    def stock() -> None:
        case.marlin(layers["marlin"])

    common: dict[str, Any] = {"tokens": tokens, "active_experts": statistics.mean(len(i.unique()) for i in case.ids)}
    common["marlin_error"] = error(case.one(layers["marlin"][0]), true)
    first = clock.microseconds(stock, LAUNCHES)
    common["native_us"] = clock.microseconds(lambda: case.native(layers["native"]), LAUNCHES)
    held = {grid: clock.microseconds(stock, LAUNCHES, grid) for grid in GRIDS}
    rows: list[dict[str, Any]] = []
    for limit in sorted(set(LIMITS.values())):
        ours = layers[str(limit)]
        for grid in (*GRIDS, clock.count):
            wrong = error(case.one(ours[0], grid), true)
            us = clock.microseconds(functools.partial(case.ours, ours, grid), LAUNCHES)
            rows.append({"shared": limit, "grid": grid, "us": us, "marlin_held_us": held.get(grid), "error": wrong})
    common["marlin_us"] = min(first or math.inf, clock.microseconds(stock, LAUNCHES) or math.inf)
    for row in rows:
        ratios = {"ratio": ratio(common["marlin_us"], row["us"]), "ratio_held": ratio(row["marlin_held_us"], row["us"])}
        yield {**common, **row, **ratios}


def prepared(tokens: list[int]) -> dict[str, Any]:
    """Two layers of each kind of experts, kernels compiled."""
    parts = [expert_weights(seed) for seed in (1, 3)]
    ours = [(projection(up), projection(down)) for up, down in parts]
    layers: dict[str, Any] = {"parts": parts[0], "marlin": [Marlin(*each) for each in parts]}
    limits = sorted(set(LIMITS.values()))
    layers |= {str(limit): [Experts(*each, limit) for each in ours] for limit in limits}
    layers["native"] = [
        experts.FewTokenExperts(
            *each, MODEL.active_experts, MODEL.experts, alpha=spec.SWIGLU_ALPHA, limit=spec.SWIGLU_LIMIT
        )
        for each in ours
    ]
    plans = [experts_plan_for(which, t, limit) for which in experts.ONLY for t in tokens for limit in limits]
    jobs = {tuple(sorted(plan.macros(MODEL).items())): plan for plan in plans}
    kernel = layers[str(limits[0])][0].kernel
    nvrtc.at_once((kernel, plan) for plan in jobs.values())
    print(f"{len(jobs)} kernels compiled", flush=True)
    return layers


COLUMNS = ("tokens", "shared", "grid", "us", "native_us", "marlin_us", "marlin_held_us", "ratio", "ratio_held")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", default="1,2,4,8,16,32,64")
    options = made.parse_args()
    tokens = [int(each) for each in options.tokens.split(",")]
    layers, clock = prepared(tokens), Clock()
    show(collect(options, (row for each in tokens for row in measure(each, layers, clock))), COLUMNS, "marlin_error")


if __name__ == "__main__":
    on_hopper(main)
