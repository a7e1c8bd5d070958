"""experts_marlin.cu compiled to `compute_80` PTX and run on Hopper, against vLLM's Marlin experts over the same bytes.

    python benchmarks/sm80_experts.py [--tokens 1,2,4,8,16,32,64] [--out FILE] [--seconds 100] [--tilings 1]

Blocks have at most the shared memory, and grids the blocks, of GPUs that vLLM serves with Marlin (`sm80_plan.py`). Only
the ratio to Marlin on the same GPU is meant: the times say nothing about another GPU.

A launch is one layer of the 20b from top-k ids to the sum over experts. Weights are cold in L2: graphs have eight
launches with different routings, which alternate between two layers. The weights are from vLLM's own preparation, with
vLLM's padding to 3,072 columns. vLLM's routing kernel is not measured. `native` is what the plugin runs on Hopper.
`marlin_held_us`: a kernel occupies all but `grid` multiprocessors, because Marlin uses all that there are.

First the layout is compared with the plugin's index maps, and each projection alone with float64 for one token with a
single one. `--tilings 1` then times other tilings of a block.

Errors are relative, in the norm, against benchmarks/reference.py in float64.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kernels import LAUNCHES, projection, routings, weights
from marlin import bias_of, codes_of, scales_of
from sm80_plan import LIMITS, TRIED
from sm80_run import ARCH, GRIDS, Clock, collect, error, parser, ratio, show
from timing import on_hopper
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reference
from vllm_gptoss.engine import spec
from vllm_gptoss.engine.kernels import experts, nvrtc
from vllm_gptoss.engine.kernels.experts_marlin import TILINGS, MarlinFewExperts, MarlinProjection
from vllm_gptoss.engine.kernels.experts_plan import Tuning

MODEL = spec.GPT_OSS_20B


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


def over(marlin: Marlin, limit: int, blocks: int, tilings: tuple[Tuning, ...] = TILINGS) -> MarlinFewExperts:
    """Our kernels over vLLM's tensors, in blocks of at most `limit` bytes of shared memory."""
    made, sizes = marlin.tensors, (MODEL.hidden, MODEL.intermediate)
    up = MarlinProjection(made["w1"], made["w1_scale"], made["bias1"], 2 * sizes[1], sizes[0])
    down = MarlinProjection(made["w2"], made["w2_scale"], made["bias2"], *sizes)
    return MarlinFewExperts(
        up, down, MODEL.active_experts, alpha=spec.SWIGLU_ALPHA, limit=spec.SWIGLU_LIMIT, expert_map=None, arch=ARCH,
        shared=limit, blocks=blocks, tilings=tilings,
    )  # fmt: skip


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

    def ours(self, layers: Sequence[MarlinFewExperts]) -> None:
        for i in range(LAUNCHES):
            layers[i % len(layers)](self.padded, self.ids[i], self.weights[i], self.wide)

    def native(self, layers: list[experts.FewTokenExperts]) -> None:
        for i in range(LAUNCHES):
            layers[i % len(layers)](self.x, self.ids[i], self.weights[i], self.out)

    def marlin(self, layers: list[Marlin]) -> None:
        for i in range(LAUNCHES):
            layers[i % len(layers)](self.padded, self.ids[i], self.weights[i], self.wide)

    def one(self, call: Callable[..., None]) -> Tensor:
        """The first launch's output. Its padding is zero."""
        self.wide.fill_(math.nan)
        call(self.padded, self.ids[0], self.weights[0], self.wide)
        if not torch.all(self.wide[:, MODEL.hidden :] == 0):
            print("the padding of the output is not zero", flush=True)
        return self.wide[:, : MODEL.hidden].clone()


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
        for grid in (*GRIDS, clock.count):
            ours = [over(each, limit, grid) for each in layers["marlin"]]
            wrong = error(case.one(ours[0]), true)
            us = clock.microseconds(functools.partial(case.ours, ours), LAUNCHES)
            rows.append({"shared": limit, "grid": grid, "us": us, "marlin_held_us": held.get(grid), "error": wrong})
    common["marlin_us"] = min(first or math.inf, clock.microseconds(stock, LAUNCHES) or math.inf)
    for row in rows:
        ratios = {"ratio": ratio(common["marlin_us"], row["us"]), "ratio_held": ratio(row["marlin_held_us"], row["us"])}
        yield {**common, **row, **ratios}


def check_layout(parts: tuple[Parts, Parts], marlin: Marlin) -> None:
    """Prints how many codes, scales and biases of vLLM's tensors are not where the index maps find them."""
    for number, (blocks, scales, bias) in enumerate(parts, 1):
        values, stored, biases = (marlin.tensors[name.format(number)] for name in ("w{}", "w{}_scale", "bias{}"))
        rows, columns = blocks.shape[1], blocks.shape[2] * 2
        wrong = 0
        for expert in range(len(blocks)):
            codes = codes_of(values[expert : expert + 1].view(torch.uint8))[0, :rows, :columns]
            wrong += int((codes != torch.stack((blocks[expert] & 0xF, blocks[expert] >> 4), -1).flatten(-2)).sum())
        found = scales_of(stored.view(torch.uint8))[:, :rows, : columns // 32]
        wrong_bias = int((bias_of(biases)[:, :rows] != bias.bfloat16()).sum())
        print(f"layout of w{number} {list(values.shape)}: {wrong} codes, {int((found != scales).sum())} scales and"
              f" {wrong_bias} biases wrong", flush=True)  # fmt: skip


def check_columns(parts: tuple[Parts, Parts], ours: MarlinFewExperts) -> None:
    """Prints which rows of each projection are wrong if one token has a one in one column, for some columns."""
    ids = torch.tensor([[3, 0, 17, 31]], dtype=torch.int32, device="cuda")
    ones = torch.tensor([[1.0, 0, 0, 0]], device="cuda")
    matrices = [reference.mxfp4_dequantise(b[3].unflatten(-1, (-1, 16)), s[3], torch.float64) for b, s, _ in parts]
    biases = [bias[3].double() for _, _, bias in parts]
    for column in (None, 0, 1, 2, 7, 8, 9, 15, 16, 31, 32, 64, 511, 2047, 2878, 2879):
        for which, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            x = torch.zeros(1, Marlin.HIDDEN if which == 0 else MODEL.intermediate, device="cuda").bfloat16()
            total = bias
            if column is not None:
                x[0, column] = 1
                total = matrix[:, column] + bias
            if which == 0:
                found = torch.full((4, MODEL.intermediate), math.nan, device="cuda").bfloat16()
                ours._launch("experts_up", (x, ids, None, None, found), ids, ours.alpha, ours.limit)
                wanted = reference.swiglu(total)
            else:
                found = torch.full((1, Marlin.HIDDEN), math.nan, device="cuda").bfloat16()
                sums = experts.partial_sums(0, 4 * MODEL.hidden, experts.partial_tokens(1))
                ours._launch("experts_down", (x.expand(4, -1).contiguous(), ids, ones, None, sums, found), ids)
                wanted = total
            off = (found[0, : len(wanted)].double() - wanted).abs() > 0.02 * wanted.abs().clamp(min=0.05)
            off |= found[0, : len(wanted)].isnan()
            if off.any():
                rows = off.nonzero().flatten().tolist()
                pairs = [(found[0, row].item(), round(wanted[row].item(), 4)) for row in rows[:4]]
                print(
                    f"{('up', 'down')[which]}, column {column}: {len(rows)} rows wrong, {rows[:12]} {pairs}", flush=True
                )
    print("single columns compared", flush=True)


def prepared(tokens: list[int], blocks: int) -> dict[str, Any]:
    """Two layers of each kind of experts, kernels compiled."""
    parts = [expert_weights(seed) for seed in (1, 3)]
    layers: dict[str, Any] = {"parts": parts[0], "marlin": [Marlin(*each) for each in parts]}
    layers["native"] = [
        experts.FewTokenExperts(
            *map(projection, each),
            MODEL.active_experts,
            MODEL.experts,
            alpha=spec.SWIGLU_ALPHA,
            limit=spec.SWIGLU_LIMIT,
        )
        for each in parts
    ]
    check_layout(parts[0], layers["marlin"][0])
    for limit in set(LIMITS.values()):
        for grid in {GRIDS[0], blocks}:
            over(layers["marlin"][0], limit, grid).compile(torch.int32, tuple(tokens))
    print("kernels compiled", flush=True)
    for limit in sorted(set(LIMITS.values())):
        check_columns(parts[0], over(layers["marlin"][0], limit, blocks))
    return layers


def fits(layer: MarlinFewExperts, tokens: int) -> bool:
    try:
        return all(layer.plan(which, tokens) for which in experts.ONLY)
    except ValueError:
        return False


def try_tilings(layers: dict[str, Any], clock: Clock) -> Iterator[dict[str, Any]]:
    """Rows of other tilings, for 1, 8 and 64 tokens. All kernels are compiled before."""
    tried = [
        (tokens, limit, tiling, [over(each, limit, clock.count, (tiling,)) for each in layers["marlin"]])
        for tokens in (1, 8, 64)
        for limit in sorted(set(LIMITS.values()))
        for tiling in TRIED
    ]
    tried = [each for each in tried if fits(each[3][0], each[0])]
    plans = {layer[0].plan(which, tokens): layer[0] for tokens, _, _, layer in tried for which in experts.ONLY}
    nvrtc.at_once((layer.kernel, plan, torch.int32) for plan, layer in plans.items())
    for tokens, limit, tiling, ours in tried:
        case = ExpertsCase(tokens)
        wrong = error(case.one(ours[0]), true_experts(layers["parts"], case.x, case.ids[0], case.weights[0]))
        us = clock.microseconds(functools.partial(case.ours, ours), LAUNCHES)
        most = "/".join(str(ours[0].plan(which, tokens).most) for which in experts.ONLY)
        slot = ours[0].plan("experts_up", tokens).slot
        yield {"tokens": tokens, "shared": limit, **vars(tiling), "most": most, "slot": slot, "us": us, "error": wrong}


COLUMNS = ("tokens", "shared", "grid", "us", "native_us", "marlin_us", "marlin_held_us", "ratio", "ratio_held")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", default="1,2,4,8,16,32,64")
    made.add_argument("--tilings", type=int, default=0)
    options = made.parse_args()
    tokens = [int(each) for each in options.tokens.split(",")]
    clock = Clock()
    layers = prepared(tokens, clock.count)
    rows = collect(options, (row for each in tokens for row in measure(each, layers, clock)))
    if options.tilings:
        options.out = options.out and options.out.replace(".json", "-tilings.json")
        collect(options, try_tilings(layers, clock))
    show(rows, COLUMNS, "marlin_error")


if __name__ == "__main__":
    on_hopper(main)
