"""The small gpt-oss for training: plain torch, batched, fp32, with the rounding that serving adds.

Axis letters: B sequences, T tokens, H hidden, Q query heads, K key/value heads, D head size, E experts, I intermediate,
V rows of the used vocabulary. Same arithmetic as transformers' `GptOssForCausalLM`; tests/demo compares them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

FULL_VOCABULARY = 201_088


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the small model; what is not here is as in openai/gpt-oss-20b."""

    hidden: int = 96
    intermediate: int = 96
    layers: int = 4
    experts: int = 8
    active: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 128
    theta: float = 150_000.0
    factor: float = 32.0
    original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    alpha: float = 1.702
    limit: float = 7.0
    eps: float = 1e-5


def yarn(shape: Shape) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] and the factor on cos and sin (YaRN, arXiv 2309.00071, not truncated)."""
    half = shape.head_dim // 2
    freq = shape.theta ** (torch.arange(0, half, dtype=torch.float64) / half)

    def at(rotations: float) -> float:
        return half * math.log(shape.original / (rotations * 2 * math.pi)) / math.log(shape.theta)

    low, high = max(at(shape.beta_fast), 0), min(at(shape.beta_slow), shape.head_dim - 1)
    ramp = ((torch.arange(half, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    inverse = 1 / (shape.factor * freq) * ramp + 1 / freq * (1 - ramp)
    return inverse.float(), 0.1 * math.log(shape.factor) + 1


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., C], C a multiple of 32 -> codes u8 [..., C] (sign bit 3, magnitude 0..7), exponents i32 [..., C/32].

    The exponent is the smallest for which the group's largest magnitude stays below 7 units (it then rounds to 6).
    """
    groups = weight.detach().float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1).clamp(min=2.0**-120)
    exponent = torch.ceil(torch.log2(largest / 7)).int()
    units = torch.ldexp(groups, -exponent[..., None])
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    magnitude = torch.bucketize(units.abs().contiguous(), bounds)
    codes = magnitude + 8 * (units < 0)
    return codes.flatten(-2).to(torch.uint8), exponent


def mxfp4_values(codes: Tensor, exponent: Tensor) -> Tensor:
    """Inverse of `mxfp4_codes`: f32 [..., C]."""
    table = torch.tensor([*_FP4, *(-v for v in _FP4)], device=codes.device)
    return torch.ldexp(table[codes.int()].unflatten(-1, (-1, 32)), exponent[..., None]).flatten(-2)


def _through(weight: Tensor, rounded: Tensor) -> Tensor:
    return weight + (rounded - weight).detach()


class Block(nn.Module):
    """Attention with sinks and a mixture of experts."""

    def __init__(self, shape: Shape, window: bool) -> None:
        super().__init__()
        self.shape, self.window = shape, window
        h, i, e, d = shape.hidden, shape.intermediate, shape.experts, shape.head_dim
        self.norm1, self.norm2 = nn.Parameter(torch.ones(h)), nn.Parameter(torch.ones(h))
        self.q, self.o = nn.Linear(h, shape.heads * d), nn.Linear(shape.heads * d, h)
        self.k, self.v = nn.Linear(h, shape.kv_heads * d), nn.Linear(h, shape.kv_heads * d)
        self.sinks = nn.Parameter(torch.zeros(shape.heads))
        self.router = nn.Linear(h, e)
        self.gate_up = nn.Parameter(torch.randn(e, 2 * i, h) / math.sqrt(h))  # rows gate, up, gate, up, ...
        self.gate_up_bias = nn.Parameter(torch.zeros(e, 2 * i))
        self.down = nn.Parameter(torch.randn(e, h, i) / math.sqrt(i) * 0.5)
        self.down_bias = nn.Parameter(torch.zeros(e, h))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x [B, T, H], cos and sin [T, D/2], mask [T, T] (True where not seen) -> [B, T, H]."""
        b, t, _ = x.shape
        s = self.shape
        q = _rotate(self.q(x).view(b, t, s.heads, s.head_dim), cos, sin).transpose(1, 2)
        k = _rotate(self.k(x).view(b, t, s.kv_heads, s.head_dim), cos, sin).transpose(1, 2)
        v = self.v(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
        k, v = (a.repeat_interleave(s.heads // s.kv_heads, 1) for a in (k, v))
        scores = (q @ k.transpose(-1, -2)) * s.head_dim**-0.5
        scores = scores.masked_fill(mask, float("-inf"))
        scores = torch.cat([scores, self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)], -1)
        out = scores.softmax(-1)[..., :-1] @ v
        return self.o(out.transpose(1, 2).reshape(b, t, -1))

    def experts(self, x: Tensor, quantized: bool) -> Tensor:
        """x [N, H] -> [N, H]: every expert for every token, weighted by the router's softmax over the active ones."""
        s = self.shape
        top, chosen = self.router(x).topk(s.active, -1)
        weight = torch.zeros(x.shape[0], s.experts, device=x.device).scatter(1, chosen, top.softmax(-1))
        gate_up, down = self.gate_up, self.down
        if quantized:
            gate_up = _through(gate_up, mxfp4_values(*mxfp4_codes(gate_up)))
            down = _through(down, mxfp4_values(*mxfp4_codes(down)))
        hidden = (x @ gate_up.flatten(0, 1).T).view(-1, s.experts, 2 * s.intermediate) + self.gate_up_bias
        gate = hidden[..., ::2].clamp(max=s.limit)
        up = hidden[..., 1::2].clamp(-s.limit, s.limit)
        active = (up + 1) * gate * torch.sigmoid(s.alpha * gate) * weight[..., None]
        out: Tensor = active.flatten(1) @ down.transpose(1, 2).flatten(0, 1) + weight @ self.down_bias
        return out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, masks: tuple[Tensor, Tensor], serving: bool) -> Tensor:
        """x [B, T, H]; `serving` rounds as serving does: bf16 residuals, MXFP4 experts."""
        x = _bf16(x + self.attention(rms(x, self.norm1, self.shape.eps), cos, sin, masks[self.window]), serving)
        y = rms(x, self.norm2, self.shape.eps)
        return _bf16(x + self.experts(y.flatten(0, 1), serving).view_as(x), serving)


class SmallGptOss(nn.Module):
    """The model over `used` rows plus one row for every other token; the head knows `outputs` rows only."""

    def __init__(self, shape: Shape, used: int, outputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(used + 1, shape.hidden))
        self.head = nn.Parameter(torch.randn(outputs, shape.hidden) * 0.05)
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.blocks = nn.ModuleList(Block(shape, window=layer % 2 == 0) for layer in range(shape.layers))
        inverse, self.amplitude = yarn(shape)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, rows: Tensor, serving: bool) -> Tensor:
        """rows [B, T] int -> hidden states after the last norm [B, T, H]."""
        t = rows.shape[1]
        at = torch.arange(t, device=rows.device)
        angle = at[:, None].float() * self.inverse
        cos, sin = angle.cos() * self.amplitude, angle.sin() * self.amplitude
        distance = at[:, None] - at[None, :]
        unseen = distance < 0
        masks = (unseen, unseen | (distance >= self.shape.window))
        x = _bf16(self.embedding[rows], serving)
        for block in self.blocks:
            x = block(x, cos, sin, masks, serving)
        return rms(x, self.norm, self.shape.eps)

    def log_probability(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """hidden [N, H], wanted [N] rows of the head -> log probability over the full vocabulary [N].

        Tokens that are never generated have a zero row in the head, so each adds exp(0) to the sum.
        """
        logits = hidden @ self.head.T
        rest = math.log(FULL_VOCABULARY - self.head.shape[0])
        total = torch.logaddexp(logits.logsumexp(-1), torch.full_like(logits[:, 0], rest))
        return logits.gather(1, wanted[:, None])[:, 0] - total

    def describe(self) -> dict[str, Any]:
        """The shape as plain values."""
        return asdict(self.shape)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _bf16(x: Tensor, on: bool) -> Tensor:
    return _through(x, x.bfloat16().float()) if on else x


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, D], halves rotated against each other (NeoX order)."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
