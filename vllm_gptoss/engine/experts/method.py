"""vLLM's MoE method with our kernels for some steps and vLLM's for the others, over the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

from vllm_gptoss import fallback
from vllm_gptoss._vllm import worker
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import bands, device
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.engine.experts import sm90
from vllm_gptoss.engine.experts.laid_out import LaidOut
from vllm_gptoss.engine.kernels.experts import Projection

Samples = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class GptOssExpertsMethod(GptOssMxfp4MoEMethod):
    """vLLM's `triton` experts, with our kernels for the token bands that have one."""

    def __init__(self, moe: Any, deployment: choose.Deployment, wish: str) -> None:
        if moe.moe_backend == "auto":
            moe.moe_backend = "triton"
        if deployment.lora_on_attention:
            moe.is_lora_enabled = False  # vLLM's experts that take adapters have another layout
        super().__init__(moe)
        # `--moe-backend` was not given, or this method would not have been chosen
        self.deployment, self.wish = replace(deployment, moe_backend="auto"), wish
        self.ours: sm90.LayerExperts | None = None
        self.laid_out: LaidOut | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lets upstream lay the weights out, then reads them in place. A reload overwrites the bytes of the first load.

        Raises:
            ValueError: a reload brought weights that the kernels of captured graphs cannot run.
        """
        samples = fallback.attempt("experts", self.wish, lambda: self._before(layer))
        super().process_weights_after_loading(layer)
        fresh = LaidOut.of(self, layer)
        if self.laid_out is not None and fresh is not None:
            self._reload(layer, self.laid_out, fresh, accepted=samples is not None)
            return
        self.laid_out = fresh
        if samples is not None:
            self.ours = fallback.attempt("experts", self.wish, lambda: self._after(layer, samples))

    def _reload(self, layer: Any, kept: LaidOut, fresh: LaidOut, *, accepted: bool) -> None:
        kept.overwrite(fresh)
        kept.restore(self, layer)
        if self.ours is not None and not accepted:
            if self.deployment.graphs:
                raise ValueError(
                    "the captured CUDA graphs contain kernels that cannot run the reloaded experts (the reason is in"
                    " the log line above): restart the server with GPTOSS_EXPERTS=upstream"
                )
            self.ours = None

    def _before(self, layer: Any) -> Samples:
        """Corners of the weights as loaded, of a layer that our kernels can run.

        Raises:
            UnavailableError: they cannot.
        """
        deployment = describe.built_experts(self.deployment, self, layer)
        choice = choose.experts(device.detect(), deployment, self.wish)
        if choice.value != "gptoss":
            raise fallback.UnavailableError(choice.reason)
        sm90.reserve(layer.w2_weight.data, self.moe.experts_per_token, bands.MANY_TOKENS)
        return (
            sm90.sample(layer.w13_weight.data, layer.w13_weight_scale.data),
            sm90.sample(layer.w2_weight.data, layer.w2_weight_scale.data),
        )

    def _after(self, layer: Any, samples: Samples) -> sm90.LayerExperts:
        """The kernels over upstream's bytes, compiled.

        Raises:
            LayoutError: the bytes do not lie as the kernels read them.
        """
        return sm90.prepare(
            self._projection(layer.w13_weight, self.w13_precision_config, layer.w13_bias),
            self._projection(layer.w2_weight, self.w2_precision_config, layer.w2_bias),
            active=self.moe.experts_per_token,
            routed=self.moe.num_experts,
            most=bands.MANY_TOKENS,
            expert_map=layer.expert_map,
            expected=samples,
        )

    @staticmethod
    def _projection(weight: Any, precision: Any, bias: Tensor) -> Projection:
        return Projection(
            sm90.storage(weight, "HOPPER_VALUE"),
            sm90.storage(worker.weight_scale(precision), "HOPPER_SCALE"),
            bias.data,
        )

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """x: [T, hidden] bf16; router_logits: [T, E]. Runs inside vLLM's opaque `moe_forward` op, so T is a number."""
        kernel = self.ours and self.ours.kernel(x.shape[0])
        if kernel is not None:
            out = fallback.attempt("experts", self.wish, lambda: sm90.apply(kernel, x, router_logits))
            if out is not None:
                return out
            self.ours = None
        if self.laid_out is not None and not hasattr(layer, "w13_weight"):
            self.laid_out.restore(self, layer)  # a reload without these experts dropped them
        return super().apply_monolithic(layer, x, router_logits, *args, **kwargs)


def own(quant_method: Any) -> sm90.LayerExperts | None:
    """The kernels that a layer's method holds, or None: it is another method, or its experts are upstream's."""
    return quant_method.ours if isinstance(quant_method, GptOssExpertsMethod) else None
