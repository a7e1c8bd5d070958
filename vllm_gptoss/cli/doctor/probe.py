"""Run by doctor in two new interpreters at once: prints what one question finds, as one JSON line.

Subprocesses, because discovery happens once per process and because a broken plugin may take the interpreter with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss.engine import spec


def main() -> None:
    gc.disable()  # the collector takes 15 % of the time of vLLM's imports, which leave no garbage
    # vLLM and its dependencies print while they load; only our line may reach stdout.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            _vllm.import_without_compiler()
            answer = QUESTIONS[sys.stdin.read()]()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


def discovered() -> dict[str, Any]:
    """What vLLM's own plugin discovery registers."""
    _vllm.load_plugins()
    return {
        "model": _vllm.registered_model(spec.ARCHITECTURE),
        "quantization": _vllm.registered_quantization(spec.QUANTIZATION),
        "endpoint_plugins": _vllm.allowed_endpoint_plugins(),
        "rust_frontend": bool(_vllm.variable("VLLM_USE_RUST_FRONTEND")),
        "variables": _vllm.environment_variables(),
        "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS"),
    }


def imported() -> dict[str, Any]:
    """The parts of the endpoint plugin that cannot be imported."""
    from vllm_gptoss.server import parts

    return {"parts": parts.failures()}


QUESTIONS = {"discovery": discovered, "parts": imported}

if __name__ == "__main__":
    main()
