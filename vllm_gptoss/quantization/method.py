"""vLLM's MoE method with our kernels in front: few tokens on ours, the rest as upstream, over the same bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils.mxfp4_utils import weight_mx_scale

from vllm_gptoss import _vllm
from vllm_gptoss.experts import sm90
from vllm_gptoss.kernels import nvrtc
from vllm_gptoss.kernels.experts import FewTokenExperts, Projection

logger = _vllm.init_logger(__name__)

FEW_TOKENS = 64
"""Up to here our kernels are faster than upstream's; docs/kernels.md has the measurements."""


class GptOssExpertsMethod(GptOssMxfp4MoEMethod):
    """Upstream's `triton` experts, replaced for up to `FEW_TOKENS` tokens."""

    def __init__(self, moe: Any) -> None:
        if moe.moe_backend == "auto":
            moe.moe_backend = "triton"
        super().__init__(moe)
        self.few: FewTokenExperts | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lets upstream lay the weights out, then reads them in place; a reason to stay away is one log line."""
        obstacle = self._obstacle(layer)
        expected = None
        if obstacle is None:
            sm90.reserve(layer.w2_weight.data, self.moe.experts_per_token)
            expected = (
                sm90.sample(layer.w13_weight.data, layer.w13_weight_scale.data),
                sm90.sample(layer.w2_weight.data, layer.w2_weight_scale.data),
            )
        super().process_weights_after_loading(layer)
        if obstacle is None:
            try:
                self.few = sm90.prepare(
                    self._projection(layer.w13_weight, self.w13_precision_config, layer.w13_bias),
                    self._projection(layer.w2_weight, self.w2_precision_config, layer.w2_bias),
                    active=self.moe.experts_per_token,
                    routed=self.moe.num_experts,
                    expert_map=layer.expert_map,
                    expected=expected,
                )
            except sm90.LayoutError as error:
                obstacle = str(error)
        if obstacle is not None:
            logger.warning_once("vllm-gptoss: experts stay upstream's for few tokens too: %s", obstacle)

    def _obstacle(self, layer: Any) -> str | None:
        """Why our kernels cannot run this layer, or None."""
        if self.mxfp4_backend is not Mxfp4MoeBackend.TRITON:
            return f"the backend is {self.mxfp4_backend.value}, not triton"
        if not self.is_monolithic:
            return "this parallel configuration routes tokens between ranks"
        if layer.apply_router_weight_on_input:
            return "the router's weight is applied on the input"
        if nvrtc.shared_by_mps(layer.w13_weight.device.index or 0):
            return "MPS lets other processes' kernels run beside ours, whose blocks wait for one another"
        if not self.moe.has_bias:
            return "the experts have no bias"
        if not (sm90.scales_fit(layer.w13_weight_scale.data) and sm90.scales_fit(layer.w2_weight_scale.data)):
            return f"a scale is larger than e8m0 code {sm90.MAX_SCALE}"
        return None

    @staticmethod
    def _projection(weight: Any, precision: Any, bias: Tensor) -> Projection:
        return Projection(
            sm90.storage(weight, "HOPPER_VALUE"),
            sm90.storage(weight_mx_scale(precision), "HOPPER_SCALE"),
            bias.data,
        )

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """x: [T, hidden] bf16; router_logits: [T, E]. Runs inside vLLM's opaque `moe_forward` op, so T is a number."""
        if self.few is not None and 0 < x.shape[0] <= min(FEW_TOKENS, self.few.max_tokens):
            return sm90.apply(self.few, x, router_logits)
        return super().apply_monolithic(layer, x, router_logits, *args, **kwargs)
