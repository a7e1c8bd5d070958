"""One case per kernel: fresh random inputs, poisoned outputs, the kernel twice, all of it against the float64 oracle.

The kernel is an argument. `tests/gpu` passes the real ones; `tests/gpu/test_cases.py` passes their contracts in
torch, and broken ones, so that the cases themselves are known to work where there is no GPU.

Tolerances: bf16 has 8 bits of mantissa, so one rounding is 2^-8 of a value at most and about 1.7e-3 in norm; a result
that went through r roundings stays below r times that, one that was rounded once below `once`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import reference
from tests.support import fp8
from vllm_gptoss.engine.experts import mxfp4
from vllm_gptoss.engine.kernels import nvrtc
from vllm_gptoss.engine.kernels import step as steps
from vllm_gptoss.engine.kernels.cache import Fp8Cache, PagedCache, element
from vllm_gptoss.engine.kernels.experts import FewTokenExperts, Projection
from vllm_gptoss.engine.kernels.layer import LayerTensors, Requests

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = 1.7e-3
ONCE = 2**-9 * 1.01
CODED = 2**-5
"""Bound of `error` after rounding to e4m3, 2^-4 of a normal value at most and 0.027 in norm, after bf16."""
C, HEAD, BLOCK, BLOCKS = 2880, 64, 16, 64
ACTIVE, ALPHA, LIMIT, EPS = 4, 1.702, 7.0, 1e-5
PARALLEL = (1, 2, 4, 8)
INTERMEDIATE = (2880, 1472, 768, 384)
"""Of a rank at TP 1, 2, 4, 8: 2880 / TP, rounded up to 64 as vLLM does."""

BATCHES = (
    ([1], [1]),
    ([640], [1]),
    ([5, 130, 128, 129, 1000], [1, 4, 1, 2, 3]),
    ([2000, 37], [1, 1]),
    ([0, 50], [0, 1]),
    ([40] * 40, [1] * 15 + [0] * 25),
    ([300, 9], [8, 7]),
)
"""Keys and queries of the requests of a step; more than one query is speculative verification."""
LONG_BATCHES = (
    ([128_000], [1]),
    ([16_389], [1]),
    ([30_000, 17, 9_000, 0, 2_000], [4, 1, 2, 0, 3]),
    ([30_000] + [200] * 15, [1] * 15 + [0]),
    ([4_100] * 15, [1] * 15),
    ([70_000, 300] + [40] * 38, [1] * 13 + [0] * 27),
)
"""Of which tokens become several pieces."""
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 130, 143, 144, 145, 255, 256, 257, 1000, 4001]
"""Keys of requests, on both sides of a chunk, a cache block, the window and a warp's share."""


def ragged(tokens: int, longest: int) -> list[int]:
    """Lengths from 1 to `longest`, the same every time."""
    random = torch.Generator().manual_seed(tokens)
    return torch.randint(1, longest + 1, (tokens,), generator=random).tolist()


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def poison(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def once(wanted: Tensor) -> float:
    """Bound of `error` after one rounding: its mean, 1.65e-3, and five times its spread, 1.46e-3 / sqrt(values)."""
    return max(ONCE, ROUNDING + 7.3e-3 * wanted.numel() ** -0.5)


def same(first: Tensor, second: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return reference.rms_norm(x.double(), weight.double())


def _rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    cos, sin = cos_sin[positions].double().chunk(2, dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]], dim=-1)


def rotations(positions: int) -> Tensor:
    """32 cosines and 32 sines of random angles for each position.

    With normal numbers instead a few values outweigh the others of a key: the spread of its error after e4m3 is 1.5e-3,
    not 1.1e-3, and one correct rounding of 500 exceeds `CODED`.
    """
    angles = torch.rand(positions, HEAD // 2, device=DEVICE) * 2 * torch.pi
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def turning(tokens: int, cache_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, 32 cosines and 32 sines of each, and slots of a cache of `BLOCKS`, of which one token has none."""
    cos_sin = torch.randn(4096, HEAD, device=DEVICE).to(cache_dtype)
    positions = torch.randint(0, 4096, (tokens,), device=DEVICE)
    slots = torch.randperm(BLOCKS * BLOCK, device=DEVICE)[:tokens]
    if tokens > 1:
        slots[1] = -1
    return positions, cos_sin, slots


def _only_theirs(cache: Tensor, slots: Tensor) -> None:
    """Of the poisoned cache [blocks, K, block size, 128] only the tokens' slots are written."""
    written, theirs = int((~cache.isnan()).any(-1).sum()), int((slots >= 0).sum()) * cache.shape[1]
    assert written == theirs, "a slot that is no token's was written"


def qkv_rope(kernel: Callable[..., None], parallel: int, tokens: int, cache_dtype: torch.dtype) -> None:
    heads, kv_heads = 64 // parallel, 8 // parallel
    rows = (heads + 2 * kv_heads) * HEAD
    x, residual, weight = draw(tokens, C), draw(tokens, C), draw(rows, C, scale=C**-0.5)
    norm_weight, bias = draw(C), draw(rows)
    positions, cos_sin, slots = turning(tokens, cache_dtype)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        q, summed, cache = poison(tokens, heads * HEAD), poison(tokens, C), poison(BLOCKS, kv_heads, BLOCK, 2 * HEAD)
        kernel(x, residual, norm_weight, weight, bias, positions, cos_sin, slots, cache, q, summed, 1e-5)
        return q, summed, cache

    q, summed, cache = run()
    wanted_sum = (x.float() + residual.float()).bfloat16()
    assert torch.equal(summed, wanted_sum)
    product = _norm(wanted_sum, norm_weight) @ weight.double().T + bias.double()
    wq, wk, wv = product.split([heads * HEAD, kv_heads * HEAD, kv_heads * HEAD], dim=-1)
    wq, wk = (_rotate(t.unflatten(-1, (-1, HEAD)), cos_sin, positions) for t in (wq, wk))
    # v is rounded once, q and k once more after the rotation; more than 8 tokens also round their input
    twice = 2 * ROUNDING if tokens <= 8 else 3 * ROUNDING
    assert error(q, wq.flatten(1)) < twice
    written = slots >= 0
    at = slots[written]
    assert error(cache[at // BLOCK, :, at % BLOCK, :HEAD], wk[written]) < twice
    values = wv.unflatten(-1, (-1, HEAD))[written]
    assert error(cache[at // BLOCK, :, at % BLOCK, HEAD:], values) < (once(values) if tokens <= 8 else 2 * ROUNDING)
    _only_theirs(cache, slots)
    assert all(map(same, run(), (q, summed, cache)))


def norm(kernel: Callable[..., None], tokens: int, hidden: int) -> None:
    x, weight = draw(tokens, hidden), draw(hidden)
    for residual in (draw(tokens, hidden), None):
        out, summed, again = poison(tokens, hidden), poison(tokens, hidden), poison(tokens, hidden)
        kernel(x, residual, weight, out, summed, EPS)
        kernel(x, residual, weight, again, None, EPS)
        wanted_sum = x if residual is None else (x.float() + residual.float()).bfloat16()
        wanted = _norm(wanted_sum, weight)
        assert torch.equal(summed, wanted_sum)
        assert error(out, wanted) < once(wanted)
        assert same(out, again)


def tile(x: Tensor) -> Tensor:
    """x [T, C] in the layout of `product_many.tiled`; rows without a token are NaN."""
    tokens, columns = x.shape
    rows = poison(-(-tokens // 8) * 8, columns)
    rows[:tokens] = x
    return _swap(rows.unflatten(-1, (-1, 8, 8)).transpose(0, 1)).flatten(-2).contiguous()


def untile(x: Tensor, tokens: int) -> Tensor:
    """[T, C] of what `tile` makes."""
    return _swap(x.unflatten(-1, (8, 8))).transpose(0, 1).flatten(1)[:tokens]


def _swap(pieces: Tensor) -> Tensor:
    # [tiles, tokens, 8, 8]: piece p of token t goes to p ^ (t % 8), and back
    to = torch.arange(8, device=DEVICE) ^ (torch.arange(pieces.shape[1], device=DEVICE) % 8)[:, None]
    return pieces.gather(2, to[None, :, :, None].expand_as(pieces))


def product(kernel: Callable[..., None], rows: int, columns: int, tokens: int, biased: bool = True) -> None:
    x, weight, bias = draw(tokens, columns), draw(rows, columns, scale=columns**-0.5), draw(rows) if biased else None
    wanted, tiled = x.double() @ weight.double().T + (0 if bias is None else bias.double()), tile(x)
    out, again = poison(tokens, rows), poison(tokens, rows)
    for to in (out, again):
        kernel(tiled, weight, bias, to)
    assert error(out, wanted) < once(wanted)
    assert same(out, again)


def rope(kernel: Callable[..., None], parallel: int, tokens: int, cache_dtype: torch.dtype) -> None:
    heads, kv_heads = 64 // parallel, 8 // parallel
    qkv = draw(tokens, (heads + 2 * kv_heads) * HEAD)
    positions, cos_sin, slots = turning(tokens, cache_dtype)

    def run() -> tuple[Tensor, Tensor]:
        mine, cache = qkv.clone(), poison(BLOCKS, kv_heads, BLOCK, 2 * HEAD)
        kernel(mine, positions, cos_sin, slots, cache)
        return mine[:, : heads * HEAD], cache

    q, cache = run()
    wq, wk, wv = (
        part.double().unflatten(-1, (-1, HEAD))
        for part in qkv.split([heads * HEAD, kv_heads * HEAD, kv_heads * HEAD], dim=-1)
    )
    wq, wk = (_rotate(part, cos_sin, positions) for part in (wq, wk))
    assert error(q, wq.flatten(1)) < once(wq)
    written = slots >= 0
    at = slots[written]
    assert error(cache[at // BLOCK, :, at % BLOCK, :HEAD], wk[written]) < once(wk[written])
    assert torch.equal(cache[at // BLOCK, :, at % BLOCK, HEAD:], wv[written].bfloat16())
    _only_theirs(cache, slots)
    assert all(map(same, run(), (q, cache)))


def rotated(
    kernel: Callable[..., None],
    apart: tuple[Callable[..., None], Callable[..., None]],
    parallel: int,
    tokens: int,
    cache_dtype: torch.dtype,
    strided: bool,
) -> None:
    """The q/k/v product with RoPE and the cache write, bitwise equal to a separate product and RoPE (`apart`)."""
    heads, kv_heads = 64 // parallel, 8 // parallel
    rows = (heads + 2 * kv_heads) * HEAD
    x, weight, bias = tile(draw(tokens, C)), draw(rows, C, scale=C**-0.5), draw(rows)
    positions, cos_sin, slots = turning(tokens, cache_dtype)

    def outputs() -> tuple[Tensor, Tensor]:
        shape = (BLOCKS, BLOCK, kv_heads) if strided else (BLOCKS, kv_heads, BLOCK)
        cache = poison(*shape, 2 * HEAD)
        return poison(tokens, rows), cache.transpose(1, 2) if strided else cache

    wanted, wanted_cache = outputs()
    apart[0](x, weight, bias, wanted)
    apart[1](wanted, positions, cos_sin, slots, wanted_cache)
    for _ in range(2):
        out, cache = outputs()
        kernel(x, weight, bias, out, positions, cos_sin, slots, cache)
        assert not out[:, : heads * HEAD].isnan().any()
        assert same(out[:, : heads * HEAD], wanted[:, : heads * HEAD])
        assert same(cache, wanted_cache)
        _only_theirs(cache, slots)


def coded(run: Callable[[PagedCache], Tensor], parallel: int, scales: tuple[float, float]) -> None:
    """A kernel that writes the cache. run: gives it a cache and returns its queries.

    Codes are those of what it writes in bf16; NaN, the poison of both, is NaN in both. Queries are equal to the bit.
    """
    kv_heads = 8 // parallel
    plain = poison(BLOCKS, kv_heads, BLOCK, 2 * HEAD)
    queries = run(plain)
    k_scale, v_scale = (torch.tensor(scale, device=DEVICE) for scale in scales)
    for _ in range(2):
        cache = Fp8Cache(torch.full(plain.shape, fp8.NAN, dtype=torch.uint8, device=DEVICE), k_scale, v_scale)
        assert same(run(cache), queries)
        wrong = int((cache.tensor != fp8.codes(plain, k_scale, v_scale)).sum())
        assert not wrong, f"{wrong} of {int((~plain.isnan()).sum())} codes"


def out_proj(kernel: Callable[..., None], parallel: int, tokens: int) -> None:
    columns = 4096 // parallel
    x, weight, bias = draw(tokens, columns), draw(C, columns, scale=columns**-0.5), draw(C)
    residual = draw(tokens, C)
    # alone; rank 0 of several; another rank
    for use_bias, use_residual in ((True, True), (True, False), (False, False)):
        out, again = poison(tokens, C), poison(tokens, C)
        for to in (out, again):
            kernel(x, weight, bias if use_bias else None, residual if use_residual else None, to)
        wanted = x.double() @ weight.double().T + use_bias * bias.double() + use_residual * residual.double()
        assert error(out, wanted) < 2 * ROUNDING
        assert same(out, again)


def router(kernel: Callable[..., None], experts: int, tokens: int) -> None:
    x, residual, norm_weight = draw(tokens, C), draw(tokens, C), draw(C)
    weight, bias = draw(experts, C, scale=C**-0.5), draw(experts)

    def run() -> tuple[Tensor, ...]:
        normed, summed = poison(tokens, C), poison(tokens, C)
        weights, logits = poison(tokens, 4, dtype=torch.float32), poison(tokens, experts, dtype=torch.float32)
        ids = torch.full((tokens, 4), -1, device=DEVICE, dtype=torch.int32)
        kernel(x, residual, norm_weight, weight, bias, normed, weights, ids, 1e-5, summed, logits)
        return normed, summed, weights, logits, ids

    normed, summed, weights, logits, ids = outputs = run()
    wanted_sum = (x.float() + residual.float()).bfloat16()
    wanted = _norm(wanted_sum, norm_weight)
    assert torch.equal(summed, wanted_sum)
    assert error(normed, wanted) < once(wanted)
    assert error(logits, wanted @ weight.double().T + bias.double()) < 2e-5, "the input is no bfloat16: 16 bits of it"
    best, best_ids = logits.double().topk(4, dim=-1)
    assert torch.equal(ids.long(), best_ids)
    # fast exp and division: 2 ulp each of float32
    torch.testing.assert_close(weights.double(), best.softmax(-1), rtol=1e-6, atol=0)
    assert all(map(same, run(), outputs))


def _attended(q: Tensor, cached: Tensor, blocks: Tensor, keys: int, sinks: Tensor, window: int) -> Tensor:
    """float64 attention of the last queries [T, H, 64] of a request over its `keys` in the cache [*, K, block, 128]."""
    at, block = torch.arange(keys, device=DEVICE), cached.shape[2]
    k, v = cached[blocks[at // block].long(), :, at % block].double().split(HEAD, dim=-1)
    return reference.sink_attention(q.double(), k, v, sinks.double(), window=window or None)


def attention(
    kernel: Callable[..., None],
    kv_heads: int,
    window: int,
    lengths: list[int],
    queries: list[int],
    strided: bool,
    block: int = BLOCK,
    scales: tuple[float, float] | None = None,
) -> None:
    """scales: of keys and values of a cache of e4m3 codes. A query is divided by the scale, so that scores are as
    usual; outputs are compared in units of it."""
    heads, requests, tokens = kv_heads * 8, len(lengths), sum(queries) + 1  # the last token is padding
    blocks = 512
    drawn = draw(blocks, block, kv_heads, 128).transpose(1, 2) if strided else draw(blocks, kv_heads, block, 128)
    cache = fp8.cache_of(drawn, scales)
    cached, by = fp8.values(cache), 1.0 if scales is None else 1 / scales[0]
    width = max(lengths) // block + 2
    table = torch.randint(0, blocks, (requests, width), device=DEVICE, dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], device=DEVICE, dtype=torch.int32)
    q, sinks = draw(tokens, heads * HEAD, scale=2.0 * by), draw(heads)
    lens = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    out, again = poison(tokens, heads * HEAD), poison(tokens, heads * HEAD)
    for to in (out, again):
        kernel(q, cache, sinks, table, lens, starts, to, HEAD**-0.5, window)

    wanted = torch.zeros(tokens, heads, HEAD, device=DEVICE, dtype=torch.float64)
    for request, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        if not count:
            continue
        mine = slice(int(starts[request]), int(starts[request]) + count)
        wanted[mine] = _attended(q[mine].unflatten(-1, (heads, HEAD)), cached, table[request], length, sinks, window)
    # probabilities and the output are rounded once each
    assert error(out, wanted.flatten(1)) < 2 * ROUNDING
    assert not out[-1].any()
    assert same(out, again)


def attention_in_a_graph(
    kernel: Callable[..., None],
    kv_heads: int,
    window: int,
    steps: Sequence[Sequence[int]],
    each: int = 1,
    scales: tuple[float, float] | None = None,
) -> None:
    """A graph captured with 576 keys a request, replayed with the lengths of each step; 0: no request. each: tokens of
    a request."""
    requests, heads, blocks = len(steps[0]), kv_heads * 8, 4096
    tokens = requests * each
    cache = fp8.cache_of(draw(blocks, kv_heads, BLOCK, 2 * HEAD), scales)
    cached = fp8.values(cache)
    table = torch.randint(0, blocks, (requests, 20_000 // BLOCK), device=DEVICE, dtype=torch.int32)
    q, sinks, out = draw(tokens, heads * HEAD, scale=2.0), draw(heads), poison(tokens, heads * HEAD)
    lens = torch.full((requests,), 576, device=DEVICE, dtype=torch.int32)
    starts = torch.arange(requests + 1, device=DEVICE, dtype=torch.int32) * each

    def run(to: Tensor) -> None:
        kernel(q, cache, sinks, table, lens, starts, to, HEAD**-0.5, window)

    run(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out)
    for now in steps:
        present = sum(length > 0 for length in now)
        lens.copy_(torch.tensor(now))
        starts.copy_(torch.arange(requests + 1).clamp_max(present) * each)
        out.fill_(float("nan"))
        graph.replay()
        wanted = torch.zeros(tokens, heads, HEAD, device=DEVICE, dtype=torch.float64)
        for request, length in enumerate(now[:present]):
            mine = slice(request * each, (request + 1) * each)
            queries = q[mine].unflatten(-1, (heads, HEAD))
            wanted[mine] = _attended(queries, cached, table[request], length, sinks, window)
        assert error(out, wanted.flatten(1)) < 2 * ROUNDING
        assert not out[present * each :].any()
        for _ in range(5):
            again = poison(tokens, heads * HEAD)
            run(again)
            assert same(out, again)


class Weights:
    """One projection of all experts: the checkpoint's bytes, and the same as the sm90 kernels read them.

    blocks: [E, N, C/2] u8; scales: [E, N, C/32] u8; bias: [E, N] f32.
    """

    def __init__(self, count: int, rows: int, columns: int, seed: int) -> None:
        g = torch.Generator(device=DEVICE).manual_seed(seed)
        size = (count, rows, columns // 2)
        self.blocks = torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE, generator=g)
        size = (count, rows, columns // 32)
        self.scales = torch.randint(113, 122, size, dtype=torch.uint8, device=DEVICE, generator=g)
        bias = torch.randn(count, rows, device=DEVICE, generator=g).bfloat16().float()
        values = torch.cat([mxfp4.hopper_values(self.blocks[e : e + 1]) for e in range(count)])
        self.projection = Projection(values, mxfp4.hopper_scales(self.scales), bias)

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """(weight [1, N, C], bias [1, N]) of one expert in float64."""
        blocks = self.blocks[expert].unflatten(-1, (-1, 16))
        weight = reference.mxfp4_dequantise(blocks, self.scales[expert], torch.float64)
        return weight[None], self.projection.bias[expert, None].double()


def layer(count: int, intermediate: int, hidden: int = C) -> tuple[Weights, Weights]:
    """Up and down projections of one rank."""
    return Weights(count, 2 * intermediate, hidden, 1), Weights(count, hidden, intermediate, 2)


EXPERT_SHAPES = [
    (32, 2880, 2880, 4),
    (128, 2880, 2880, 4),
    (24, 2880, 2880, 4),
    (64, 1024, 2048, 8),
    (32, 1472, 2880, 4),
    (128, 384, 2880, 4),
]
"""Experts, intermediate, hidden, active: 20b, 120b, odd ones, ranks of TP 2 and TP 8."""

Kernels = tuple[FewTokenExperts, Weights, Weights]


def kernels(count: int, intermediate: int, hidden: int, active: int) -> Kernels:
    """The kernels of a layer, and the weights that they read."""
    torch.cuda.empty_cache()
    up, down = layer(count, intermediate, hidden)
    return FewTokenExperts(up.projection, down.projection, active, count, alpha=ALPHA, limit=LIMIT), up, down


def experts_oracle(x: Tensor, ids: Tensor, weights: Tensor, up: Weights, down: Weights) -> Tensor:
    """`reference.experts_forward` in float64, one expert at a time, for the 120b's do not fit; ids -1 are skipped."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, choice = torch.where(ids == expert)
        only = torch.zeros(len(token), 1, dtype=torch.int64, device=x.device)
        weight = weights[token, choice, None].double()
        found = reference.experts_forward(
            x[token].double(), weight, only, *up.of(expert), *down.of(expert), limit=LIMIT
        )
        out.index_add_(0, token, found)
    return out


def experts_close(out: Tensor, wanted: Tensor, what: object = "") -> None:
    # three roundings, of the activation, a choice's and the output, independent: 1.7e-3 x sqrt(3) in norm
    assert error(out, wanted) < 2**-8, what


def run_experts(module: Any, x: Tensor, routing: Tensor, weights: Tensor | None) -> Tensor:
    out = poison(*x.shape)
    module(x, routing, weights, out)
    if x.is_cuda:
        torch.cuda.synchronize()
    return out


def experts(module: Any, up: Weights, down: Weights, most: int, skewed: bool) -> None:
    """Every batch from 1 to `most` tokens, ids of both widths, four runs each."""
    count, hidden = up.blocks.shape[0], down.blocks.shape[1]
    pool = ACTIVE if skewed else count
    x = draw(most, hidden)
    ids = torch.stack([torch.randperm(pool, device=DEVICE)[:ACTIVE] for _ in range(most)])
    weights = torch.rand(most, ACTIVE, device=DEVICE)
    wanted = experts_oracle(x, ids, weights, up, down)
    for tokens in range(1, most + 1):
        part = (x[:tokens].clone(), ids[:tokens].int(), weights[:tokens].clone())
        out = run_experts(module, *part)
        experts_close(out, wanted[:tokens], tokens)
        assert same(out, run_experts(module, part[0], ids[:tokens].clone(), part[2])), tokens
        for _ in range(2):
            assert same(out, run_experts(module, *part)), tokens


ROUTINGS = ("uniform", "four", "half", "zipf")
"""Evenly; all tokens to the same experts; half of them to one; experts as often as one over their rank."""


def routing_logits(tokens: int, count: int, active: int, routed: str) -> Tensor:
    """Router logits [T, E] bf16 of a routing of `ROUTINGS`."""
    logits = -torch.log(-torch.log(torch.rand(tokens, count, device=DEVICE).clamp(1e-9, 1 - 1e-7)))
    order = torch.randperm(count, device=DEVICE)
    if routed == "four":
        logits[:, order[:active]] += 30
    elif routed == "half":
        logits[: tokens // 2, order[0]] += 30
    elif routed == "zipf":
        logits[:, order] -= torch.arange(1, count + 1, device=DEVICE).log()
    return logits.bfloat16()


def experts_by_routing(module: Any, up: Weights, down: Weights, tokens: int, routed: str) -> None:
    """One batch by logits of a routing, five times, each token against the oracle."""
    count, hidden = up.blocks.shape[0], down.blocks.shape[1]
    x, logits = draw(tokens, hidden), routing_logits(tokens, count, module.active, routed)
    # ties fall to the lower expert here and to nothing in particular in torch.topk
    order = logits.double() - torch.arange(count, device=DEVICE).double() * 1e-9
    ids = order.topk(module.active)[1]
    wanted = experts_oracle(x, ids, logits.double().gather(1, ids).softmax(-1).float(), up, down)
    out = run_experts(module, x, logits, None)
    experts_close(out, wanted, (tokens, routed))
    worst = ((out.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max()
    assert worst < 2**-7, (tokens, routed)
    for _ in range(4):
        assert same(out, run_experts(module, x, logits, None)), (tokens, routed)


def experts_by_logits(module: Any, up: Weights, down: Weights, tokens: int, dtype: torch.dtype) -> None:
    """Router logits instead of ids: the best four, softmax over them."""
    count, hidden = up.blocks.shape[0], down.blocks.shape[1]
    x = draw(tokens, hidden)
    # Distinct values: ties are broken by index here and by nothing in particular in torch.topk.
    logits = torch.stack([torch.randperm(count, device=DEVICE) for _ in range(tokens)]).to(dtype) / 16 - 1
    top, ids = logits.float().topk(ACTIVE)
    experts_close(run_experts(module, x, logits, None), experts_oracle(x, ids, top.softmax(-1), up, down))


def experts_of_a_rank(
    made: Callable[[FewTokenExperts], Any], up: Weights, down: Weights, tokens: int, active: int = ACTIVE
) -> Any:
    """A rank with the second half of the experts sums only its own. made: the kernels of the mapped layer; returned."""
    count = up.blocks.shape[0]
    mapping = torch.full((2 * count,), -1, dtype=torch.int32, device=DEVICE)
    mapping[count:] = torch.arange(count, dtype=torch.int32, device=DEVICE)
    mapped = FewTokenExperts(
        up.projection, down.projection, active, 2 * count, alpha=ALPHA, limit=LIMIT, expert_map=mapping
    )
    x = draw(tokens, down.blocks.shape[1])
    ids = torch.stack([torch.randperm(2 * count, device=DEVICE)[:active] for _ in range(tokens)])
    ids[0] = torch.arange(active)  # a token with no expert here
    weights = torch.rand(tokens, active, device=DEVICE)
    module = made(mapped)
    out = run_experts(module, x, ids.int(), weights)
    experts_close(out, experts_oracle(x, mapping[ids].long(), weights, up, down))
    assert not out[0].any()
    return module


def experts_in_a_graph(module: Any, up: Weights, down: Weights, tokens: int) -> None:
    """A graph of three launches replays on new inputs."""
    x = draw(tokens, down.blocks.shape[1])
    logits = torch.randn(tokens, up.blocks.shape[0], device=DEVICE).bfloat16()
    out = torch.empty_like(x)
    module(x, logits, None, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            module(x, logits, None, out)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits))
        wanted = run_experts(module, x, logits, None)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same(out, wanted)


def filled_cache(blocks: int, block: int = BLOCK, strided: bool = False) -> Tensor:
    cache = draw(blocks, block, 8, 2 * HEAD) if strided else draw(blocks, 8, block, 2 * HEAD)
    return cache.transpose(1, 2) if strided else cache


def layer_tensors(up: Weights, down: Weights, cos_sin: Tensor, *, window: int = 0) -> LayerTensors:
    """A layer of the whole model around the experts `up` and `down`."""
    experts, heads, kv_heads = up.blocks.shape[0], 64, 8
    return LayerTensors(
        norm=draw(C),
        qkv_weight=draw((heads + 2 * kv_heads) * HEAD, C, scale=C**-0.5),
        qkv_bias=draw((heads + 2 * kv_heads) * HEAD),
        out_weight=draw(C, heads * HEAD, scale=1 / 64),
        out_bias=draw(C),
        post_norm=draw(C),
        router_weight=draw(experts, C, scale=C**-0.5),
        router_bias=draw(experts),
        cos_sin=cos_sin,
        sinks=draw(heads),
        window=window,
        active=ACTIVE,
        experts=FewTokenExperts(up.projection, down.projection, ACTIVE, experts, alpha=ALPHA, limit=LIMIT),
    )


def decoding(table: Tensor, lens: Tensor, each: int = 1) -> tuple[Requests, Tensor]:
    """Requests that decode `each` tokens, with their blocks [R, *] and keys [R], int32; and positions [R * each]."""
    count = len(lens)
    positions = (lens[:, None] - each + torch.arange(each, device=DEVICE)).flatten().long()
    owner = torch.arange(count, device=DEVICE).repeat_interleave(each)
    slots = table[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
    starts = torch.arange(count + 1, device=DEVICE, dtype=torch.int32) * each
    return Requests(table, lens, starts, slots), positions


def alike_in_a_graph(run: Callable[[], tuple[Tensor, ...]], monkeypatch: Any) -> None:
    """`run` in a graph, replayed, gives what its launches give one by one, to the bit."""

    def one_by_one(self: nvrtc.Kernel, *arguments: Any, **options: Any) -> None:
        launch(self, *arguments, **options)
        torch.cuda.synchronize()

    launch = nvrtc.Kernel.__call__
    with monkeypatch.context() as patched:
        patched.setattr(nvrtc.Kernel, "__call__", one_by_one)
        wanted = [each.clone() for each in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, got, wanted))
        assert all(map(same, got, wanted))


def request_of(keys: int, blocks: int, block: int = BLOCK) -> Requests:
    """One request that decodes its token number `keys`, in blocks of no order."""
    table = torch.randperm(blocks, device=DEVICE)[None, : -(-keys // block)].int()
    last = keys - 1
    return Requests(
        table,
        torch.tensor([keys], device=DEVICE, dtype=torch.int32),
        torch.tensor([0, 1], device=DEVICE, dtype=torch.int32),
        table[0, last // block].long()[None] * block + last % block,
    )


def step(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    up: Weights,
    down: Weights,
    keys: int,
    *,
    window: int = 0,
    block: int = BLOCK,
    strided: bool = False,
    first: bool = False,
    scales: tuple[float, float] | None = None,
) -> None:
    """One layer in one launch: kernel(layers, caches, x, residual, positions, requests): experts, hidden.

    scales: of keys and values of a cache of e4m3 codes.
    """
    blocks, cos_sin, x = -(-keys // block) + 3, rotations(keys + 1), draw(1, C)
    layer = layer_tensors(up, down, cos_sin, window=window)
    cache = fp8.cache_of(filled_cache(blocks, block, strided), scales)
    requests = request_of(keys, blocks, block)
    residual = None if first else draw(1, C)
    positions = torch.tensor([keys - 1], device=DEVICE)
    stored = cache.tensor if isinstance(cache, Fp8Cache) else cache
    before = stored.clone()
    out, hidden = kernel([layer], [cache], x, residual, positions, requests)

    summed = x if residual is None else (x.float() + residual.float()).bfloat16()
    product = _norm(summed, layer.norm) @ layer.qkv_weight.double().T + layer.qkv_bias.double()
    q, k, v = product.split([64 * HEAD, 8 * HEAD, 8 * HEAD], dim=-1)
    q, k = (_rotate(t.unflatten(-1, (-1, HEAD)), cos_sin, positions) for t in (q, k))
    at = int(requests.slots[0])
    cached = fp8.values(cache)
    written = cached[at // block, :, at % block]
    assert (found := error(written[:, :HEAD], k[0])) < (2 * ROUNDING if scales is None else CODED), found
    values = v.unflatten(-1, (-1, HEAD))[0]
    assert (found := error(written[:, HEAD:], values)) < (once(values) if scales is None else CODED), found
    before[at // block, :, at % block] = stored[at // block, :, at % block]
    assert same(before, stored), "a slot that is not the token's was written"
    attended = _attended(q, cached, requests.block_table[0], keys, layer.sinks, window)
    wanted = summed.double() + attended.flatten(1) @ layer.out_weight.double().T + layer.out_bias.double()
    assert error(hidden, wanted) < 2 * ROUNDING

    normed = _norm(hidden, layer.post_norm)
    top, ids = (normed @ layer.router_weight.double().T + layer.router_bias.double()).topk(ACTIVE)
    # the experts read the norm rounded to bf16: one rounding more than `experts_close` knows of
    assert error(out, experts_oracle(normed, ids, top.softmax(-1), up, down)) < 2**-7
    for got, again in zip((out, hidden), kernel([layer], [cache], x, residual, positions, requests), strict=True):
        assert same(got, again)


def run_step(
    layers: list[LayerTensors],
    caches: list[PagedCache],
    x: Tensor,
    residual: Tensor | None,
    positions: Tensor,
    requests: Requests,
) -> tuple[Tensor, Tensor]:
    """The real kernel, for `step`: all layers in one launch."""
    made = steps.Step(layers, eps=EPS, element=element(caches[0]))
    table = made.table([0] * len(layers), caches)
    assert table is not None
    result: tuple[Tensor, Tensor] = made(x, residual, positions, [requests], table)
    return result
