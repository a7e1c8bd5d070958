"""The fused path of a step with few tokens: four kernels per layer around the experts.

Per layer: `qkv_rope` (residual, RMSNorm, projection, bias, RoPE, cache write), `attend` (sinks, window), `out_proj`
(bias, residual), `router` (RMSNorm, projection, top-k, softmax), then the experts. The kernels are in
`vllm_gptoss/kernels/`; they are chained by programmatic dependent launch and captured in vLLM's FULL CUDA graphs. A
step of one token can be one launch for all layers: `one_token.py`.

It runs outside torch.compile: `GptOssForCausalLM.forward` is not compiled, only the inner model is, and that one keeps
serving prefill, mixed batches in piecewise graphs and everything this path does not take.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_gptoss import _vllm
from vllm_gptoss.kernels import attention, dense, nvrtc
from vllm_gptoss.model import one_token
from vllm_gptoss.spec import RMS_NORM_EPS

MAX_TOKENS = dense.MAX_TOKENS


def obstacle(model: Any, config: Any) -> str | None:
    """Why this model cannot take the path, or None. config: the `VllmConfig` the model was built with."""
    return _device_obstacle(config) or _feature_obstacle(config) or _shape_obstacle(model)


def _device_obstacle(config: Any) -> str | None:
    if config.device_config.device_type != "cuda" or torch.version.cuda is None:
        return "the kernels are CUDA kernels"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"the kernels are made for sm_90, this GPU is sm_{capability[0]}{capability[1]}"
    if config.model_config.dtype != torch.bfloat16:
        return f"activations are {config.model_config.dtype}, not bfloat16"
    return None


def _feature_obstacle(config: Any) -> str | None:
    parallel = config.parallel_config
    checks = (
        (config.lora_config is not None, "LoRA is on"),
        (config.kv_transfer_config is not None, "a KV connector is configured"),
        (config.cache_config.cache_dtype not in ("auto", "bfloat16"), "the KV cache is not bfloat16"),
        (parallel.data_parallel_size > 1, "data parallelism is on"),
        (parallel.enable_expert_parallel, "expert parallelism is on"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism is on"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism is on"),
        (getattr(parallel, "enable_dbo", False), "dual batch overlap is on"),
        (_vllm.batch_invariant(), "batch invariance is on"),
        (_vllm.only_piecewise_graphs(config), "cudagraph_mode=PIECEWISE has no graph of a whole step"),
        (_vllm.compiles_outer_model(config), "the whole model is compiled by torch.compile"),
    )
    return next((reason for found, reason in checks if found), None)


def _shape_obstacle(model: Any) -> str | None:
    inner = model.model
    for index in range(inner.start_layer, inner.end_layer):
        layer = inner.layers[index]
        block = layer.attn
        qkv, out, gate = block.qkv_proj, block.o_proj, layer.mlp.router
        for linear in (qkv, out, gate):
            weight = getattr(linear, "weight", None)
            if weight is None or weight.dtype != torch.bfloat16 or weight.dim() != 2:
                return "a projection is quantized"
        if layer.mlp.is_sequence_parallel:
            return "sequence-parallel experts are on"
        backend = block.attn.attn_backend.get_name()
        if backend != "FLASH_ATTN":
            return f"the attention backend is {backend}, not FLASH_ATTN"
        why = (
            dense.unsupported(dense.Mode.QKV, *qkv.weight.shape)
            or dense.unsupported(dense.Mode.OUT, *out.weight.shape)
            or dense.unsupported(dense.Mode.ROUTER, *gate.weight.shape)
            or attention.unsupported(block.attn.num_heads, block.attn.num_kv_heads, block.head_dim, 16)
        )
        if why:
            return str(why)
    return None


@dataclass(slots=True)
class Layer:
    """What the kernels need of one layer, looked up once."""

    name: str
    block: Any
    norm: Tensor
    post_norm: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor | None
    gate_weight: Tensor
    gate_bias: Tensor
    cos_sin: Tensor
    """Held here: vLLM may replace the module's buffer by a bf16 copy, and captured graphs keep this one's address."""
    sinks: Tensor
    window: int
    scale: float
    runner: Any
    """vLLM's MoE runner."""
    experts: Any
    """Our kernels for few tokens, or None where another backend runs the experts."""


def _cache_obstacle(layer: Layer) -> str | None:
    attn = layer.block.attn
    cache: Tensor = attn.kv_cache
    if cache.dim() != 4 or cache.shape[1] != attn.num_kv_heads or cache.shape[3] != 2 * attention.HEAD:
        return f"the KV cache has shape {list(cache.shape)}, not [blocks, heads, block size, {2 * attention.HEAD}]"
    if cache.dtype != torch.bfloat16 or cache.stride(3) != 1:
        return f"the KV cache is {cache.dtype} with stride {cache.stride(3)} in its last axis"
    why: str | None = attention.unsupported(attn.num_heads, attn.num_kv_heads, layer.block.head_dim, cache.shape[2])
    return why


def _loads(layer: Layer) -> Iterator[tuple[Any, ...]]:
    """The calls that load the kernels of a layer for steps of 1 to `MAX_TOKENS` tokens; many are alike."""
    device = layer.qkv_weight.device.index or 0
    sms, top_k = dense.multiprocessors(device), layer.runner.moe_config.experts_per_token
    for tokens in range(1, MAX_TOKENS + 1):
        yield dense.kernel, device, dense.plan(dense.Mode.QKV, *layer.qkv_weight.shape, tokens, sms)
        yield dense.kernel, device, dense.plan(dense.Mode.OUT, *layer.out_weight.shape, tokens, sms)
        yield dense.kernel, device, dense.plan(dense.Mode.ROUTER, *layer.gate_weight.shape, tokens, sms, top_k)
        yield attention.kernel, device, attention.plan(tokens, layer.block.attn.num_kv_heads, layer.window)
    if layer.experts is not None:
        yield from layer.experts.loads(torch.int32, MAX_TOKENS)


def _compile(layers: list[Layer]) -> str | None:
    """Compiles every kernel that a step of 1 to `MAX_TOKENS` tokens may need; why that failed, or None."""
    try:
        nvrtc.at_once(load for layer in layers for load in _loads(layer))
    except nvrtc.NvrtcError as error:
        return f"a kernel cannot be compiled: {error}"
    return None


def _own_experts(runner: Any, hidden: int) -> Any:
    """The `FewTokenExperts` of a layer that `GptOssExpertsMethod` prepared for these activations, or None."""
    few = getattr(runner.routed_experts.quant_method, "few", None)
    return few if few is not None and few.up.tiles * dense.BLOCK == hidden else None


class FewTokens:
    """Runs the model for at most `MAX_TOKENS` tokens. Weights are looked up at the first step, after loading."""

    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.config = model.model, config
        self.tensor_parallel = config.parallel_config.tensor_parallel_size
        self.layers: list[Layer] | None = None
        self.one_token: one_token.OneToken | None = None

    def takes(self, tokens: int) -> bool:
        """Whether the step about to run fits: few tokens, real attention metadata, not inside piecewise graphs."""
        if tokens > MAX_TOKENS:
            return False
        context = _vllm.forward_context()
        if context is None or not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
            return False
        if _vllm.in_piecewise_graph(context) or torch.compiler.is_compiling():
            return False
        if self.layers is None:
            self._prepare()
        return bool(self.layers)

    def _prepare(self) -> None:
        """Looks the layers up; an empty list where the cache that vLLM has made by now is not what the kernels read."""
        model = self.model
        self.layers = [self._look_up(model.layers[i]) for i in range(model.start_layer, model.end_layer)]
        why = next(filter(None, map(_cache_obstacle, self.layers)), None)
        if why is None:
            with ThreadPoolExecutor(1) as beside:  # this one kernel takes as long as five of the others
                path = beside.submit(one_token.build, self.layers, self.config, model.aux_hidden_state_layers)
                why = _compile(self.layers)
            self.one_token = path.result()
        if why:
            _vllm.init_logger("vllm.gptoss").warning("layers: upstream from here on (%s)", why)
            self.layers = []

    def __call__(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """Same arguments and result as vLLM's `GptOssModel.forward`."""
        model = self.model
        assert self.layers
        if intermediate is None:
            x = model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            residual = None
        else:
            x, residual = intermediate["hidden_states"], intermediate["residual"]
        context = _vllm.forward_context()
        x, residual, aux = self._all_layers(x, residual, positions, context)
        if not _vllm.is_last_pipeline_rank():
            return _vllm.intermediate_tensors({"hidden_states": x, "residual": residual})
        x, _ = model.norm(x, residual)
        return (x, aux) if aux else x

    def _all_layers(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, context: Any
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        model = self.model
        assert self.layers
        if x.shape[0] == 1 and self.one_token and (done := self.one_token(x, residual, positions, context)):
            return *done, []
        aux = model._maybe_add_hidden_state([], model.start_layer, x, residual)
        for index, layer in enumerate(self.layers, model.start_layer):
            x, residual = self._layer(layer, x, residual, positions, context)
            model._maybe_add_hidden_state(aux, index + 1, x, residual)
        assert residual is not None
        return x, residual, aux

    def _look_up(self, layer: Any) -> Layer:
        block = layer.attn
        bias = block.o_proj.bias
        return Layer(
            name=block.attn.layer_name,
            block=block,
            norm=layer.input_layernorm.weight.data,
            post_norm=layer.post_attention_layernorm.weight.data,
            qkv_weight=block.qkv_proj.weight.data,
            qkv_bias=block.qkv_proj.bias.data,
            out_weight=block.o_proj.weight.data,
            # one rank adds the bias, the all-reduce spreads it
            out_bias=bias.data if _vllm.tensor_parallel_rank() == 0 else None,
            gate_weight=layer.mlp.router.weight.data,
            gate_bias=layer.mlp.router.bias.data,
            cos_sin=block.rotary_emb.cos_sin_cache,
            sinks=block.sinks.data,
            window=block.attn.sliding_window or 0,
            scale=block.scaling,
            runner=layer.mlp.experts,
            experts=_own_experts(layer.mlp.experts, layer.input_layernorm.weight.shape[0]),
        )

    def _layer(
        self, layer: Layer, x: Tensor, residual: Tensor | None, positions: Tensor, context: Any
    ) -> tuple[Tensor, Tensor]:
        """One block. x: [T, C] bf16 is added to residual [T, C] bf16; returns the experts' output and that sum."""
        metadata, block = context.attn_metadata[layer.name], layer.block
        tokens, width = x.shape[0], block.q_size
        q = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
        summed = x if residual is None else torch.empty_like(x)
        dense.qkv_rope(
            x,
            residual,
            layer.norm,
            layer.qkv_weight,
            layer.qkv_bias,
            positions,
            layer.cos_sin,
            context.slot_mapping[layer.name],
            block.attn.kv_cache,
            q,
            None if residual is None else summed,
            RMS_NORM_EPS,
        )
        attended = torch.empty_like(q)
        attention.attend(
            q,
            block.attn.kv_cache,
            layer.sinks,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            attended,
            layer.scale,
            layer.window,
        )
        return self._after_attention(layer, attended, summed)

    def _after_attention(self, layer: Layer, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.empty_like(residual)
        alone = self.tensor_parallel == 1
        dense.out_proj(attended, layer.out_weight, layer.out_bias, residual if alone else None, hidden)
        if alone:
            return self._experts(layer, hidden, None, None), hidden
        summed = torch.empty_like(hidden)
        return self._experts(layer, _vllm.all_reduce(hidden), residual, summed), summed

    def _experts(self, layer: Layer, x: Tensor, residual: Tensor | None, summed: Tensor | None) -> Tensor:
        """Router and experts for norm(x + residual); writes that sum to `summed`."""
        tokens, routed, own = x.shape[0], layer.gate_weight.shape[0], layer.experts
        normed = torch.empty_like(x)
        top_k = layer.runner.moe_config.experts_per_token
        weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
        ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
        logits = None if own else torch.empty((tokens, routed), dtype=torch.float32, device=x.device)
        dense.router(
            x,
            residual,
            layer.post_norm,
            layer.gate_weight,
            layer.gate_bias,
            normed,
            weights,
            ids,
            RMS_NORM_EPS,
            residual_out=summed,
            logits=logits,
        )
        if logits is not None:
            return layer.runner(hidden_states=normed, router_logits=logits.to(normed.dtype))  # type: ignore[no-any-return]
        out = torch.empty_like(x)
        own(normed, ids, weights, out)
        return out if self.tensor_parallel == 1 else _vllm.all_reduce(out)
