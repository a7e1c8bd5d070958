"""The oracle itself, against transformers, against exact arithmetic, and against formulas written a second way."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import reference
from benchmarks.model_config import Yarn
from tests.support import mxfp4, tiny, whole_model
from vllm_gptoss.engine import spec

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
EPS32 = 2.0**-24  # float32 rounds by at most this, relatively


# MXFP4


def exact_value(code: int, scale: int) -> Fraction:
    magnitude = E2M1[code & 7] * Fraction(2) ** (scale - 127)
    return -magnitude if code & 8 else magnitude


def test_every_byte_at_every_scale_dequantises_exactly() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    blocks = every_byte.expand(256, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    values = reference.mxfp4_dequantise(blocks, scales, torch.float64)
    assert values[255].isnan().all(), "e8m0 255 is NaN"
    for scale in range(255):
        row = values[scale].tolist()
        for byte in range(256):
            low, high = row[2 * byte : 2 * byte + 2]
            assert Fraction(low) == exact_value(byte & 15, scale), (byte, scale)
            assert Fraction(high) == exact_value(byte >> 4, scale), (byte, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_dtypes_hold_every_finite_value_up_to_scale_252(dtype: torch.dtype) -> None:
    """6 x 2^(252 - 127) < 2^128; e2m1 needs one mantissa bit. Below 2^-126 bfloat16 and float32 are subnormal. The
    smallest value of scale 1 is 2^-127, which both bfloat16 (down to 2^-133) and float32 can represent."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).expand(252, 16, 16).contiguous()
    scales = torch.arange(1, 253, dtype=torch.uint8)[:, None].expand(252, 16).contiguous()
    exact = reference.mxfp4_dequantise(blocks, scales, torch.float64)
    assert torch.equal(reference.mxfp4_dequantise(blocks, scales, dtype).double(), exact)


def test_dequantisation_equals_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 3, 16), generator=rng, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 64, 3), generator=rng, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16)
    ours = reference.mxfp4_dequantise(blocks, scales, torch.bfloat16)
    assert torch.equal(theirs.mT, ours)


def test_packing_puts_the_even_index_in_the_low_nibble() -> None:
    codes = torch.arange(32, dtype=torch.uint8) % 16
    blocks = mxfp4.pack(codes)
    assert blocks.shape == (1, 16)
    assert blocks[0, 0].item() == 0x10
    assert torch.equal(reference.mxfp4_unpack(blocks), codes)


def test_packing_round_trips_every_byte() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(4, 4, 16)
    assert torch.equal(mxfp4.pack(reference.mxfp4_unpack(blocks)), blocks)


def test_quantising_a_representable_tensor_gives_it_back() -> None:
    rng = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (8, 4, 16), generator=rng, dtype=torch.uint8)
    scales = torch.randint(2, 250, (8, 4), generator=rng, dtype=torch.uint8)
    values = reference.mxfp4_dequantise(blocks, scales, torch.float64)
    again = reference.mxfp4_dequantise(*mxfp4.quantise(values), torch.float64)
    assert torch.equal(again, values)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, allow_subnormal=False, width=32), min_size=32, max_size=32))
def test_quantisation_rounds_to_nearest_even_and_saturates(values: list[float]) -> None:
    blocks, scales = mxfp4.quantise(torch.tensor(values, dtype=torch.float64))
    codes = reference.mxfp4_unpack(blocks).tolist()
    scale = Fraction(2) ** (scales.item() - 127)
    for value, code in zip(values, codes, strict=True):
        target = min(abs(Fraction(value)) / scale, E2M1[7])
        distance = [abs(target - candidate) for candidate in E2M1]
        best = [i for i, d in enumerate(distance) if d == min(distance)]
        chosen = next(i for i in best if len(best) == 1 or i % 2 == 0)
        assert code & 7 == chosen, (value, scale)
        if value:
            assert (code >= 8) == (value < 0)


def test_the_largest_value_keeps_its_binade() -> None:
    """MX §6.3: the scale puts the largest magnitude into [4, 8), so it is off by at most a quarter (8 -> 6)."""
    for largest in (4.0, 5.0, 6.0, 7.99, 8.0, 2.0**-100, 3.0e38):
        x = torch.zeros(32, dtype=torch.float64)
        x[3] = largest
        _, scales = mxfp4.quantise(x)
        assert 4 <= largest / 2.0 ** (scales.item() - 127) < 8


# RoPE


def yarn_by_hand(position: int, pair: int, yarn: Yarn, head_size: int) -> float:
    """The angle in float64, written from arXiv:2309.00071 §3.2: gamma over the ratio of context to wavelength."""
    frequency = yarn.theta ** (-2 * pair / head_size)

    def pair_of(turns: float) -> float:
        wavelength = yarn.original_context / turns
        return head_size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(yarn.theta))

    kept = 1 - min(1.0, max(0.0, (pair - pair_of(32.0)) / (pair_of(1.0) - pair_of(32.0))))
    return position * (kept * frequency + (1 - kept) * frequency / yarn.factor)


@pytest.mark.parametrize("position", [0, 1, 127, 128, 4095, 4096, 131071])
def test_rope_angles_at_long_positions(position: int) -> None:
    yarn, head = Yarn(), 64
    x = torch.zeros(1, 1, head, dtype=torch.float64)
    x[..., : head // 2] = 1.0
    out = reference.rope(x, torch.tensor([position]), yarn)[0, 0] / yarn.concentration
    for pair in range(head // 2):
        angle = yarn_by_hand(position, pair, yarn, head)
        # float64 angles up to 131071 rad carry 131071 x 2^-53 x a few = 1e-10 rad.
        assert out[pair].item() == pytest.approx(math.cos(angle), abs=1e-9)
        assert out[pair + head // 2].item() == pytest.approx(math.sin(angle), abs=1e-9)


@pytest.mark.parametrize("position", [4096, 131071])
def test_rope_equals_transformers_at_long_positions(position: int) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding, apply_rotary_pos_emb

    # transformers uses True for `truncate` if rope_parameters omits it. The default config has False, as gpt-oss.
    rotary = GptOssRotaryEmbedding(GptOssConfig(num_hidden_layers=1, num_local_experts=2))
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 1, 64, generator=rng) for _ in range(2))
    cos, sin = rotary(q, torch.tensor([[position]]))
    theirs, _ = apply_rotary_pos_emb(q, k, cos, sin)
    ours = reference.rope(q[0].transpose(0, 1), torch.tensor([position]), Yarn())
    # Two float32 evaluations of one angle differ by up to 2 roundings of the frequency and 1 of the product, each
    # position x 2^-24 rad (frequencies are <= 1); the pair's length is <= sqrt(2) x 4 sigma x concentration 1.35.
    tolerance = 3 * position * EPS32 * 8
    assert (ours.transpose(0, 1)[None] - theirs).abs().max().item() < tolerance
    assert (ours.transpose(0, 1)[None] - q).abs().max().item() > 10 * tolerance / position, "it does rotate"


def test_concentration_is_that_of_factor_32() -> None:
    assert Yarn().concentration == pytest.approx(1.3465735902799727, rel=1e-15)


# Attention


def attention_by_loops(q, k, v, sinks, window):  # type: ignore[no-untyped-def]
    """One query, one head, one key at a time, in Python floats."""
    tokens, heads, size = q.shape
    keys, kv_heads, _ = k.shape
    out = torch.zeros_like(q)
    for t in range(tokens):
        own = keys - tokens + t
        first = 0 if window is None else max(0, own - window + 1)
        for h in range(heads):
            kv = h // (heads // kv_heads)
            weights = [math.exp((q[t, h] @ k[s, kv]).item() / math.sqrt(size)) for s in range(first, own + 1)]
            total = sum(weights) + math.exp(sinks[h].item())
            for s, weight in enumerate(weights, first):
                out[t, h] += weight / total * v[s, kv]
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 128])
def test_sinks_windows_and_groups(heads: int, kv_heads: int, window: int | None) -> None:
    rng = torch.Generator().manual_seed(heads * 10 + kv_heads)
    q = torch.randn(5, heads, 8, generator=rng, dtype=torch.float64)
    k, v = (torch.randn(9, kv_heads, 8, generator=rng, dtype=torch.float64) for _ in range(2))
    sinks = torch.randn(heads, generator=rng, dtype=torch.float64)
    out = reference.sink_attention(q, k, v, sinks, window=window)
    assert torch.allclose(out, attention_by_loops(q, k, v, sinks, window), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [0, 1, 2, 126, 127, 128, 129, 130, 255, 256, 257])
def test_lengths_around_the_window(length: int) -> None:
    """The window counts the query itself: position 127 sees everything, 128 no longer sees position 0."""
    rng = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(length, 2, 4, generator=rng, dtype=torch.float64) for _ in range(3))
    sinks = torch.zeros(2, dtype=torch.float64)
    windowed = reference.sink_attention(q, k, v, sinks, window=spec.WINDOW)
    full = reference.sink_attention(q, k, v, sinks)
    assert windowed.shape == q.shape
    same = min(length, spec.WINDOW)
    assert torch.equal(windowed[:same], full[:same])
    for position in range(spec.WINDOW, length):
        lone = reference.sink_attention(
            q[position : position + 1], k[position - 127 : position + 1], v[position - 127 : position + 1], sinks
        )
        assert torch.allclose(windowed[position], lone[0], rtol=1e-12, atol=1e-12)


def test_one_token_shares_its_weight_with_the_sink() -> None:
    """softmax over [q.k, sink] with q.k = 0: the value is multiplied by 1 / (1 + e^sink)."""
    q = torch.zeros(1, 2, 4, dtype=torch.float64)
    k, v = torch.randn(1, 2, 4, dtype=torch.float64), torch.ones(1, 2, 4, dtype=torch.float64)
    sinks = torch.tensor([0.0, 2.0], dtype=torch.float64)
    out = reference.sink_attention(q, k, v, sinks)
    assert out[0, :, 0].tolist() == pytest.approx([0.5, 1 / (1 + math.exp(2))], rel=1e-14)


def test_a_sink_of_minus_infinity_is_plain_softmax() -> None:
    q, k, v = (torch.randn(6, 2, 8, dtype=torch.float64) for _ in range(3))
    out = reference.sink_attention(q, k, v, torch.full((2,), -math.inf, dtype=torch.float64))
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (q, k, v)), is_causal=True
    ).transpose(0, 1)
    assert torch.allclose(out, plain, rtol=1e-12, atol=1e-12)


def test_decoding_equals_the_last_row_of_a_prefill() -> None:
    q, k, v = (torch.randn(140, 4, 8, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(4, dtype=torch.float64)
    for window in (None, 128):
        whole = reference.sink_attention(q, k, v, sinks, window=window)
        last = reference.sink_attention(q[-1:], k, v, sinks, window=window)
        assert torch.allclose(whole[-1], last[0], rtol=1e-12, atol=1e-12)


# Experts


def test_swiglu_clamps_and_adds_one() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 0.0])
    out = reference.swiglu(torch.stack([gate, up], -1).reshape(1, 6).double())[0].tolist()
    assert out[0] == pytest.approx(7 / (1 + math.exp(-7 * 1.702)) * 8)
    assert out[1] == pytest.approx(-9 / (1 + math.exp(9 * 1.702)) * -6), "the gate is not clamped from below"
    assert out[2] == pytest.approx(1 / (1 + math.exp(-1.702))), "up + 1 is 1"


def test_router_weights_are_a_softmax_over_the_chosen() -> None:
    x = torch.eye(3, dtype=torch.float64)
    weight = torch.tensor([[3.0, 0, 0], [2, 1, 0], [0, 5, 0], [1, 1, 1]], dtype=torch.float64)
    weights, experts = reference.route(x, weight, torch.zeros(4, dtype=torch.float64), 2)
    assert experts[0].tolist() == [0, 1]
    assert experts[1, 0].item() == 2
    assert weights.sum(-1).tolist() == pytest.approx([1, 1, 1])
    assert weights[0, 0].item() == pytest.approx(1 / (1 + math.exp(-1)))


def test_experts_equal_a_dense_sum() -> None:
    """Every expert computed for every token, then weighted by a [T, E] matrix."""
    rng = torch.Generator().manual_seed(3)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    x, up, up_bias, down, down_bias = normal(7, 8), normal(5, 12, 8), normal(5, 12), normal(5, 8, 6), normal(5, 8)
    weights, experts = reference.route(x, normal(5, 8), normal(5), 3)
    dense = torch.zeros(7, 5, dtype=torch.float64).scatter_(1, experts, weights)
    inner = reference.swiglu(torch.einsum("tc,enc->ten", x, up) + up_bias)
    every = torch.einsum("ten,ecn->tec", inner, down) + down_bias
    want = torch.einsum("te,tec->tc", dense, every)
    got = reference.experts_forward(x, weights, experts, up, up_bias, down, down_bias)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


# The model against transformers


@pytest.fixture(scope="module")
def bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.Shape(layers=4, hidden=96, intermediate=64, experts=8, active_experts=4)
    return tiny.write(tmp_path_factory.mktemp("bf16"), shape, "bf16", seed=5)


@pytest.fixture(scope="module")
def theirs(bf16_checkpoint: Path):  # type: ignore[no-untyped-def]
    from transformers import GptOssForCausalLM

    return GptOssForCausalLM.from_pretrained(bf16_checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_logits_equal_transformers(bf16_checkpoint: Path, theirs, length: int) -> None:  # type: ignore[no-untyped-def]
    tokens = torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        want = theirs(tokens[None]).logits[0]
    got = whole_model.forward(whole_model.load(bf16_checkpoint), tokens)
    # 4 layers x about 10 roundings in sequence, each 2^-24 of values up to about 30 and amplified by at most the
    # norms' 1/rms: 40 x 30 x 2^-24 = 7e-5 typical. 1e-3 leaves a decade; a wrong formula is off by > 0.1.
    assert (got - want).abs().max().item() < 1e-3
    assert want.std().item() > 0.3, "the logits say something"


def test_64_greedy_tokens_equal_transformers(bf16_checkpoint: Path, theirs) -> None:  # type: ignore[no-untyped-def]
    model = whole_model.load(bf16_checkpoint)
    for seed, length in enumerate((5, 80)):  # the second passes the window on its way
        prompt = torch.randint(0, 510, (length,), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            out = theirs.generate(prompt[None], max_new_tokens=64, min_new_tokens=64, do_sample=False)
        # `min_new_tokens` bans the end token, which this random model is free to prefer.
        want = out[0, len(prompt) :].tolist()
        got = greedy_without(model, prompt, 64, banned=theirs.generation_config.eos_token_id)
        assert got == want


def greedy_without(model: whole_model.Model, tokens: torch.Tensor, count: int, banned: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        states = whole_model.hidden_states(model, torch.cat([tokens, torch.tensor(out, dtype=torch.int64)]))
        logits = reference.linear(states[-1], model.head)
        logits[banned] = -math.inf
        out.append(int(logits.argmax()))
    return out


def test_mxfp4_and_bf16_checkpoints_hold_the_same_model(bf16_checkpoint: Path, tmp_path: Path) -> None:
    shape = tiny.Shape(layers=4, hidden=96, intermediate=64, experts=8, active_experts=4)
    packed = whole_model.load(tiny.write(tmp_path / "mxfp4", shape, "mxfp4", seed=5))
    tokens = torch.arange(20)
    assert torch.equal(
        whole_model.forward(packed, tokens), whole_model.forward(whole_model.load(bf16_checkpoint), tokens)
    )


def test_float64_and_bfloat16_bracket_float32(bf16_checkpoint: Path) -> None:
    """float32 is within 1e-3 of float64 (see above); bfloat16, 2^16 times coarser, is near but not equal."""
    tokens = torch.arange(40)
    exact = whole_model.forward(whole_model.load(bf16_checkpoint, torch.float64), tokens)
    single = whole_model.forward(whole_model.load(bf16_checkpoint), tokens)
    coarse = whole_model.forward(whole_model.load(bf16_checkpoint, torch.bfloat16), tokens)
    assert (single - exact).abs().max() < 1e-3
    error = (coarse.double() - exact).abs()
    assert 1e-3 < error.mean() < 0.1 * exact.std()


@pytest.mark.parametrize("left_out", ["sinks", "q_bias", "router_bias", "gate_up_bias", "down_bias"])
def test_the_random_model_notices_what_is_left_out(bf16_checkpoint: Path, left_out: str) -> None:
    """Checks the tests above: without an effect of sinks and biases, a wrong formula would pass."""
    from dataclasses import replace

    model = whole_model.load(bf16_checkpoint)
    value = -math.inf if left_out == "sinks" else 0.0
    layers = tuple(replace(at, **{left_out: torch.full_like(getattr(at, left_out), value)}) for at in model.layers)
    tokens = torch.arange(30)
    change = whole_model.forward(replace(model, layers=layers), tokens) - whole_model.forward(model, tokens)
    assert change.abs().mean() > 0.03
