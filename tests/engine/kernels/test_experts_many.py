"""The kernel for many tokens without a GPU: it compiles for every shape and does not read past shared memory."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from tests.engine.kernels import cubins
from tests.engine.kernels.cubins import compiled, judged
from tests.engine.kernels.on_meta import SHAPES, prepared
from tests.support.scale import SOAK
from vllm_gptoss.engine.kernels import experts_many, experts_plan, nvrtc
from vllm_gptoss.engine.kernels.experts import CompileJob
from vllm_gptoss.engine.kernels.experts_many import (
    BY_PAIRS,
    COLUMNS,
    MAX_PAIRS,
    MAX_TOKENS,
    NAME,
    SOURCE,
    compile_options,
    fitted,
    tunings_for,
)


def options_of(job: CompileJob) -> list[str]:
    return [*(f"-D{k}={v}" for k, v in job.options), *compile_options(job.registers)]


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_compiles_and_has_the_shared_memory_it_takes(shape: tuple[int, int, int, int, int]) -> None:
    """To the end for the 20b and for the 120b's largest step; in `make soak` all."""
    many = prepared(*shape)
    for most in many.tunings:
        job = many.compile_job(most, torch.bfloat16)
        check = f"\nstatic_assert(X_BYTES + META_BYTES + RING_BYTES <= {job.shared});"
        if SOAK or shape == SHAPES[0] or (shape == SHAPES[1] and most == max(many.tunings)):
            assert NAME.encode() in compiled(nvrtc.source(SOURCE) + check, "sm_90a", options_of(job))
        else:
            judged(nvrtc.source(SOURCE) + check, "sm_90a", options_of(job))
        assert job.shared <= experts_plan.SHARED_LIMIT


def test_products_that_the_compiler_serialises_are_a_warning_and_no_test_takes_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It does where registers are short, or where a branch lies between products: right results, a quarter slower."""
    monkeypatch.setattr(cubins, "CACHE", tmp_path)
    source, enough = nvrtc.source(SOURCE), "MULTIPLYING = GROUPS == 4 ? 104 : 152"
    assert enough in source
    job = prepared(*SHAPES[0]).compile_job(768, torch.bfloat16)
    with pytest.raises(AssertionError, match=r"wgmma\.mma_async instructions are serialized"):
        compiled(source.replace(enough, "MULTIPLYING = 112"), "sm_90a", options_of(job))
    assert not list(tmp_path.rglob("*.cubin")), "the result is not cached"
    assert caplog.text.count("makes a kernel slower than it was measured") == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_every_shape_are_what_the_copy_engine_takes(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int, int]
) -> None:
    """It refuses more than 256 elements, rows of other than 16 bytes; and a stage waits for a box's bytes."""
    made: list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]] = []
    monkeypatch.setattr(experts_many, "tensor_map", lambda tensor, sizes, box, _: made.append((tensor, sizes, box)))
    many = prepared(*shape)
    for chunk in {tuning.chunk for tuning in many.tunings.values()}:
        made.clear()
        for projection in (many.up, many.down):
            experts_many.unit_maps(projection, chunk)
        assert [8 * math.prod(box) for _, _, box in made] == [2048 * chunk, 128 * chunk] * 2
        for tensor, sizes, box in made:
            assert 8 * math.prod(sizes) == tensor.numel()
            assert max(box) <= 256
            assert sizes[0] % 2 == box[0] % 2 == 0


def test_every_step_has_kernels_and_wide_ones_where_experts_have_many_tokens() -> None:
    most = {routed: {tokens: each.groups for tokens, each in tunings_for(routed, 4).items()} for routed in (32, 128)}
    assert most == {32: {80: 4, 256: 4, 384: 3, 512: 3, 768: 3}, 128: {320: 4, 512: 4, 1024: 4, 1536: 3, 2048: 3}}
    for routed, active in itertools.product(range(1, 129), range(1, 9)):
        tunings = list(tunings_for(routed, active))
        assert tunings == sorted(tunings), "the first that is large enough runs"
        assert experts_plan.PARTIAL_TOKENS <= tunings[-1] <= min(MAX_TOKENS, MAX_PAIRS // active)


def test_long_lists_of_pairs_cost_columns_and_not_the_kernel() -> None:
    """2,048 tokens of the 120b leave no memory for two stages of 96 tokens; the kernel would not compile."""
    large = BY_PAIRS[64]
    assert [max(fitted(large, most, 4, experts).columns) for most, experts in ((512, 32), (2048, 128))] == [96, 88]
    for columns in (fitted(large, 2048, 4, 128).columns, large.columns):
        assert set(columns) <= set(COLUMNS)
        assert list(columns) == sorted(columns)


def test_columns_without_products_do_not_compile() -> None:
    """The kernel would silently skip every chunk of so many tokens."""
    options = dict(prepared(*SHAPES[0]).compile_job(384, torch.bfloat16).options)
    options["COLUMNS"] = 1 << 56 // 8 | 1 << 96 // 8
    with pytest.raises(nvrtc.NvrtcError, match="columns without products"):
        judged(nvrtc.source(SOURCE), "sm_90a", [f"-D{k}={v}" for k, v in options.items()])


@pytest.mark.parametrize("routing", [torch.int32, torch.int64, torch.float32])
def test_every_routing_dtype_compiles(routing: torch.dtype) -> None:
    many = prepared(16, 384, 2880, 4, 32)
    job = many.compile_job(min(many.tunings), routing)
    judged(nvrtc.source(SOURCE), "sm_90a", options_of(job))


def test_more_tokens_than_it_was_compiled_for_are_refused() -> None:
    many = prepared(32, 384, 2880, 4, 32)
    x, logits = torch.empty(769, 2880, device="meta"), torch.empty(769, 32, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="1 to 768 tokens, got 769"):
        many(x, logits, None, torch.empty_like(x))
