"""Ray Serve LLM as `recipes/deploy/ray_serve.yaml` has it, with the small model on a CPU, in a separate process.

usage: ray_serve.py MODEL STATE PORT; each change of the number of running replicas is a line of JSON. A line on stdin
ends it. ray reads its variables when it is imported: the process is started with them.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve.llm import build_openai_app

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "deploy" / "ray_serve.yaml"
SMALL = {"max_model_len": 16384, "max_num_seqs": 64, "enforce_eager": True}
SCALING = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 2, "downscale_delay_s": 4,
    "metrics_interval_s": 1, "look_back_period_s": 4,
}  # fmt: skip
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "GPTOSS_TOOLS": "demo"}


def adapted(application: dict[str, Any], model: str, state: str) -> dict[str, Any]:
    """The recipe's application with what the small model needs in the place of weights, GPUs and replicas."""
    arguments: dict[str, Any] = copy.deepcopy(application["args"])
    (config,) = arguments["llm_configs"]
    del config["accelerator_type"]
    config["accelerator_config"] = {"kind": "cpu"}
    config["model_loading_config"] = {"model_id": "gpt-oss", "model_source": model}
    config["engine_kwargs"] = SMALL
    config["deployment_config"]["autoscaling_config"] = SCALING
    config["runtime_env"]["env_vars"] |= VARIABLES | {"XDG_STATE_HOME": state}
    return arguments


def replicas() -> int:
    """Running replicas of the deployment that holds the engine."""
    deployments = serve.status().applications["gpt-oss"].deployments
    (states,) = (each.replica_states for name, each in deployments.items() if name.startswith("LLMServer"))
    return int(states.get("RUNNING", 0))


def main(model: str, state: str, port: str) -> None:
    (application,) = yaml.safe_load(RECIPE.read_text())["applications"]
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(build_openai_app(adapted(application, model, state)), name="gpt-oss", route_prefix="/")
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    seen, began = -1, time.monotonic()
    while not over.wait(0.3):
        if (now := replicas()) != seen:
            seen = now
            print(json.dumps({"replicas": now, "after_s": round(time.monotonic() - began)}), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
