"""Run in a fresh interpreter by doctor: starts vLLM's own plugin discovery and prints what it found, as one JSON line.

A subprocess, because discovery happens once per process and because a broken plugin may take the interpreter with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from vllm_gptoss import _vllm
from vllm_gptoss.engine import spec


def main() -> None:
    # vLLM and its dependencies print while they load; only our line may reach stdout.
    with contextlib.redirect_stdout(sys.stderr):
        answer = discover()
    print(json.dumps(answer))


def discover() -> dict[str, Any]:
    answer: dict[str, Any] = {"vllm": _vllm.version()}
    try:
        _vllm.load_plugins()
        answer["model"] = _vllm.registered_model(spec.ARCHITECTURE)
        answer["quantization"] = _vllm.registered_quantization(spec.QUANTIZATION)
        answer["endpoint_plugins"] = _vllm.allowed_endpoint_plugins()
        answer["rust_frontend"] = _vllm.uses_rust_frontend()
        answer["variables"] = _vllm.environment_variables()
        from vllm_gptoss.server import parts

        answer["parts"] = parts.failures()
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["VLLM_PLUGINS"] = os.environ.get("VLLM_PLUGINS")
    return answer


if __name__ == "__main__":
    main()
