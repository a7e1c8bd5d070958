"""The fused path of a step with few tokens: six launches a layer, or one for all layers (`one_token`).

It also takes decode steps of many tokens, to which `many_tokens` gives kernels around cuBLAS's products.

It runs outside torch.compile: `GptOssForCausalLM.forward` is not compiled, only the inner model is, and that one keeps
serving prefill, mixed batches in piecewise graphs and everything this path does not take. The launches are captured in
vLLM's FULL CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_gptoss import choose, describe, device
from vllm_gptoss._vllm import worker
from vllm_gptoss.aside import NotHereError
from vllm_gptoss.choose import bands
from vllm_gptoss.kernels import attention, dense, nvrtc
from vllm_gptoss.kernels.layer import LayerTensors
from vllm_gptoss.model import chain, many_tokens, one_token
from vllm_gptoss.model.place import Place, transferred

if TYPE_CHECKING:
    from vllm_gptoss.experts.sm90 import LayerExperts

MAX_TOKENS = bands.FUSED_TOKENS


def look_up(layer: Any, tensor_parallel_rank: int) -> Place:
    """What the kernels need of one of vLLM's layers, looked up once, after loading."""
    block, router, runner = layer.attn, layer.mlp.router, layer.mlp.experts
    bias = block.o_proj.bias
    own = _own_experts(runner, layer.input_layernorm.weight.shape[0])
    tensors = LayerTensors(
        norm=layer.input_layernorm.weight.data,
        qkv_weight=block.qkv_proj.weight.data,
        qkv_bias=block.qkv_proj.bias.data,
        # Held here: vLLM may replace the module's buffer by a bf16 copy, and captured graphs keep this one's address.
        cos_sin=block.rotary_emb.cos_sin_cache,
        sinks=block.sinks.data,
        window=block.attn.sliding_window or 0,
        out_weight=block.o_proj.weight.data,
        out_bias=bias.data if tensor_parallel_rank == 0 else None,  # one rank adds it, the all-reduce spreads it
        post_norm=layer.post_attention_layernorm.weight.data,
        router_weight=router.weight.data,
        router_bias=router.bias.data,
        active=runner.moe_config.experts_per_token,
        experts=own.few if own is not None else None,
    )
    return Place(block.attn.layer_name, tensors, block.attn, runner, own)


def _own_experts(runner: Any, hidden: int) -> LayerExperts | None:
    """The kernels of a layer that `GptOssExpertsMethod` prepared for these activations, or None."""
    from vllm_gptoss.experts import method

    own = method.own(runner.routed_experts.quant_method)
    return own if own is not None and own.few.up.tiles * dense.BLOCK == hidden else None


def loads(place: Place) -> Iterator[tuple[Any, ...]]:
    """The calls that load the kernels of a layer for steps of 1 to `MAX_TOKENS` tokens; many are alike."""
    tensors = place.tensors
    index = tensors.qkv_weight.device.index or 0
    sms, kv_heads = dense.multiprocessors(index), place.attention.num_kv_heads
    router = tensors.router_weight.shape
    for tokens in range(1, MAX_TOKENS + 1):
        yield dense.kernel, index, dense.plan(dense.Mode.QKV, *tensors.qkv_weight.shape, tokens, sms)
        yield dense.kernel, index, dense.plan(dense.Mode.OUT, *tensors.out_weight.shape, tokens, sms)
        yield dense.kernel, index, dense.plan(dense.Mode.ROUTER, *router, tokens, sms, tensors.active)
        yield attention.kernel, index, attention.plan(tokens, kv_heads, tensors.window)
    if tensors.experts is not None:
        yield from tensors.experts.loads(torch.int32, MAX_TOKENS)


class FewTokens:
    """Runs the model for at most `MAX_TOKENS` tokens, and decode steps of at most `most`.

    `prepare` at the first step, when weights and cache are there.
    """

    def __init__(self, model: Any, deployment: choose.Deployment) -> None:
        self.model, self.deployment = model.model, deployment
        self.places: list[Place] = []
        self.one_token: one_token.OneToken | None = None
        self.most = many_tokens.most(deployment)

    def could_take(self, tokens: int) -> bool:
        """Whether the step about to run fits: few tokens, or one of each request; real attention metadata, not inside
        piecewise graphs."""
        if tokens > self.most:
            return False
        context = worker.forward_context()
        if context is None or not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
            return False
        if worker.in_piecewise_graph(context) or torch.compiler.is_compiling():
            return False
        return tokens <= MAX_TOKENS or worker.longest_query(context) == 1

    def leave_many(self) -> None:
        """Steps of many tokens are upstream's from here on."""
        self.most = MAX_TOKENS

    def prepare(self, wish: str) -> choose.Choice[str]:
        """Looks the layers up, asks again now that the cache is there, and compiles every kernel that a step may need.

        Raises:
            NotHereError: the cache is not what the kernels read.
            NvrtcError: a kernel cannot be compiled.
        """
        model, rank = self.model, worker.tensor_parallel_rank()
        places = [look_up(model.layers[i], rank) for i in range(model.start_layer, model.end_layer)]
        self.deployment = describe.first_step(self.deployment, places, model.aux_hidden_state_layers)
        choice = choose.layers(device.detect(), self.deployment, wish)
        if choice.value != "gptoss":
            raise NotHereError(choice.reason)
        with ThreadPoolExecutor(2) as beside:  # the one launch's kernel takes as long as five of the others
            path = beside.submit(one_token.build, places, self.deployment)
            most = beside.submit(many_tokens.prepared, places, self.deployment)
            nvrtc.at_once(load for place in places for load in loads(place))
        self.places, self.one_token, self.most = places, path.result(), most.result()
        return choice

    def __call__(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Same arguments and result as vLLM's `GptOssModel.forward`."""
        model = self.model
        if intermediate is None:
            x = model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            residual = None
        else:
            x, residual = intermediate["hidden_states"], intermediate["residual"]
        x, residual, aux = self._all_layers(x, residual, positions, worker.forward_context())
        if not worker.is_last_pipeline_rank():
            return worker.intermediate_tensors({"hidden_states": x, "residual": residual})
        x, _ = model.norm(x, residual)
        return (x, aux) if aux else x

    def _all_layers(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, context: Any
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        model = self.model
        one = self.one_token if x.shape[0] <= bands.ONE_TOKEN else None
        if one and (done := one(x, residual, positions, context)):
            return *done, []
        aux = model._maybe_add_hidden_state([], model.start_layer, x, residual)
        for index, place in enumerate(self.places, model.start_layer):
            x, residual = self._layer(place, x, residual, positions, context)
            model._maybe_add_hidden_state(aux, index + 1, x, residual)
        assert residual is not None
        return x, residual, aux

    def _layer(
        self, place: Place, x: Tensor, residual: Tensor | None, positions: Tensor, context: Any
    ) -> tuple[Tensor, Tensor]:
        """One block. x: [T, C] bf16 is added to residual [T, C] bf16; returns the experts' output and that sum."""
        with transferred([place], context):
            if x.shape[0] > MAX_TOKENS:
                return many_tokens.layer(place, x, residual, positions, context)
            return chain.layer(
                place.tensors,
                place.attention.kv_cache,
                place.requests(context),
                positions,
                x,
                residual,
                reduce=worker.all_reduce if self.deployment.tensor_parallel > 1 else None,
                others=place.others if place.tensors.experts is None else None,
            )
