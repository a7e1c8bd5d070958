"""The one start-up line per process that says which parts of the plugin are active, and why.

Parts note what they decided while the model is built; the model says it when it is complete. vLLM swallows a plugin's
import error, so this line is the proof that the plugin runs.
"""

from __future__ import annotations

from typing import Any

from vllm_gptoss import _vllm, choose, device, spec
from vllm_gptoss.version import __version__

_notes: dict[str, str] = {}


def note(part: str, decision: object) -> None:
    """Keeps a decision for the line; the same part noted again (once per layer) overwrites itself."""
    _notes[part] = str(decision)


def attention_of(model: Any, config: Any) -> choose.Choice[str]:
    """The backend that this rank's layers were built with, and why: our table's reason where it agrees."""
    layer = next((layer for layer in model.model.layers if hasattr(layer, "attn")), None)
    if layer is None:
        return choose.Choice("none", "this pipeline stage has no layer")
    name = layer.attn.attn.attn_backend.get_name()
    if config.attention_config.backend is not None:
        return choose.Choice(name, "--attention-backend was given")
    shape = choose.Shape(tensor_parallel=config.parallel_config.tensor_parallel_size)
    chosen = choose.attention(device.detect(), spec.GPT_OSS_20B, shape)
    return chosen if chosen.value == name else choose.Choice(name, "vLLM's own choice")


def say() -> None:
    """Logs the line in the worker that speaks for its group, and forgets what was noted."""
    line = "; ".join(f"{part}: {decision}" for part, decision in _notes.items())
    _notes.clear()
    if _vllm.is_first_rank():
        _vllm.init_logger("vllm.gptoss").info("vllm-gptoss %s is active. %s", __version__, line or "nothing was chosen")
