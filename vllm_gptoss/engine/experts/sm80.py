"""vLLM's `marlin` experts, with our kernels for up to 64 tokens over the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

from vllm_gptoss import fallback
from vllm_gptoss.engine import choose, spec
from vllm_gptoss.engine.choose import device
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.engine.experts.marlin import marlin_bias, marlin_scales, marlin_values
from vllm_gptoss.engine.kernels import nvrtc
from vllm_gptoss.engine.kernels.dense import multiprocessors
from vllm_gptoss.engine.kernels.experts import partial_sums, partial_tokens
from vllm_gptoss.engine.kernels.experts_marlin import MarlinFewExperts, MarlinProjection

CORNER = (slice(1), slice(64), slice(32))
"""Of expert 0: 64 rows and up to 32 bytes of a row, to compare what upstream stores with our index maps."""


def _weights(layer: Any) -> list[Tensor]:
    names = (f"{part}_{kind}" for part in ("w13", "w2") for kind in ("weight", "weight_scale", "bias"))
    return [getattr(layer, name).data for name in names]


class MarlinExpertsMethod(GptOssMxfp4MoEMethod):
    """vLLM's `marlin` experts, with our kernels for few tokens."""

    def __init__(self, moe: Any, deployment: choose.Deployment, wish: str) -> None:
        moe.moe_backend = "marlin"
        super().__init__(moe)
        # `--moe-backend` was not given, or this method would not have been chosen
        self.deployment, self.wish = replace(deployment, moe_backend="auto"), wish
        self.ours: MarlinFewExperts | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lets upstream lay the weights out, then reads them in place. A reload overwrites the bytes of the first load.

        Raises:
            ChoiceError: our kernels cannot run them.
        """
        corners = fallback.attempt("experts", self.wish, lambda: self._before(layer))
        super().process_weights_after_loading(layer)
        if self.ours is None and corners is not None:
            self.ours = fallback.attempt("experts", self.wish, lambda: self._after(layer, corners))

    def _before(self, layer: Any) -> list[Tensor]:
        """Corners of a layer's weights as Marlin must store them.

        Raises:
            UnavailableError: our kernels cannot run the layer.
        """
        choice = choose.experts(device.detect(), describe.built_experts(self.deployment, self, layer), self.wish)
        if choice.value != "gptoss":
            raise fallback.UnavailableError(choice.reason)
        if layer.w2_weight.is_cuda:  # as `sm90.reserve`: before the first layer's weights are converted
            width = self.moe.experts_per_token * self.deployment.model.hidden
            partial_sums(layer.w2_weight.device.index or 0, width, partial_tokens(1))
        maps = (marlin_values, marlin_scales, marlin_bias) * 2
        return [map_(part[CORNER[: part.dim()]].cpu()) for map_, part in zip(maps, _weights(layer), strict=True)]

    def _after(self, layer: Any, corners: list[Tensor]) -> MarlinFewExperts:
        """The kernels over upstream's bytes, compiled.

        Raises:
            ValueError: the bytes do not lie as the kernels read them.
        """
        stored = _weights(layer)
        for tensor, corner in zip(stored, corners, strict=True):
            found = tensor if tensor.dtype == corner.dtype else tensor.view(torch.uint8)
            if not torch.equal(found[tuple(map(slice, corner.shape))].cpu(), corner):
                raise ValueError("upstream's Marlin layout is not the one these kernels read")
        model, here = self.deployment.model, stored[0].device.index or 0
        whole = self.deployment.expert_ranks == 1  # else ranks have rows that vLLM pads
        intermediate = model.intermediate if whole else stored[3].shape[1] * 16
        arch = device.detect().arch
        ours = MarlinFewExperts(
            MarlinProjection(*stored[:3], 2 * intermediate, model.hidden),
            MarlinProjection(*stored[3:], model.hidden, intermediate),
            self.moe.experts_per_token, alpha=spec.SWIGLU_ALPHA, limit=spec.SWIGLU_LIMIT, expert_map=layer.expert_map,
            arch=nvrtc.target(here, arch), shared=nvrtc.shared_limit(arch), blocks=multiprocessors(here),
        )  # fmt: skip
        ours.compile(torch.int32)
        return ours

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any,
        shared_experts_input: Any,
    ) -> Any:  # fmt: skip
        """x: [T, hidden with padding] bf16; topk_weights: [T, A] f32; topk_ids: [T, A] int32 or int64."""
        if self.ours is not None and shared_experts is None and 0 < len(x) <= self.ours.max_tokens:
            out = torch.empty_like(x)
            self.ours(x.contiguous(), topk_ids.contiguous(), topk_weights.float().contiguous(), out)
            return out
        return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
