"""The memory floor of a decode step: bytes that it must read, and the bandwidth of the GPU."""

from __future__ import annotations

from vllm_gptoss.engine import spec

BANDWIDTHS = {"H200": 4.3e12, "H100": 3.05e12}
"""Bytes per second that one GPU reads (measured: H200 copy 4.21, read-only reduction 4.39 TB/s; H100 3.05)."""


def bandwidth(gpu: str) -> float | None:
    """Bytes per second that `gpu` reads, as `BANDWIDTHS` has it; None where it was not measured."""
    return next((found for name, found in BANDWIDTHS.items() if name in gpu), None)


def read_bytes(
    model: spec.ModelSpec,
    batch: int,
    context: int,
    tensor_parallel: int = 1,
    skew: bool = False,
    verified: int = 1,
    cached: int = 2,
) -> float:
    """Bytes that a decode step must read once, of each GPU; over `bandwidth` it is the memory floor of a step.

    Experts that `batch` x `verified` tokens hit under uniform routing, attention, router and head weights, and the keys
    and values of `context` tokens (128 in window layers) in `cached` bytes each. A draft model is not counted.
    """
    missed = (1 - model.active_experts / model.experts) ** (batch * verified)
    hit = model.active_experts if skew else model.experts * (1 - missed)
    expert = 3 * model.hidden * model.intermediate * (4 + 8 / spec.MXFP4_GROUP) / 8
    attention = 2 * model.hidden * model.head_size * 2 * (model.query_heads + model.kv_heads)
    router = 2 * model.hidden * model.experts
    key_value = 2 * cached * model.kv_heads * model.head_size * (min(context, spec.WINDOW) + context) / 2 * batch
    layer = (hit * expert + attention + key_value) / tensor_parallel + router
    return model.layers * layer + 2 * model.vocabulary * model.hidden / tensor_parallel
