"""Each kernel around the experts alone, weights cold in L2: time, TB/s, share of the floor, against what it replaces.

    python benchmarks/layers.py [--tokens 1,2,4,8,16,64,256,512] [--tensor-parallel 1] [--keys 640,8192] [--out FILE]

Times are of CUDA graph replays, median of 20, each graph a chain of launches on different weights, as layers follow one
another. `stock` is torch's product with bias (cuBLAS; the plugin's kernels also do norm, residual, RoPE and the cache
write), and for attention vLLM's FlashAttention 3 with sinks where vLLM is installed. `layer` is all four chained. The
floor is the bytes that must be read over 4.3 TB/s, what a device-to-device copy moves on an H200. Above 16 tokens:
the kernels before and after cuBLAS's products (norm, RoPE with the cache write, router), the products, and all five in
sequence; one GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import BYTES_PER_SECOND, microseconds, on_hopper, write
from torch import Tensor
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_gptoss.engine import spec
from vllm_gptoss.engine.kernels import dense, norm_rope_router
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests
from vllm_gptoss.engine.model import layer_upto16

CHAIN = 24
HIDDEN, HEAD, BLOCK = spec.GPT_OSS_20B.hidden, 64, 16
DEVICE = "cuda"


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


class Layer:
    """Weights of one layer of one rank, a step's requests, and the four launches around the experts."""

    def __init__(self, tokens: int, parallel: int, experts: int, keys: int, window: int) -> None:
        self.heads, self.kv_heads, self.window = 64 // parallel, 8 // parallel, window
        width, rows = self.heads * HEAD, (self.heads + 2 * self.kv_heads) * HEAD
        self.tensors = LayerTensors(
            norm=draw(HIDDEN),
            qkv_weight=draw(rows, HIDDEN, scale=HIDDEN**-0.5),
            qkv_bias=draw(rows),
            cos_sin=torch.randn(keys, HEAD, device=DEVICE),
            sinks=draw(self.heads),
            window=window,
            out_weight=draw(HIDDEN, width, scale=width**-0.5),
            out_bias=draw(HIDDEN),
            post_norm=draw(HIDDEN),
            router_weight=draw(experts, HIDDEN, scale=HIDDEN**-0.5),
            router_bias=draw(experts),
            active=4,
            experts=None,
        )
        width_of_table = -(-keys // BLOCK)
        self.cache = draw(tokens * width_of_table, self.kv_heads, BLOCK, 2 * HEAD)
        table = torch.arange(tokens * width_of_table, device=DEVICE, dtype=torch.int32).view(tokens, width_of_table)
        self.requests = Requests(
            block_table=table,
            seq_lens=torch.full((tokens,), keys, device=DEVICE, dtype=torch.int32),
            query_start=torch.arange(tokens + 1, device=DEVICE, dtype=torch.int32),
            slots=table[:, -1].long() * BLOCK + (keys - 1) % BLOCK,
        )
        self.positions = torch.full((tokens,), keys - 1, device=DEVICE, dtype=torch.int64)
        self.q, self.hidden = draw(tokens, width), draw(tokens, HIDDEN)

    def qkv_rope(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return layer_upto16.project(self.tensors, self.cache, self.requests, self.positions, x, residual)

    def attend(self) -> Tensor:
        return layer_upto16.attend(self.tensors, self.cache, self.requests, self.q)

    def out_proj(self) -> Tensor:
        return layer_upto16.output(self.tensors, self.q, self.hidden)

    def router(self) -> None:
        layer_upto16.route(self.tensors, self.hidden, None, keep_logits=False)

    def without_experts(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The whole layer, its experts' output being what they read."""
        arguments = (self.tensors, self.cache, self.requests, self.positions, x, residual)
        return layer_upto16.layer(*arguments, others=lambda normed, logits: normed)

    def bytes_of(self, name: str) -> int:
        lens = self.requests.seq_lens
        keys = min(self.window or sys.maxsize, int(lens[0]))
        sizes = {
            "qkv_rope": self.tensors.qkv_weight.numel() * 2,
            "attend": len(lens) * keys * self.kv_heads * 2 * HEAD * 2,
            "out_proj": self.tensors.out_weight.numel() * 2,
            "router": self.tensors.router_weight.numel() * 2,
        }
        return sizes[name]


def flash_attention() -> Callable[..., Any] | None:
    """vLLM's FlashAttention 3 over a paged cache, or None."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def stock_attention(flash: Callable[..., Any], layer: Layer) -> Any:
    """As vLLM's backend calls it for decode, keys and values apart, [blocks, block size, heads, 64]."""
    key, value = layer.cache.transpose(1, 2).split(HEAD, dim=-1)
    return flash(
        layer.q.view(-1, layer.heads, HEAD), key, value, max_seqlen_q=1, cu_seqlens_q=layer.requests.query_start,
        max_seqlen_k=int(layer.tensors.cos_sin.shape[0]), seqused_k=layer.requests.seq_lens, softmax_scale=HEAD**-0.5,
        causal=True, window_size=[layer.window - 1, 0] if layer.window else [-1, -1],
        block_table=layer.requests.block_table, s_aux=layer.tensors.sinks, fa_version=3,
    )  # fmt: skip


def measure(tokens: int, parallel: int, experts: int, keys: int, window: int) -> dict[str, Any]:
    layers = [Layer(tokens, parallel, experts, keys, window) for _ in range(CHAIN)]
    x, residual = draw(tokens, HIDDEN), draw(tokens, HIDDEN)
    row: dict[str, Any] = {
        "tokens": tokens, "tensor_parallel": parallel, "experts": experts, "keys": keys, "window": window,
    }  # fmt: skip
    alone: dict[str, Callable[[Layer], Any]] = {
        "qkv_rope": lambda layer: layer.qkv_rope(x, residual),
        "attend": Layer.attend,
        "out_proj": Layer.out_proj,
        "router": Layer.router,
    }
    stock: dict[str, Callable[[Layer], Any]] = {
        "qkv_rope": lambda layer: linear(x, layer.tensors.qkv_weight, layer.tensors.qkv_bias),
        "out_proj": lambda layer: linear(layer.q, layer.tensors.out_weight, layer.tensors.out_bias),
        "router": lambda layer: linear(x, layer.tensors.router_weight, layer.tensors.router_bias),
    }
    if flash := flash_attention():
        stock["attend"] = lambda layer: stock_attention(flash, layer)
    for name, launch in alone.items():
        took = microseconds(lambda launch=launch: [launch(layer) for layer in layers], CHAIN)
        size = layers[0].bytes_of(name)
        floor = size / BYTES_PER_SECOND * 1e6
        row[name] = {"us": took, "floor_us": floor, "share_of_floor": floor / took, "tb_s": size / took / 1e6}
        if other := stock.get(name):
            try:
                row[name]["stock_us"] = microseconds(lambda other=other: [other(layer) for layer in layers], CHAIN)
            except (RuntimeError, TypeError) as error:  # another FlashAttention: only our kernel is measured
                row[name]["stock_us"] = None
                print(f"stock {name}: not measured, {error}", flush=True)

    def chained() -> None:
        before, rest = x, residual
        for layer in layers:
            before, rest = layer.without_experts(before, rest)

    row["layer_us"] = microseconds(chained, CHAIN)
    return row


def measure_many(tokens: int, experts: int) -> dict[str, Any]:
    """Above the tokens of the fused layers: attention has `attention.py`."""
    layers = [Layer(tokens, 1, experts, 128, 0) for _ in range(CHAIN)]
    x, residual, normed, total = (draw(tokens, HIDDEN) for _ in range(4))
    qkv = draw(tokens, layers[0].tensors.qkv_weight.shape[0])

    def norm(layer: Layer) -> None:
        norm_rope_router.norm(x, residual, layer.tensors.norm, normed, residual, spec.RMS_NORM_EPS)

    def rope(layer: Layer) -> None:
        norm_rope_router.rope(qkv, layer.positions, layer.tensors.cos_sin, layer.requests.slots, layer.cache)

    parts: dict[str, Callable[[Layer], Any]] = {
        "norm": norm,
        "qkv": lambda layer: linear(normed, layer.tensors.qkv_weight, layer.tensors.qkv_bias),
        "rope": rope,
        "out": lambda layer: linear(layer.q, layer.tensors.out_weight, layer.tensors.out_bias),
        "router": lambda layer: layer_upto16.route(layer.tensors, x, residual, False, total, norm_rope_router.router),
    }
    row: dict[str, Any] = {"tokens": tokens, "experts": experts}
    for name, launch in parts.items():
        took = microseconds(lambda launch=launch: [launch(layer) for layer in layers], CHAIN)
        row[name] = {"us": took}
    row["layer_us"] = microseconds(lambda: [part(layer) for layer in layers for part in parts.values()], CHAIN)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,2,4,8,16")
    parser.add_argument("--tensor-parallel", default="1")
    parser.add_argument("--experts", default="32")
    parser.add_argument("--keys", default="640")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rows = []
    few, many = [], []
    for count in map(int, options.tokens.split(",")):
        (few if count <= dense.MAX_TOKENS else many).append(count)
    for parallel in map(int, options.tensor_parallel.split(",")):
        for keys in map(int, options.keys.split(",")):
            for window in (spec.WINDOW, 0):
                for tokens in few:
                    rows.append(measure(tokens, parallel, int(options.experts), keys, window))
                    say(rows[-1])
    for tokens in many:
        rows.append(measure_many(tokens, int(options.experts)))
        say(rows[-1])
    if options.out:
        write(options.out, rows)


def say(row: dict[str, Any]) -> None:
    said = {key: f"{value['us']:.1f}" if isinstance(value, dict) else value for key, value in row.items()}
    print(" ".join(f"{key}={value}" for key, value in said.items()), flush=True)


if __name__ == "__main__":
    on_hopper(main)
