"""`GptOssForCausalLM`: vLLM's own model with a fused path for steps of few tokens.

The class keeps upstream's name, modules, weight names and loader, so LoRA, EAGLE3, pipeline parallelism and every
quantization stay upstream's. Only `forward` differs: a step of few tokens, or of few of each request, goes to
`FusedPath` when that path can serve it, everything else to upstream's compiled model.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.gpt_oss import GptOssForCausalLM as UpstreamGptOssForCausalLM

from vllm_gptoss import fallback, startup_line
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.checkpoint.load import LoadCheck
from vllm_gptoss.engine.choose import device
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.engine.model.addresses import keep_scratch
from vllm_gptoss.engine.model.fused_path import MAX_TOKENS, FusedPath
from vllm_gptoss.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig


class GptOssForCausalLM(UpstreamGptOssForCausalLM):
    """gpt-oss as vLLM builds it; registered under the same architecture name."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        wish = Settings.load(vllm_config.additional_config).layers
        with ExitStack() as stack:
            register_attention(vllm_config, wish, stack)
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.layers_wish = wish
        self.load_check = fallback.attempt("checkpoint check", "auto", lambda: LoadCheck(vllm_config))
        few = fallback.attempt("layers", self.layers_wish, lambda: set_up(self, vllm_config))
        self.fused_path = few if fallback.together("layers", few is not None) else None
        self.is_prepared = False
        fallback.attempt("start-up line", "auto", startup_line.say)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Hidden states [T, C] bf16 (or intermediate tensors, or with EAGLE3's auxiliary states), as upstream."""
        step = (input_ids, positions, intermediate_tensors, inputs_embeds)
        out = self._ours(positions.shape[0], *step)
        return super().forward(*step) if out is None else out

    def _ours(self, tokens: int, *step: Any) -> Any:
        """The fused path's result; None if vLLM must run the step, also after a fault, which disables the path."""
        few = self._few_for(tokens)
        if few is None:
            return None
        if few.ranks > 1:
            return fallback.or_end("layers", few.ranks, lambda: few(*step))
        if tokens > MAX_TOKENS:  # `layers=gptoss` requests only the others
            out = fallback.attempt("layers of many tokens", "auto", lambda: few(*step))
            if out is None:
                few.leave_many()
            return out
        out = fallback.attempt("layers", self.layers_wish, lambda: few(*step))
        if out is None:
            self.fused_path = None
        return out

    def _few_for(self, tokens: int) -> FusedPath | None:
        """The fused path if it supports the next step. A path that cannot be prepared is disabled for good."""
        few, wish = self.fused_path, self.layers_wish
        if few is None or not few.could_take(tokens):
            return None
        if not self.is_prepared:
            choice = fallback.attempt("layers", wish, lambda: few.prepare(wish))
            if not fallback.together("layers", choice is not None):
                self.fused_path = None
                return None
            few.connect()
            self.is_prepared = True
            keep_scratch(self, few.places)
            return few if few.could_take(tokens) else None  # what is prepared may take less than was thought
        here = fallback.or_end("layers", few.ranks, lambda: fallback.attempt("layers", wish, few.check_addresses))
        if not fallback.together("layers", bool(here)):
            self.fused_path = None
        return self.fused_path

    def process_weights_after_loading(self) -> None:
        """vLLM's hook after it has processed the weights of every layer."""
        keep_scratch(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads as upstream does; a missing, cut or wrongly shaped tensor is a `CheckpointError` with its name."""
        loaded: set[str] = super().load_weights(self.load_check(weights) if self.load_check else weights)
        return loaded


def register_attention(config: Any, wish: str, stack: ExitStack) -> None:
    """Registers the plugin's attention until `stack` closes, if layers with it are expected to run.

    Raises:
        ChoiceError: `layers=gptoss` was requested and cannot run.
    """
    choice = fallback.attempt(
        "layers", wish, lambda: choose.layers(device.detect(), describe.configuration(config), wish)
    )
    if choice is not None and choice.value != "upstream":
        fallback.attempt("attention", "auto", lambda: stack.enter_context(_attention(choice.value).registered()))


def _attention(layers: str) -> Any:
    """The module with the attention of `choose.layers`."""
    name = {"gptoss": "sm90", "attention": "sm80"}[layers]
    return importlib.import_module(f"vllm_gptoss.engine.attention.{name}")


def set_up(model: Any, config: Any) -> FusedPath | None:
    """The fused path if it is chosen. Records the choices for the start-up line.

    Raises:
        ChoiceError: `layers=gptoss` was requested and cannot run.
    """
    here, wish = device.detect(), Settings.load(config.additional_config).layers
    deployment = describe.built_model(describe.configuration(config), model)
    choice = choose.layers(here, deployment, wish)
    startup_line.note("layers", choice)
    if choice.value == "gptoss":
        startup_line.note("layers of many tokens", choose.many_tokens(here, deployment, wish))
    startup_line.note("attention", choose.attention(here, deployment))
    startup_line.note("KV cache", choose.kv_cache_dtype(here, deployment.kv_cache_dtype))
    from vllm_gptoss.engine.attention import decode

    if choice.value == "attention":
        decode.set_up(model)
    if choice.value != "gptoss":
        return None
    several = choose.tokens_per_request(here, deployment, wish)
    if deployment.drafts is not None:
        startup_line.note("tokens per request in layers of many tokens", several)
    few = FusedPath(model, deployment, several.value, wish)
    decode.set_up(model, several.value)
    return few
