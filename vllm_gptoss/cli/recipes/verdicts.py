"""Arguments that vLLM's engine refuses, for `plan` and for machines without vLLM. A test compares them with the verdict
of the installed vLLM (`_vllm/serve.py`, `refusal`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_gptoss.cli.recipes import defaults
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import GPT_OSS_20B, MAX_POSITIONS

LONGER: Final = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def refused(device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each reason why the engine refuses a configuration, and its remedy."""
    dtype = str(config.get("dtype", "auto"))
    if dtype not in ("auto", "bfloat16"):
        yield f"--dtype {dtype} is refused at the start: MXFP4 runs with bfloat16", "leave --dtype out"
    length = config.get("max-model-len", MAX_POSITIONS)
    allowed = env.get(LONGER, "0") in ("1", "true") or "hf-overrides" in config
    if isinstance(length, int) and length > MAX_POSITIONS and not allowed:
        yield f"--max-model-len {length} is refused at the start", f"gpt-oss has {MAX_POSITIONS:,} positions at most"
    if config.get("enable-auto-tool-choice") is True and not config.get("tool-call-parser"):
        yield "--enable-auto-tool-choice is refused without --tool-call-parser", "add --tool-call-parser openai"
    template = config.get("chat-template")
    if template is not None and not set(str(template)) & set("{}\n") and not Path(str(template)).is_file():
        yield f"--chat-template {template}: there is no such file", "leave it out: the prompt of gpt-oss is Harmony"
    yield from _combinations(defaults.filled(device, config))


def _combinations(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tokens, length = config["max-num-batched-tokens"], config["max-model-len"]
    whole = config["enable-chunked-prefill"] is False or config.get("no-enable-chunked-prefill") is True
    if whole and isinstance(length, int) and tokens < length:
        what = f"without chunked prefill, --max-num-batched-tokens {tokens} is refused below --max-model-len {length}"
        yield what, "remove --no-enable-chunked-prefill"
    tensor, context = config.get("tensor-parallel-size", 1), config.get("decode-context-parallel-size", 1)
    heads = GPT_OSS_20B.kv_heads
    if isinstance(tensor, int) and isinstance(context, int) and context > 1 and (tensor <= heads or tensor % context):
        what = f"--decode-context-parallel-size {context} is refused with --tensor-parallel-size {tensor}"
        yield what, f"leave it out: it needs a multiple of it above the {heads} KV heads"
    if config.get("enable-log-outputs") is True and config.get("enable-log-requests") is not True:
        yield "--enable-log-outputs is refused without --enable-log-requests", "add the second, or remove the first"
