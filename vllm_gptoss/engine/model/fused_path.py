"""The fused path of a step with few tokens: six launches a layer, or one for all layers (`one_token`).

It also takes decode steps of many tokens, to which `many_tokens` gives kernels around cuBLAS's products. Each request
has one token there, or as many as `choose.tokens_per_request` allows where drafts are verified.

It runs outside torch.compile: `GptOssForCausalLM.forward` is not compiled, only the inner model is, and that one keeps
serving prefill, mixed batches in piecewise graphs and everything this path does not take. The launches are captured in
vLLM's FULL CUDA graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import worker
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import bands, device
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.engine.kernels import all_reduce, attention, cache, dense, nvrtc
from vllm_gptoss.engine.model import addresses, layer_upto16, many_tokens, one_token
from vllm_gptoss.engine.model.layer_binding import Place, transferred
from vllm_gptoss.fallback import UnavailableError

logger = logging.getLogger(__name__)

MAX_TOKENS = bands.FUSED_TOKENS


def loads(place: Place) -> Iterator[tuple[Any, ...]]:
    """The calls that load the kernels of a layer for steps of 1 to `MAX_TOKENS` tokens, and allocate what those keep.

    Many are alike.
    """
    tensors = place.tensors
    index = tensors.qkv_weight.device.index or 0
    sms, kv_heads = dense.multiprocessors(index), place.attention.num_kv_heads
    router, element = tensors.router_weight.shape, cache.element(place.cache)
    yield attention.allocate, index, kv_heads
    for tokens in range(1, MAX_TOKENS + 1):
        yield dense.kernel, index, dense.plan(dense.Mode.QKV, *tensors.qkv_weight.shape, tokens, sms, 0, element)
        yield dense.kernel, index, dense.plan(dense.Mode.OUT, *tensors.out_weight.shape, tokens, sms)
        yield dense.kernel, index, dense.plan(dense.Mode.ROUTER, *router, tokens, sms, tensors.active)
        yield attention.kernel, index, attention.plan(tokens, kv_heads, tensors.window, element)
    if tensors.experts is not None:
        yield from tensors.experts.loads(torch.int32, MAX_TOKENS)


class FusedPath:
    """Runs the model for at most `MAX_TOKENS` tokens, and decode steps of at most `most`, `per_request` of a request.

    `prepare` at the first step, when weights and cache are there.
    """

    def __init__(self, model: Any, deployment: choose.Deployment, per_request: int = 1, wish: str = "auto") -> None:
        self.model, self.deployment, self.per_request, self.wish = model.model, deployment, per_request, wish
        self.ranks = deployment.tensor_parallel
        self.places: list[Place] = []
        self.one_token: one_token.OneToken | None = None
        self.push: all_reduce.PushAllReduce | None = None
        self.most = many_tokens.most(deployment, wish)

    def could_take(self, tokens: int) -> bool:
        """Whether the step about to run fits: few tokens, or at most `per_request` of each request; real attention
        metadata, not inside piecewise graphs. While a graph is captured, of every step that may replay it."""
        if tokens > self.most or self._adapts():
            return False
        context = worker.forward_context()
        if context is None or not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
            return False
        if worker.in_piecewise_graph(context) or torch.compiler.is_compiling():
            return False
        return tokens <= MAX_TOKENS or worker.longest_query(context) <= self.per_request

    def _adapts(self) -> bool:
        """Whether the step has a LoRA adapter. While a graph is captured: whether steps that replay it may have one."""
        if not self.deployment.lora:
            return False
        attention = self.model.layers[self.model.start_layer].attn
        return bool(worker.has_adapter((attention.qkv_proj, attention.o_proj)))

    def check_addresses(self) -> bool:
        """Returns True if every weight is where `prepare` found it.

        Raises:
            UnavailableError: a weight has moved since `prepare`; the message names it.
        """
        if why := addresses.moved(self.places):
            raise UnavailableError(why)
        return True

    def leave_many(self) -> None:
        """Steps of many tokens are upstream's from here on."""
        self.most = MAX_TOKENS

    def prepare(self, wish: str) -> choose.Choice[str]:
        """Collects the layers, repeats the choice with the allocated cache, and compiles all kernels for a step.

        Raises:
            UnavailableError: the cache is not what the kernels read.
            NvrtcError: a kernel cannot be compiled.
        """
        model, rank = self.model, worker.tensor_parallel_rank()
        places = [addresses.look_up(model.layers[i], rank) for i in range(model.start_layer, model.end_layer)]
        self.deployment = describe.first_step(self.deployment, places, model.aux_hidden_state_layers)
        choice = choose.layers(device.detect(), self.deployment, wish)
        if choice.value != "gptoss":
            raise UnavailableError(choice.reason)
        began = time.monotonic()
        with ThreadPoolExecutor(2) as beside:  # the one launch's kernel takes as long as five of the others
            path = beside.submit(one_token.build, places, self.deployment, wish)
            most = beside.submit(many_tokens.prepared, places, self.deployment, wish)
            nvrtc.at_once(load for place in places for load in loads(place))
        self.places, self.one_token, self.most = places, path.result(), most.result()
        logger.info("kernels of the fused layers: ready after %.1f s", time.monotonic() - began)
        return choice

    def connect(self) -> None:
        """Agrees with the other ranks on the largest step, and connects the all-reduce of `all_reduce`.

        Without it vLLM's all-reduce runs, on all ranks. A collective: every rank is prepared.
        """
        if self.ranks == 1:
            return
        say = _vllm.init_logger("vllm.gptoss").info
        agreed = worker.gathered((self.most, self.one_token and self.one_token.step.plan))
        self.most = min(most for most, _ in agreed)
        if any(plan != agreed[0][1] for _, plan in agreed):
            self.one_token = None
            say("layers: six launches each for one token too (not all ranks have the same kernel)")
        one, weight, rank = self.one_token, self.places[0].tensors.out_weight, worker.tensor_parallel_rank()
        choice = choose.all_reduce(self.deployment, self.wish)
        try:
            if choice.value == bands.UPSTREAM:
                raise UnavailableError(choice.reason)
            where = (weight.device.index or 0, rank, self.ranks, weight.shape[0])
            self.push = all_reduce.connect(*where, worker.gathered, one.step.plan.received_bytes if one else 0)
            if one:
                one.join(self.push)
        except UnavailableError as error:
            self.one_token, self.most = None, MAX_TOKENS
            say("layers: vLLM's all-reduce (%s)", error)

    def _reduce(self, tokens: int) -> layer_upto16.Reduce | None:
        """Sums over the ranks in a step of so many tokens, the same function on all of them; None on one GPU."""
        if self.ranks == 1:
            return None
        return self.push if self.push and self.push.fits(tokens) else lambda x, _: worker.all_reduce(x)

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
        reduce = self._reduce(x.shape[0])
        with transferred([place], context):
            if x.shape[0] > MAX_TOKENS:
                return many_tokens.layer(place, x, residual, positions, context, reduce)
            return layer_upto16.layer(
                place.tensors,
                place.cache,
                place.requests(context),
                positions,
                x,
                residual,
                reduce=reduce,
                others=place.others if place.tensors.experts is None else None,
            )
