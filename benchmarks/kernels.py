"""Each expert kernel alone, weights cold in L2, against the stock kernel it replaces: time, TB/s, share of the floor.

    python benchmarks/kernels.py [--model 20b] [--tokens 1,2,4,8,16,32,48,64] [--routing uniform,four] [--out FILE]
        [--kernels chosen|few|many|prefill] [--tensor-parallel 1] [--hot 1]

Times are of CUDA graph replays, median of 20, each graph holding eight launches with different routings (fewer from
1,025 tokens on), so that no launch finds its weights in L2. `pair` is both projections chained with programmatic
dependent launch, as a layer runs them; kernels that take both in one launch have no `up` and `down` alone. Steps of
more than 512 tokens also have their share of the tensor cores' 989 TFLOP/s. `stock` is vLLM's `matmul_ogs` with its
routing kernels, from the `triton_kernels` that vLLM carries; pass `--triton-kernels FOLDER` to name another copy. The
floor is the bytes of the active experts' weights and scales over 4.3 TB/s, what a device-to-device copy moves on an
H200. Routings: `uniform`; `four`, all tokens to the same; `half`, half of the tokens have one expert in common;
`zipf`, experts as often as one over their rank. `chosen` is what the plugin runs for so many tokens. With `--hot
SECONDS` the pair and stock are also timed after so long of nothing else, as on a server that is busy.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from timing import BYTES_PER_SECOND, hot_microseconds, microseconds, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_gptoss.engine import spec
from vllm_gptoss.engine.experts import mxfp4, sm90
from vllm_gptoss.engine.kernels.experts import FewTokenExperts, Projection
from vllm_gptoss.engine.kernels.experts_many import ManyTokenExperts
from vllm_gptoss.engine.kernels.experts_plan import PARTIAL_TOKENS
from vllm_gptoss.engine.kernels.experts_prefill import PrefillExperts

LAUNCHES = 8
FLOPS_PER_SECOND = 989.4e12
"""Dense bf16 of an H100 or H200 at its highest clock."""


def weights(experts: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device="cuda", generator=g)
    scales = torch.randint(113, 122, (experts, rows, columns // 32), dtype=torch.uint8, device="cuda", generator=g)
    return blocks, scales, torch.randn(experts, rows, device="cuda", generator=g)


def projection(parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Projection:
    blocks, scales, bias = parts
    values = torch.cat([mxfp4.hopper_values(blocks[e : e + 1]) for e in range(blocks.shape[0])])
    return Projection(values, mxfp4.hopper_scales(scales), bias)


def layer_of(up: Projection, down: Projection, active: int, experts: int) -> sm90.LayerExperts:
    """A layer's experts as the plugin runs them."""
    few = FewTokenExperts(up, down, active, experts, alpha=spec.SWIGLU_ALPHA, limit=spec.SWIGLU_LIMIT)
    return sm90.LayerExperts(few, ManyTokenExperts(few), PrefillExperts(few))


def routings(tokens: int, experts: int, active: int, routing: str) -> list[torch.Tensor]:
    """Router logits of each launch, [T, E] bf16."""
    g = torch.Generator(device="cuda").manual_seed(tokens)
    order = torch.randperm(experts, device="cuda", generator=g)
    out = []
    for launch in range(LAUNCHES):
        logits = torch.randn(tokens, experts, device="cuda", generator=g)
        if routing == "half":
            logits[: tokens // 2, order[launch]] += 20
        elif routing == "zipf":  # the largest of logits with Gumbel noise are a draw by their weights
            noise = -torch.rand(tokens, experts, device="cuda", generator=g).clamp(1e-9, 1 - 1e-7).log().neg().log()
            logits = noise - torch.arange(1, experts + 1, device="cuda").log()[order.roll(launch)]
        elif routing == "four" or tokens == 1:
            logits[:, order[torch.arange(active, device="cuda") + active * launch % experts]] += 20
        out.append(logits.bfloat16())
    return out


class Stock:
    """vLLM's `triton` experts: `triton_kernels` as oracle/mxfp4.py and gpt_oss_triton_kernels_moe.py set them up."""

    def __init__(self, up: Any, down: Any, active: int) -> None:
        from triton_kernels.matmul_ogs import FlexCtx, FnSpecs, FusedActivation, PrecisionConfig
        from triton_kernels.matmul_ogs_details import opt_flags
        from triton_kernels.numerics import InFlexData
        from triton_kernels.swiglu import swiglu_fn
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        opt_flags.update_opt_flags_constraints({"split_k": 1})
        values, values_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        self.active, self.layers = active, []
        for blocks, scales, bias in (up, down):
            padded = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4)).transpose(-2, -1)
            w = convert_layout(wrap_torch_tensor(blocks.transpose(-2, -1), dtype=FP4), values, **values_options)
            s = convert_layout(wrap_torch_tensor(padded), scale, **scale_options)
            self.layers.append((w, PrecisionConfig(weight_scale=s, flex_ctx=FlexCtx(rhs_data=InFlexData())), bias))
        self.activation = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (1.702, 7.0), 2)

    def projections(self) -> tuple[Projection, Projection]:
        """The same bytes for our kernels, as the plugin takes them."""
        from vllm_gptoss.engine.experts import sm90

        up, down = (
            Projection(sm90.storage(w, "HOPPER_VALUE"), sm90.storage(p.weight_scale, "HOPPER_SCALE"), bias)
            for w, p, bias in self.layers
        )
        return up, down

    def route(self, logits: torch.Tensor) -> Any:
        from triton_kernels.routing import routing

        return routing(logits, self.active, sm_first=False)

    def up(self, x: torch.Tensor, routed: Any) -> torch.Tensor:
        from triton_kernels.matmul_ogs import matmul_ogs

        w, precision, bias = self.layers[0]
        return matmul_ogs(
            x, w, bias, routed[0], gather_indx=routed[1], precision_config=precision, fused_activation=self.activation
        )

    def down(self, act: torch.Tensor, routed: Any) -> torch.Tensor:
        from triton_kernels.matmul_ogs import matmul_ogs

        w, precision, bias = self.layers[1]
        data = routed[0]
        return matmul_ogs(act, w, bias, data, scatter_indx=routed[2], precision_config=precision, gammas=data.gate_scal)


def measure(
    model: spec.ModelSpec,
    tokens: int,
    rank: int,
    routing: str,
    stock: Stock | None,
    ours: sm90.Kernel,
    hot: float,
) -> dict[str, Any]:
    launches = max(1, min(LAUNCHES, 8192 // tokens))
    logits = routings(tokens, model.experts, model.active_experts, routing)[:launches]
    x = torch.randn(tokens, model.hidden, device="cuda").bfloat16()
    out = torch.empty_like(x)
    active = statistics.mean(len(each.float().topk(model.active_experts)[1].unique()) for each in logits)
    up_bytes = active * 2 * rank * model.hidden * 17 / 32
    down_bytes = up_bytes / 2

    def pair() -> None:
        for each in logits:
            ours(x, each, None, out)

    row: dict[str, Any] = {
        "model": model.name, "tokens": tokens, "intermediate": rank, "routing": routing,
        "skewed": routing != "uniform", "path": type(ours).__name__, "active_experts": active,
        "floor_up_us": up_bytes / BYTES_PER_SECOND * 1e6, "floor_down_us": down_bytes / BYTES_PER_SECOND * 1e6,
        "pair_us": microseconds(pair, launches),
    }  # fmt: skip
    if hot:
        row["pair_hot_us"] = hot_microseconds(pair, launches, hot)
    if isinstance(ours, FewTokenExperts):  # the other has one launch for both
        few = ours
        act = torch.zeros(tokens * model.active_experts, rank, device="cuda").bfloat16()
        row["up_us"] = microseconds(lambda: [few.launch_up(x, e, act, dependent=False) for e in logits], launches)
        row["down_us"] = microseconds(
            lambda: [few.launch_down(act, e, None, out, dependent=False) for e in logits], launches
        )
        row["up_tb_s"] = up_bytes / row["up_us"] / 1e6
        row["down_tb_s"] = down_bytes / row["down_us"] / 1e6
    row["pair_share_of_floor"] = (row["floor_up_us"] + row["floor_down_us"]) / row["pair_us"]
    if tokens > PARTIAL_TOKENS:
        flops = 6 * tokens * model.active_experts * rank * model.hidden
        row["pair_share_of_peak"] = flops / row["pair_us"] * 1e6 / FLOPS_PER_SECOND
    if stock is not None:
        row |= beside(stock, x, logits, hot)
        chosen = stock.route(logits[0])
        wanted = stock.down(stock.up(x, chosen), chosen).view_as(out).double()
        ours(x, logits[0], None, out)
        row["distance_to_stock"] = ((out.double() - wanted).norm() / wanted.norm()).item()
    return row


def beside(stock: Stock, x: torch.Tensor, logits: list[torch.Tensor], hot: float) -> dict[str, float]:
    """What stock's kernels take."""
    row, launches = {}, len(logits)
    if x.shape[0] <= PARTIAL_TOKENS:
        routed = [stock.route(each) for each in logits]
        acts = stock.up(x, routed[0])
        row["stock_up_us"] = microseconds(lambda: [stock.up(x, each) for each in routed], launches)
        row["stock_down_us"] = microseconds(lambda: [stock.down(acts, each) for each in routed], launches)

    def whole() -> None:
        for each in logits:
            chosen = stock.route(each)
            stock.down(stock.up(x, chosen), chosen)

    row["stock_with_routing_us"] = microseconds(whole, launches)
    if hot:
        row["stock_with_routing_hot_us"] = hot_microseconds(whole, launches, hot)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="20b,120b")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,48,64")
    parser.add_argument("--routing", default="uniform,four")
    parser.add_argument("--kernels", default="chosen", choices=["chosen", "few", "many", "prefill"])
    parser.add_argument("--tensor-parallel", default="1")
    parser.add_argument("--hot", type=float, default=0.0, help="seconds of nothing else before a second measurement")
    parser.add_argument("--triton-kernels", default="", help="folder that holds the package triton_kernels")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    found = importlib.util.find_spec("vllm")
    if options.triton_kernels:
        sys.path.insert(0, options.triton_kernels)
    elif found and found.submodule_search_locations:
        sys.path.insert(0, str(Path(found.submodule_search_locations[0]) / "third_party"))
    has_stock = importlib.util.find_spec("triton_kernels") is not None
    print("stock: triton_kernels" if has_stock else "stock: not measured, no triton_kernels found", flush=True)
    rows = []
    for name in options.model.split(","):
        model = spec.GPT_OSS_20B if name == "20b" else spec.GPT_OSS_120B
        for parallel in map(int, options.tensor_parallel.split(",")):
            rank = -(-model.intermediate // parallel // 64) * 64
            parts = weights(model.experts, 2 * rank, model.hidden, 1), weights(model.experts, model.hidden, rank, 2)
            stock = Stock(*parts, model.active_experts) if has_stock else None
            up, down = stock.projections() if stock else (projection(parts[0]), projection(parts[1]))
            layer = layer_of(up, down, model.active_experts, model.experts)
            for routing in options.routing.split(","):
                for tokens in map(int, options.tokens.split(",")):
                    named = {"few": layer.few, "many": layer.many, "prefill": layer.prefill}
                    ours = named.get(options.kernels, layer.kernel(tokens))
                    too_many = tokens > getattr(ours, "max_tokens", tokens)
                    if ours is None or too_many or (routing != "uniform" and tokens == 1):
                        continue
                    rows.append(row := measure(model, tokens, rank, routing, stock, ours, options.hot))
                    print(
                        " ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
                        flush=True,
                    )
            del stock, up, down, layer, named, ours, parts
    if options.out:
        write(options.out, rows)


if __name__ == "__main__":
    with torch.no_grad():
        main()
