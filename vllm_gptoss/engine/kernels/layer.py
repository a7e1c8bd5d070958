"""The tensors of one layer on one rank, which every path reads, and their C structs.

The model collects the tensors once. `engine/model/layer_upto16.py` launches six kernels over them, and `step.py`
launches one kernel for all layers. `cuda/step.cu` reads the structs `Layer` and `Group`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import cache

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gptoss.engine.kernels.experts import FewTokenExperts


class Layer(ctypes.Structure):
    """`struct Layer` of step.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("norm", "w_qkv", "b_qkv", "w_out", "b_out", "post_norm")),
        *((name, ctypes.c_void_p) for name in ("w_router", "b_router", "up_values", "up_scales", "up_bias")),
        *((name, ctypes.c_void_p) for name in ("down_values", "down_scales", "down_bias", "sinks", "kv")),
        *((name, ctypes.c_longlong) for name in ("kv_block", "kv_head", "kv_token")),
        *((name, ctypes.c_int) for name in ("window", "group", "block_shift", "unused")),
    ]


class CacheScales(ctypes.Structure):
    """`struct CacheScales` of step.cu."""

    _fields_ = cache.SCALE_FIELDS


class Group(ctypes.Structure):
    """`struct Group` of step.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("block_table", "seq_lens", "query_start", "slots")),
        *((name, ctypes.c_longlong) for name in ("table_stride", "requests")),
    ]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's weights, all of them or a tensor-parallel rank's share.

    norm, post_norm: [C] bf16; qkv_weight: [(H + 2K) * 64, C] bf16, row-major, q then k then v; out_weight: [C, H * 64]
    bf16; router_weight: [E, C] bf16; each with its bias, of which `out_bias` is None on ranks that do not add it;
    cos_sin: [positions, 64] f32 or bf16, 32 cosines, 32 sines; sinks: [H] bf16; window: keys a token sees, itself
    included, 0 for all; active: experts per token; experts: our kernels for few tokens, None where others run them.
    """

    norm: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    cos_sin: Tensor
    sinks: Tensor
    window: int
    out_weight: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    router_weight: Tensor
    router_bias: Tensor
    active: int
    experts: FewTokenExperts | None

    def record(self, group: int, kv_cache: cache.PagedCache) -> Layer:
        """The struct of a layer for step.cu, with the plugin's experts.

        group: number of its `Requests`; kv_cache: [blocks, K, block size, 128], K at 0, V at 64.
        """
        assert self.experts is not None
        up, down = self.experts.up, self.experts.down
        return Layer(
            norm=self.norm.data_ptr(),
            w_qkv=self.qkv_weight.data_ptr(),
            b_qkv=self.qkv_bias.data_ptr(),
            w_out=self.out_weight.data_ptr(),
            b_out=None if self.out_bias is None else self.out_bias.data_ptr(),
            post_norm=self.post_norm.data_ptr(),
            w_router=self.router_weight.data_ptr(),
            b_router=self.router_bias.data_ptr(),
            up_values=up.values.data_ptr(),
            up_scales=up.scales.data_ptr(),
            up_bias=up.bias.data_ptr(),
            down_values=down.values.data_ptr(),
            down_scales=down.scales.data_ptr(),
            down_bias=down.bias.data_ptr(),
            sinks=self.sinks.data_ptr(),
            **cache.described(kv_cache),
            window=self.window,
            group=group,
        )


@dataclass(frozen=True, slots=True)
class Requests:
    """What a group of layers reads of the step.

    block_table: [R, *] int32; seq_lens: [R] int32, keys of a request, this step's included; query_start: [R + 1] int32;
    slots: [T] int64, negative: not written. In a step of one token it is the first request's that has any.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor
    slots: Tensor

    def record(self) -> Group:
        """What step.cu reads of it."""
        return Group(
            block_table=self.block_table.data_ptr(),
            seq_lens=self.seq_lens.data_ptr(),
            query_start=self.query_start.data_ptr(),
            slots=self.slots.data_ptr(),
            table_stride=self.block_table.stride(0),
            requests=self.seq_lens.shape[0],
        )
