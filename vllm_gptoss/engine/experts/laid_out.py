"""One layer's experts as vLLM's `triton` backend laid them out, and their replacement by a reload.

vLLM's layerwise reload copies new parameters into the storage of the old ones, so that captured CUDA graphs stay valid
(`model_loader/reload/layerwise.py`). The `triton` experts are no parameters: each reload would leave them at new
addresses, and a reload of other layers would drop them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm_gptoss._vllm import worker

BIASES = ("w13_bias", "w2_bias")
WEIGHTS = ("w13_weight", "w2_weight")
METHOD = ("w13_precision_config", "w2_precision_config", "moe_quant_config", "moe_kernel")
"""Attributes of a `GptOssMxfp4MoEMethod` that refer to a layer's weights."""


@dataclass(frozen=True)
class LaidOut:
    """The objects through which vLLM reads one layer's experts. weights: attributes of the layer; method: of its
    method; biases: [E, N] f32 each."""

    weights: dict[str, Any]
    method: dict[str, Any]
    biases: tuple[Tensor, ...]

    @classmethod
    def of(cls, method: Any, layer: Any) -> LaidOut | None:
        """Those of a layer that `method` has just laid out; None where the weights are parameters, which vLLM keeps."""
        weights = {name: getattr(layer, name) for name in WEIGHTS}
        if any(isinstance(weight, Tensor) for weight in weights.values()):
            return None
        biases = tuple(getattr(layer, name).data for name in BIASES if getattr(layer, name, None) is not None)
        return cls(weights, {name: getattr(method, name) for name in METHOD}, biases)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor with bytes of the experts: values, scales, biases."""
        scales = (worker.weight_scale(self.method[name]) for name in METHOD[:2])
        return (*(wrapped.storage.data for wrapped in (*self.weights.values(), *scales)), *self.biases)

    def overwrite(self, new: LaidOut) -> None:
        """Copies the bytes of `new`, the same layer laid out again, into this storage.

        Raises:
            ValueError: the shapes or dtypes differ.
        """
        pairs = list(zip(self.tensors, new.tensors, strict=True))
        for old, fresh in pairs:
            if (old.shape, old.dtype, old.stride()) != (fresh.shape, fresh.dtype, fresh.stride()):
                raise ValueError(f"reloaded experts are {list(fresh.shape)} {fresh.dtype}, not {list(old.shape)}")
        for old, fresh in pairs:
            old.copy_(fresh)

    def restore(self, method: Any, layer: Any) -> None:
        """Makes `layer` and `method` refer to these objects again."""
        worker.set_attributes(layer, self.weights)
        worker.set_attributes(method, self.method)
