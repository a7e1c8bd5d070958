"""Logs one start-up line per process with the active parts of the plugin and the reasons.

Parts record their decisions while the model is built, and the complete model logs them. vLLM ignores a plugin's import
error, so this line is the proof that the plugin runs.
"""

from __future__ import annotations

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import worker
from vllm_gptoss.version import __version__

_notes: dict[str, str] = {}
_logged: dict[str, str] = {}


def note(part: str, decision: object) -> None:
    """Records a decision. A later decision of the same part (once per layer) replaces it."""
    _notes[part] = str(decision)


def say() -> None:
    """Logs the line in the first worker of a group and clears the recorded decisions."""
    line = "; ".join(f"{part}: {decision}" for part, decision in _notes.items())
    _logged.clear()
    _logged.update(_notes)
    _notes.clear()
    if worker.is_first_rank():
        _vllm.init_logger("vllm.gptoss").info("vllm-gptoss %s is active. %s", __version__, line or "nothing was chosen")


class WorkerChoices:
    """vLLM's `worker_extension_cls`: adds to every worker a method that `collective_rpc` calls, for the web page."""

    def gptoss_choices(self) -> dict[str, str]:
        """The decisions of the model that this worker built last, by part."""
        return dict(_logged)


EXTENSION = f"{__name__}.{WorkerChoices.__name__}"
"""The class's qualified name, as vLLM's configuration has it."""
