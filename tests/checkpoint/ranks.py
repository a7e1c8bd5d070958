"""Let vLLM's own loader load a checkpoint on every rank of a layout, and print what each parameter then holds.

Run as a program: `python -m tests.checkpoint.ranks DIRECTORY OUT LAYOUTS`, the last a JSON list of arguments of vLLM's
EngineArgs. vLLM is imported once and each rank forked from there; ranks talk over gloo. Each writes
OUT/<layout>/<rank>.safetensors with its parameters after loading and before any kernel's repacking, under vLLM's names.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch


def load(rank: int, world: int, directory: str, out: str, parallel: dict[str, Any]) -> None:
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    os.environ["VLLM_DIST_IDENT"] = f"rank {rank}"  # different on each: no shared memory, plain gloo
    args = EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        distributed_executor_backend="external_launcher",
        **parallel,
    )
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, f"file://{out}/rendezvous", rank, "gloo")
        initialize_model_parallel(args.tensor_parallel_size, args.pipeline_parallel_size, backend="gloo")
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        for parameter in model.parameters():
            parameter.data.fill_(PADDING.get(parameter.dtype, 0))
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    held = {name: parameter.detach().clone().contiguous() for name, parameter in model.named_parameters()}
    save_file(held, Path(out) / f"{rank}.safetensors")


PADDING: dict[torch.dtype, float] = {torch.bfloat16: 12345.0, torch.uint8: 222}
"""Put everywhere before loading, so that what was not loaded shows."""


def run(directory: str, out: str, parallel: dict[str, Any]) -> None:
    """One layout: fork its ranks, wait for all of them."""
    world = math.prod(parallel.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    Path(out).mkdir()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=load, args=(r, world, directory, out, parallel)) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    failed = [r for r, process in enumerate(ranks) if process.exitcode != 0]
    for process in ranks:
        process.kill()
    if failed:
        raise SystemExit(f"ranks {failed} of {world} failed for {parallel}")


def main() -> None:
    directory, out, layouts = sys.argv[1:]
    # On a CPU without AMX vLLM has no MXFP4 kernel and refuses to make the parameters. No kernel runs here.
    torch.cpu._is_amx_tile_supported = lambda: True
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader.default_loader
    import vllm.model_executor.models.gpt_oss  # noqa: F401

    for index, parallel in enumerate(json.loads(layouts)):
        run(directory, f"{out}/{index}", parallel)


if __name__ == "__main__":
    main()
