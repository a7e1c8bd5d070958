"""One rank of a gloo group that runs vLLM's own gpt-oss layers through `FusedPath`, kernels replaced by `standins`.

`python -m tests.engine.model.ranks LAYOUT RANK WORLD PORT MODEL OUT`: LAYOUT is `tensor` or `pipeline`. Real parts:
vLLM's model class, its sharded weights and loader, its groups and collectives, its forward context, and all of
`FusedPath`; with `tensor` also a KV connector.
Writes to OUT what the last rank has: hidden states of every token of every request, the auxiliary states that EAGLE3
reads, and how far the experts path over vLLM's own runner is from vLLM's MLP.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

BLOCK, BLOCKS = 16, 64
LENGTHS = (170, 41, 23)
"""Tokens of each request; the first is longer than the window."""
STEPS = (1, 2, 3, 5, 8, 4, 7, 6)
"""Tokens that a request adds in a step, in turn: one is plain decode, more is what speculative decoding verifies."""
AUX = (1, 2, 3)


def sequences(vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in LENGTHS]


def plan() -> Iterator[list[tuple[int, int, int, bool]]]:
    """Steps of at most 15 tokens: (request, first position, count, whether these tokens are later taken back)."""
    done, turn = [0] * len(LENGTHS), 0
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
        step, room = [], 15
        for request, length in enumerate(LENGTHS):
            count = min(STEPS[(turn + request) % len(STEPS)], length - done[request], room)
            if count > 0:
                step.append((request, done[request], count))
                room -= count
        if turn % 3 == 2:  # drafts that are rejected: written to the cache, then written over
            yield [(*part, True) for part in step]
        yield [(*part, False) for part in step]
        for request, _, count in step:
            done[request] += count
        turn += 1


class Push:
    """Sums as `PushAllReduce` does, for steps of up to 9 tokens, and checks that no generation follows itself."""

    def __init__(self) -> None:
        self.last, self.calls = -1, 0

    def fits(self, tokens: int) -> bool:
        return tokens <= 9

    def __call__(self, x: Tensor, generation: int) -> Tensor:
        from vllm_gptoss._vllm import worker

        assert self.fits(x.shape[0])
        assert generation != self.last, "a peer may not have read this generation yet"
        self.last, self.calls = generation, self.calls + 1
        summed: Tensor = worker.all_reduce(x)
        return summed


def build(model: str, tensor: int, pipeline: int, layers: str = "upstream") -> tuple[Any, Any]:
    """vLLM's gpt-oss with this rank's weights, as the loader leaves them, and its config."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline, distributed_executor_backend="external_launcher",
        additional_config={"gptoss": {"layers": layers}},
    )  # fmt: skip
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        built = initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(built, config.model_config)
    return built, config


def states(built: Any, config: Any, layout: str) -> tuple[list[Tensor], list[Tensor]] | None:
    """Hidden and auxiliary states [layers, T, C] of every request in float32; None on ranks that do not end there."""
    from vllm.distributed import get_tensor_model_parallel_rank

    from tests.support import standins
    from vllm_gptoss.engine.choose import bands
    from vllm_gptoss.engine.choose import vllm_config as describe
    from vllm_gptoss.engine.model import addresses, fused_path, layer_upto16

    inner = built.model.float()
    path = fused_path.FusedPath(built, describe.configuration(config), wish="gptoss")
    modules = [inner.layers[index] for index in range(inner.start_layer, inner.end_layer)]
    path.places = [addresses.look_up(module, get_tensor_model_parallel_rank()) for module in modules]
    for place, module in zip(path.places, modules, strict=True):
        place.tensors = replace(place.tensors, experts=standins.Experts(module.mlp.experts.routed_experts))  # type: ignore[arg-type]
        kv_heads = place.attention.num_kv_heads
        place.attention.kv_cache = torch.full((BLOCKS, kv_heads, BLOCK, 128), float("nan"))
    layer_upto16.dense = SimpleNamespace(qkv_rope=standins.qkv_rope, out_proj=standins.out_proj, router=standins.router)  # type: ignore[assignment]
    layer_upto16.attention = SimpleNamespace(attend=standins.attend, HEAD=standins.HEAD)  # type: ignore[assignment]
    if layout == "tensor":
        few, path.most = path.most, bands.MANY_TOKENS  # as on a GPU
        path.connect()
        assert path.push is None, "there is no GPU: vLLM's all-reduce serves, and every rank has noticed"
        path.most = few
        push = path.push = Push()  # type: ignore[assignment]
        inner.aux_hidden_state_layers = AUX
    tokens = sequences(config.model_config.get_vocab_size())
    hidden = [torch.full((length, inner.norm.weight.shape[0]), float("nan")) for length in LENGTHS]
    aux = [torch.full((len(AUX), *each.shape), float("nan")) for each in hidden]
    for step in plan():
        out = _step(path, config, tokens, step, layout)
        if out is None:
            continue
        found, extra = out if isinstance(out, tuple) else (out, [])
        at = 0
        for request, first, count, taken_back in step:
            if not taken_back:
                hidden[request][first : first + count] = found[at : at + count]
                for index, state in enumerate(extra):
                    aux[request][index, first : first + count] = state[at : at + count]
            at += count
    if layout == "tensor":
        assert push.calls > 0
    return None if out is None else (hidden, aux)


def _step(path: Any, config: Any, tokens: list[Tensor], step: list[tuple[int, int, int, bool]], layout: str) -> Any:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import set_forward_context

    ids = [tokens[r][a : a + n] + 1 if back else tokens[r][a : a + n] for r, a, n, back in step]
    vocabulary = config.model_config.get_vocab_size()
    input_ids = torch.cat([*ids, torch.zeros(1, dtype=torch.int64)]) % vocabulary  # the last token is padding
    positions = torch.cat([*(torch.arange(a, a + n) for _, a, n, _ in step), torch.zeros(1, dtype=torch.int64)])
    # each request's blocks lie in the cache in another order
    table = torch.stack([(torch.arange(16) * 3 + r * 17 + 5) % BLOCKS for r, *_ in step]).int()
    slots = [
        int(table[i, p // BLOCK]) * BLOCK + p % BLOCK for i, (_, a, n, _) in enumerate(step) for p in range(a, a + n)
    ]
    metadata = SimpleNamespace(
        block_table=table,
        seq_lens=torch.tensor([a + n for _, a, n, _ in step]).int(),
        query_start_loc=torch.tensor([0, *(n for _, _, n, _ in step)]).cumsum(0).int(),
    )
    names = [place.name for place in path.places]
    of_layer, mapping = dict.fromkeys(names, metadata), dict.fromkeys(names, torch.tensor([*slots, -1]))
    with set_forward_context(of_layer, config, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, slot_mapping=mapping):
        assert not path.could_take(len(input_ids)), "a piecewise graph belongs to the compiled model"
    with (
        torch.inference_mode(),
        set_forward_context(of_layer, config, cudagraph_runtime_mode=CUDAGraphMode.FULL, slot_mapping=mapping),
    ):
        assert path.could_take(len(input_ids))
        if layout == "tensor":
            return path(input_ids, positions)
        return _pipeline_stage(path, input_ids, positions)


def _pipeline_stage(path: Any, input_ids: Tensor, positions: Tensor) -> Any:
    """Runs this rank's layers; what lies between ranks goes over the group as vLLM's runner sends it."""
    from vllm.distributed import get_pp_group
    from vllm.sequence import IntermediateTensors

    group = get_pp_group()
    if group.is_first_rank:
        group.send_tensor_dict(path(input_ids, positions).tensors)
        return None
    return path(None, positions, IntermediateTensors(group.recv_tensor_dict()))


def experts_distance(model: str, tensor: int) -> float:
    """Relative distance of the experts over vLLM's own runner to vLLM's norm and MLP, in bfloat16, all-reduced."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from tests.support import standins
    from vllm_gptoss.engine.model import addresses, layer_upto16

    built, config = build(model, tensor, 1)
    layer_upto16.dense = SimpleNamespace(router=standins.router)  # type: ignore[assignment]
    module = built.model.layers[0]
    place = addresses.look_up(module, 0)
    weight = place.tensors.router_weight.clone()  # a CPU repacks linear weights
    tensors = replace(place.tensors, experts=None, router_weight=weight)
    with set_current_vllm_config(config):
        process_weights_after_loading(built, config.model_config, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(5, built.model.norm.weight.shape[0], generator=generator).bfloat16() for _ in range(2))
    summed = torch.empty_like(x)
    with torch.inference_mode(), set_forward_context({}, config, num_tokens=5):
        routed = layer_upto16.route(tensors, x, residual, True, summed)
        got = layer_upto16.experts(tensors, *routed, None, place.others)
        normed, wanted_sum = module.post_attention_layernorm(x.clone(), residual.clone())
        wanted = module.mlp(normed)
    assert torch.equal(summed, wanted_sum)
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def main(layout: str, rank: int, world: int, port: int, model: str, out: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    from tests.engine.model import elsewhere
    from vllm_gptoss.plugin import register

    register()
    tensor, pipeline = (world, 1) if layout == "tensor" else (1, world)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(tensor, pipeline)
    built, config = build(model, tensor, pipeline)
    connector = elsewhere.connect(config) if layout == "tensor" else None
    found = states(built, config, layout)
    distance = experts_distance(model, tensor) if layout == "tensor" else 0.0
    if found is not None and rank in (0, world - 1):
        saved = connector.saved if connector else 0
        torch.save({"hidden": found[0], "aux": found[1], "distance": distance, "saved": saved}, f"{out}.{rank}")
    # gloo's thread can abort at the end of a rank if the peer has already exited
    torch.distributed.barrier()
    destroy_model_parallel()
    destroy_distributed_environment()


if __name__ == "__main__":
    torch.set_num_threads(1)
    layout, rank, world, port, model, out = sys.argv[1:]
    main(layout, int(rank), int(world), int(port), model, str(Path(out)))
