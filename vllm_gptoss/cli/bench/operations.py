"""Operations of vLLM that replace, move or discard weights while an engine runs, for `bench consistency`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("reload", "trainer", "partial", "sleep1", "sleep2")
"""`reload`: of all weights from a checkpoint; `trainer`: the same in chunks, as weight transfer does it; `partial`: of
the attention of the first layer alone, with the bytes that it has; `sleep1`, `sleep2`: sleep at that level and wake,
after level 2 with a reload."""

CHUNK = 5
"""Tensors of a chunk of `trainer`."""


def apply(name: str, engine: Any, weights: str, other: str) -> str:
    """Runs an operation on a `vllm.LLM`; `none` does nothing. weights, other: checkpoints, loaded and to reload from.

    Returns the checkpoint that the engine should compute with afterwards.
    """
    match name:
        case "reload":
            _reload(engine, other)
        case "trainer":
            engine.collective_rpc(update_in_chunks, args=(other,))
        case "partial":
            engine.collective_rpc(update_attention, args=(weights,))
        case "sleep1":
            engine.sleep(level=1)
            engine.wake_up()
        case "sleep2":
            engine.sleep(level=2)
            engine.wake_up(tags=["weights"])
            _reload(engine, other)
            engine.wake_up(tags=["kv_cache"])
    return other if name in ("reload", "trainer", "sleep2") else weights


def _reload(engine: Any, weights: str) -> None:
    engine.collective_rpc("reload_weights", kwargs={"weights_path": weights})


def update_in_chunks(worker: Any, directory: str) -> None:
    """On a worker: what vLLM's weight transfer engines do with the tensors of a trainer
    (`distributed/weight_transfer/`): start, load chunks, finish."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    with set_current_vllm_config(worker.vllm_config), runner.device:
        initialize_layerwise_reload(runner.model)
        chunk: list[tuple[str, Any]] = []
        for named in _tensors(directory):
            chunk.append(named)
            if len(chunk) == CHUNK:
                runner.model.load_weights(chunk)
                chunk = []
        runner.model.load_weights(chunk)
        finalize_layerwise_reload(runner.model, runner.model_config)
    runner.reset_lora_state()


def update_attention(worker: Any, directory: str) -> None:
    """On a worker: reloads the attention of layer 0, and nothing else."""
    from vllm.config import set_current_vllm_config

    names = ("q_proj", "k_proj", "v_proj", "o_proj", "sinks")
    chosen = [
        (name, tensor) for name, tensor in _tensors(directory) if any(f"layers.0.self_attn.{n}" in name for n in names)
    ]
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.reload_weights(weights_iterator=iter(chosen))


def _tensors(directory: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  no dict
                yield name, file.get_tensor(name)
