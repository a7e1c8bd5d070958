"""Risks of attention for many tokens that need no GPU: more shared memory than there is, tensors that it cannot read,
source that does not compile."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.cubins import compiled
from vllm_gptoss.engine.kernels import attention_many, cache, nvrtc
from vllm_gptoss.engine.kernels.attention_many import ManyPlan, plan, unreadable, unsupported

ELEMENTS = (cache.BF16, cache.E4M3)
PLANS = sorted(
    {plan(tokens, window, element) for tokens in range(17, 513) for window in (0, 128) for element in ELEMENTS}, key=str
)
SHARED, OF_A_BLOCK = 227 << 10, 1 << 10
"""Shared memory of a multiprocessor of Hopper, and what the driver takes of it for each block."""


@pytest.mark.parametrize("of", PLANS, ids=str)
def test_a_multiprocessor_holds_its_blocks(of: ManyPlan) -> None:
    static = 256
    assert of.blocks * (of.shared_bytes + static + OF_A_BLOCK) <= SHARED
    assert of.blocks * of.warps * 32 <= 2048


@pytest.mark.parametrize(("tokens", "window"), [(17, 0), (64, 128), (65, 128), (512, 0)])
def test_as_many_bytes_are_on_their_way_for_each_element_type(tokens: int, window: int) -> None:
    plain, coded = (plan(tokens, window, element) for element in ELEMENTS)
    assert plain.shared_bytes == coded.shared_bytes
    assert (plain.warps, plain.blocks, plain.least) == (coded.warps, coded.blocks, coded.least)


def test_shapes_without_a_kernel_say_why() -> None:
    assert unsupported(64, 8, 64, 0) is None
    assert unsupported(8, 1, 64, 128) is None
    assert unsupported(64, 8, 64, 256) == "a window of 256 keys, more than 128"
    assert unsupported(64, 8, 128, 0) == "head size 128, not 64"


def tensors(block: int = 16, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, paged, out = (17, 64, 64), (3, 8, block, 128), (17, 64, 64)
    return torch.zeros(q, dtype=dtype), torch.zeros(paged, dtype=dtype), torch.zeros(out, dtype=dtype)


def test_tensors_as_vllm_lays_them_are_read() -> None:
    q, paged, out = tensors()
    assert unreadable(q, paged, out) is None
    wide = torch.zeros(17, 80 * 64, dtype=torch.bfloat16)[:, : 64 * 64].view(17, 64, 64)  # of q, k and v in one
    assert unreadable(wide, paged, out) is None
    token_major = torch.zeros(3, 16, 8, 128, dtype=torch.bfloat16).transpose(1, 2)
    assert unreadable(q, token_major, out) is None


@pytest.mark.parametrize("block", [8, 48])
def test_blocks_of_another_size_are_not(block: int) -> None:
    why = unreadable(*tensors(block))
    assert why == f"cache blocks of {block} tokens, not a power of two from 16 on"


def test_other_tensors_are_not() -> None:
    q, paged, out = tensors()
    assert "not bfloat16" in str(unreadable(*tensors(dtype=torch.float16)))
    assert "queries lie" in str(unreadable(q.transpose(1, 2), paged, out))
    assert "queries lie" in str(unreadable(q, paged, out.transpose(1, 2)))
    assert "the KV cache has shape" in str(unreadable(q, paged.transpose(2, 3), out))
    assert "the KV cache has shape" in str(unreadable(q, paged[..., :64], out))


def test_it_compiles_for_sm90_without_a_gpu() -> None:
    source = nvrtc.source(attention_many.SOURCE)
    for of in PLANS:
        cubin = compiled(source, "sm_90", [f"-D{name}={value}" for name, value in of.macros.items()])
        assert b"attention_many" in cubin
