"""A step of one token in one launch: every layer of the model in `kernels/step.py`.

`FewTokens` uses it where it can. The kernel's blocks wait for one another, so all of them must be on the GPU at once:
nothing that waits for this rank may hold a multiprocessor meanwhile, which is why several ranks keep six launches a
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vllm_gptoss import _vllm
from vllm_gptoss.kernels import nvrtc, step
from vllm_gptoss.spec import RMS_NORM_EPS, SWIGLU_ALPHA, SWIGLU_LIMIT

if TYPE_CHECKING:
    from vllm_gptoss.model.few_tokens import Layer


MIN_BLOCK = 16
"""Tokens of a cache block at least: attention reads 16 keys at a time, out of one block."""


def obstacle(layers: Sequence[Layer], config: Any, auxiliary: Sequence[int] = ()) -> str | None:
    """Why these layers cannot run in one launch, or None.

    config: the `VllmConfig` the model was built with; auxiliary: layers whose input EAGLE3 reads.
    """
    parallel = config.parallel_config
    if auxiliary:
        return "a draft model reads states between layers"
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        return "several GPUs share the model"
    for layer in layers:
        if layer.experts is None:
            return "another backend runs the experts"
        if layer.experts.expert_map is not None or layer.experts.active != step.ACTIVE:
            return "the experts are mapped, or not four a token"
        if layer.cos_sin.data_ptr() != layers[0].cos_sin.data_ptr():
            return "layers have rotary caches of their own"
        if layer.block.attn.kv_cache.shape[2] < MIN_BLOCK:
            return f"cache blocks of {layer.block.attn.kv_cache.shape[2]} tokens, fewer than {MIN_BLOCK}"
    return None


def build(layers: Sequence[Layer], config: Any, auxiliary: Sequence[int] = ()) -> OneToken | None:
    """The path, compiled; None, and one line that says why, where there is none. Arguments as `obstacle`'s."""
    why = obstacle(layers, config, auxiliary)
    if why is None:
        path = OneToken(layers)
        why = step.unsupported(path.step.shape)
    if why is None:
        try:
            path.step.compile()
            return path
        except nvrtc.NvrtcError as error:
            why = f"the kernel cannot be compiled: {error}"
    _vllm.init_logger("vllm.gptoss").info("layers: six launches each for one token too (%s)", why)
    return None


class OneToken:
    """The model's layers, ready for steps of one token."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers, self.said = layers, False
        self.step = step.Step(
            [_tensors(layer) for layer in layers],
            layers[0].cos_sin,
            eps=RMS_NORM_EPS,
            alpha=SWIGLU_ALPHA,
            limit=SWIGLU_LIMIT,
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, context: Any
    ) -> tuple[Tensor, Tensor] | None:
        """(the last layer's experts, what they are to be added to), both [1, C] bf16, for the context's attention
        metadata. None, and one line, where the layers have too many kinds of it, or unseen caches while a graph is
        captured; vLLM runs every step once before it captures it."""
        kinds: dict[tuple[int, int], int] = {}
        requests: list[step.Requests] = []
        groups: list[int] = []
        for layer in self.layers:
            metadata, slots = context.attn_metadata[layer.name], context.slot_mapping[layer.name]
            kind = (metadata.block_table.data_ptr(), slots.data_ptr())
            if kind not in kinds:
                kinds[kind] = len(requests)
                requests.append(step.Requests(metadata.block_table, metadata.seq_lens, metadata.query_start_loc, slots))
            groups.append(kinds[kind])
        # Looked up each time: vLLM profiles its graphs with a small cache before it makes the real one.
        caches = [layer.block.attn.kv_cache for layer in self.layers]
        table = self.step.table(groups, caches) if len(requests) <= step.MAX_GROUPS else None
        if table is not None:
            result: tuple[Tensor, Tensor] = self.step(x, residual, positions, requests, table)
            return result
        if not self.said:
            self.said = True
            _vllm.init_logger("vllm.gptoss").info(
                "layers: six launches each for one token (%d kinds of caches, or caches first seen in a graph)",
                len(requests),
            )
        return None


def _tensors(layer: Layer) -> step.LayerTensors:
    assert layer.out_bias is not None
    return step.LayerTensors(
        norm=layer.norm,
        qkv_weight=layer.qkv_weight,
        qkv_bias=layer.qkv_bias,
        out_weight=layer.out_weight,
        out_bias=layer.out_bias,
        post_norm=layer.post_norm,
        router_weight=layer.gate_weight,
        router_bias=layer.gate_bias,
        up=layer.experts.up,
        down=layer.experts.down,
        sinks=layer.sinks,
        window=layer.window,
    )
