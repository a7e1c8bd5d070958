"""MXFP4 experts for few tokens in Triton, over the checkpoint's own layout: every GPU that Triton compiles for.

No sort and no routing tensors: one program per (token, choice) pair and block of rows looks at the ids; the first pair
of an expert does the work for all of that expert's tokens, 16 at a time, the others leave. Three launches: up with bias
and SwiGLU, down with bias and routing weight, the sum over a token's choices in fixed order.

| architecture | state |
|---|---|
| sm80, sm89, sm90, sm100, sm120, gfx942, gfx950 | compiled; never run by us on such a GPU |
| interpreter | correct against float64, tests/kernels/test_experts_triton.py |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PAIRS = 128
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dequantize(codes, factor):
    # e2m1 as the top bits of a float32 is the value x 2^-126; both products are exact.
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor).to(tl.bfloat16)


@triton.jit
def _weights(blocks, scales, expert, rows, live, column, C: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """Even and odd columns [rows, BK / 2] of `BK` columns from `column` on."""
    half = column // 2 + tl.arange(0, BK // 2)
    at = (expert * N + rows.to(tl.int64))[:, None]
    mask = live[:, None] & (half < C // 2)[None, :]
    packed = tl.load(blocks + at * (C // 2) + half[None, :], mask=mask, other=0).to(tl.int32)
    code = tl.load(scales + at * (C // 32) + (half // 16)[None, :], mask=mask, other=0).to(tl.int32)
    factor = (code << 23).to(tl.float32, bitcast=True)
    return _dequantize(packed & 15, factor), _dequantize(packed >> 4, factor)


@triton.jit
def _dot(x, w, sums):
    if INTERPRETED:  # its dot reads bfloat16 operands as integers (triton 3.9)
        return tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), sums)
    return tl.dot(x, tl.trans(w), sums)


@triton.jit
def _members(ids, pairs, pair, PAIRS: tl.constexpr):
    """(expert of `pair`, whether it is that expert's first pair, which pairs are of it, their rank)."""
    every = tl.arange(0, PAIRS)
    all_ids = tl.load(ids + every, mask=every < pairs, other=-1).to(tl.int32)
    expert = tl.load(ids + pair).to(tl.int32)
    same = (all_ids == expert) & (every < pairs)
    first = tl.min(tl.where(same, every, PAIRS), axis=0)
    rank = tl.cumsum(same.to(tl.int32), axis=0) - 1
    return expert, first, same, rank, every


@triton.jit
def _chosen(same, rank, every, start, TOKENS: tl.constexpr):
    """The pairs of rank start .. start + TOKENS - 1, and which of them exist."""
    wanted = start + tl.arange(0, TOKENS)
    hit = same[None, :] & (rank[None, :] == wanted[:, None])
    return tl.sum(tl.where(hit, every[None, :], 0), axis=1), tl.sum(hit.to(tl.int32), axis=1) > 0


@triton.jit
def _up(
    x, ids, blocks, scales, bias, act, pairs, alpha, limit,
    ACTIVE: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    PAIRS: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert, first, same, rank, every = _members(ids, pairs, tl.program_id(1), PAIRS)
    if (expert >= 0) & (first == tl.program_id(1)):
        column = tl.program_id(0) * BN + tl.arange(0, BN)
        live = column < N // 2
        for start in range(0, tl.sum(same.to(tl.int32), axis=0), TOKENS):
            pair, exists = _chosen(same, rank, every, start, TOKENS)
            gate = tl.zeros((TOKENS, BN), tl.float32)
            linear = tl.zeros((TOKENS, BN), tl.float32)
            base = x + (pair // ACTIVE).to(tl.int64)[:, None] * C
            for k in range(0, C, BK):
                even = k + 2 * tl.arange(0, BK // 2)[None, :]
                mask = exists[:, None] & (even < C)
                x0 = tl.load(base + even, mask=mask, other=0.0)
                x1 = tl.load(base + even + 1, mask=mask, other=0.0)
                w0, w1 = _weights(blocks, scales, expert, 2 * column, live, k, C, N, BK)
                gate = _dot(x0, w0, gate)
                gate = _dot(x1, w1, gate)
                w0, w1 = _weights(blocks, scales, expert, 2 * column + 1, live, k, C, N, BK)
                linear = _dot(x0, w0, linear)
                linear = _dot(x1, w1, linear)
            at = bias + expert * N + 2 * column
            gate += tl.load(at, mask=live, other=0.0)[None, :].to(tl.float32)
            linear += tl.load(at + 1, mask=live, other=0.0)[None, :].to(tl.float32)
            gate = tl.minimum(gate, limit)
            linear = tl.minimum(tl.maximum(linear, -limit), limit)
            value = gate / (1.0 + tl.exp(-alpha * gate)) * (linear + 1.0)
            to = act + pair.to(tl.int64)[:, None] * (N // 2) + column[None, :]
            tl.store(to, value.to(tl.bfloat16), mask=exists[:, None] & live[None, :])


@triton.jit
def _down(
    act, ids, weights, blocks, scales, bias, parts, pairs,
    C: tl.constexpr, N: tl.constexpr,
    PAIRS: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert, first, same, rank, every = _members(ids, pairs, tl.program_id(1), PAIRS)
    if (expert >= 0) & (first == tl.program_id(1)):
        row = tl.program_id(0) * BN + tl.arange(0, BN)
        live = row < N
        for start in range(0, tl.sum(same.to(tl.int32), axis=0), TOKENS):
            pair, exists = _chosen(same, rank, every, start, TOKENS)
            sums = tl.zeros((TOKENS, BN), tl.float32)
            base = act + pair.to(tl.int64)[:, None] * C
            for k in range(0, C, BK):
                even = k + 2 * tl.arange(0, BK // 2)[None, :]
                mask = exists[:, None] & (even < C)
                x0 = tl.load(base + even, mask=mask, other=0.0)
                x1 = tl.load(base + even + 1, mask=mask, other=0.0)
                w0, w1 = _weights(blocks, scales, expert, row, live, k, C, N, BK)
                sums = _dot(x0, w0, sums)
                sums = _dot(x1, w1, sums)
            sums += tl.load(bias + expert * N + row, mask=live, other=0.0)[None, :].to(tl.float32)
            sums *= tl.load(weights + pair, mask=exists, other=0.0)[:, None].to(tl.float32)
            to = parts + pair.to(tl.int64)[:, None] * N + row[None, :]
            tl.store(to, sums, mask=exists[:, None] & live[None, :])


@triton.jit
def _combine(parts, ids, out, ACTIVE: tl.constexpr, N: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    live = row < N
    sums = tl.zeros((BN,), tl.float32)
    for a in range(ACTIVE):
        pair = token * ACTIVE + a
        if tl.load(ids + pair) >= 0:
            sums += tl.load(parts + pair.to(tl.int64) * N + row, mask=live, other=0.0)
    tl.store(out + token.to(tl.int64) * N + row, sums.to(tl.bfloat16), mask=live)


KERNELS = {"up": _up, "down": _down, "combine": _combine}


def few_token_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: tuple[Tensor, Tensor, Tensor],
    down: tuple[Tensor, Tensor, Tensor],
    *,
    alpha: float,
    limit: float,
    block_rows: int = 32,
    block_columns: int = 64,
) -> Tensor:
    """The experts' combined output, [T, hidden] bf16.

    x: [T, hidden] bf16; ids: [T, A] int32 or int64, -1 skips, T * A <= 128; weights: [T, A] f32; up: blocks
    [E, 2I, hidden/2] u8, scales [E, 2I, hidden/32] u8, bias [E, 2I]; down: [E, hidden, I/2], [E, hidden, I/32], bias
    [E, hidden]. Scale codes 1 to 254.
    """
    tokens, active = ids.shape
    pairs, hidden, rows = tokens * active, x.shape[1], up[0].shape[1]
    assert 0 < pairs <= MAX_PAIRS
    act = torch.empty((pairs, rows // 2), dtype=torch.bfloat16, device=x.device)
    parts = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    common = {"PAIRS": max(16, triton.next_power_of_2(pairs)), "TOKENS": 16, "BN": block_rows, "BK": block_columns}
    grid = (triton.cdiv(rows // 2, block_rows), pairs)
    _up[grid](x, ids, *up, act, pairs, alpha, limit, ACTIVE=active, C=hidden, N=rows, **common)
    grid = (triton.cdiv(hidden, block_rows), pairs)
    _down[grid](act, ids, weights, *down, parts, pairs, C=rows // 2, N=hidden, **common)
    _combine[(triton.cdiv(hidden, 256), tokens)](parts, ids, out, ACTIVE=active, N=hidden, BN=256)
    return out
