"""The one start-up line per process that says which parts of the plugin are active, and why.

Parts note what they decided while the model is built; the model says it when it is complete. vLLM swallows a plugin's
import error, so this line is the proof that the plugin runs.
"""

from __future__ import annotations

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import worker
from vllm_gptoss.version import __version__

_notes: dict[str, str] = {}


def note(part: str, decision: object) -> None:
    """Keeps a decision for the line; the same part noted again (once per layer) overwrites itself."""
    _notes[part] = str(decision)


def say() -> None:
    """Logs the line in the worker that speaks for its group, and forgets what was noted."""
    line = "; ".join(f"{part}: {decision}" for part, decision in _notes.items())
    _notes.clear()
    if worker.is_first_rank():
        _vllm.init_logger("vllm.gptoss").info("vllm-gptoss %s is active. %s", __version__, line or "nothing was chosen")
