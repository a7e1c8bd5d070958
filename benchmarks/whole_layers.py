"""Whole layers of decode steps of 17 to 32 tokens, with our products and with cuBLAS's: us a layer.

    python benchmarks/whole_layers.py [--tokens 17,24,32] [--experts 32,128] [--keys 576] [--out FILE]

The minimum of three medians of alternating graph replays. Eight layers with separate weights and shared experts, half
of them with a window. `distance` is the difference of both results before the last experts, relative to their norm;
most of it comes from experts that are selected differently near a tie.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import torch
from kernels import layer_of, projection, weights
from layers import HIDDEN, Layer, draw
from timing import microseconds, on_hopper, write

from vllm_gptoss.engine import spec
from vllm_gptoss.engine.experts.sm90 import LayerExperts
from vllm_gptoss.engine.kernels import product_many
from vllm_gptoss.engine.model import layer_upto512

LAYERS, ROUNDS = 8, 3


def experts_of(count: int) -> LayerExperts:
    """The experts of a layer of the 20b (32) or the 120b (128), as the plugin runs them."""
    up, down = (projection(weights(count, rows, HIDDEN, seed)) for seed, rows in ((1, 2 * HIDDEN), (2, HIDDEN)))
    return layer_of(up, down, 4, count)


def measure(tokens: int, count: int, keys: int, experts: layer_upto512.Experts) -> dict[str, Any]:
    layers = [Layer(tokens, 1, count, keys, 0 if index % 2 else spec.WINDOW) for index in range(LAYERS)]
    x = draw(tokens, HIDDEN)

    def run() -> torch.Tensor:
        hidden, residual = x, None
        for layer in layers:
            given = (layer.tensors, experts, layer.cache, layer.requests, layer.positions, hidden, residual)
            hidden, residual = layer_upto512.layer(*given)
        assert residual is not None
        return residual

    row: dict[str, Any] = {"experts": count, "tokens": tokens, "keys": keys}
    sums = {}
    for _ in range(ROUNDS):
        for name, own in (("cublas_us", False), ("ours_us", True)):
            with mock.patch.object(product_many, "fits", lambda *_, own=own: own):
                sums[name] = run().double()
                row[name] = min(row.get(name, float("inf")), microseconds(run, LAYERS))
    row["distance"] = ((sums["ours_us"] - sums["cublas_us"]).norm() / sums["cublas_us"].norm()).item()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="17,24,32")
    parser.add_argument("--experts", default="32,128")
    parser.add_argument("--keys", type=int, default=576)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rows = []
    for count in map(int, options.experts.split(",")):
        experts = experts_of(count)
        for tokens in map(int, options.tokens.split(",")):
            kernel = experts.kernel(tokens)
            assert kernel is not None
            rows.append(measure(tokens, count, options.keys, kernel))
            print(" ".join(f"{key}={value:.4g}" for key, value in rows[-1].items()), flush=True)
    if options.out:
        write(options.out, rows)


if __name__ == "__main__":
    on_hopper(main)
