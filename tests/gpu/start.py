"""Two layers of the 20b in a real engine with dummy weights, while one plugin function raises:

    python -m tests.gpu.start '{"where": "vllm_gptoss.engine.model.layer_upto16:layer", "settings": {}}'

Prints one JSON line: the number of tokens of each prompt, and the plugin parts that still run. The engine runs in this
process, so the planted fault affects it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 40)
"""Prompts at once: one step each of one launch, six launches, and kernels around cuBLAS's products."""
TOKENS = 4


def main(where: str, settings: dict[str, str]) -> dict[str, Any]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "gptoss",
    }
    from vllm import LLM, SamplingParams

    from benchmarks import shapes
    from benchmarks.paths import paths
    from tests.support import planted
    from vllm_gptoss.cli.recipes.model_config import model_config
    from vllm_gptoss.plugin import register

    register()
    if where:
        planted.plant(where)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(model_config(shapes.shape("20b:2"))))
        engine = LLM(
            model=directory, load_format="dummy", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=64,
            gpu_memory_utilization=0.05, kv_cache_memory_bytes=2**28, additional_config={"gptoss": settings},
            compilation_config={"cudagraph_capture_sizes": [1, 8, 40]},
        )  # fmt: skip
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    made = []
    for count in BATCHES:
        prompts = [{"prompt_token_ids": [7 + at, 8, 9]} for at in range(count)]
        made.append([len(output.outputs[0].token_ids) for output in engine.generate(prompts, params, use_tqdm=False)])
    return {"tokens": made, "paths": engine.apply_model(paths)[0]}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
