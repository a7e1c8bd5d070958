"""Arguments that vLLM's engine refuses, for `plan` and for machines without vLLM. A test compares them with the verdict
of the installed vLLM (`_vllm/serve.py`, `refusal`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_gptoss.cli.recipes import defaults
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import GPT_OSS_20B, MAX_POSITIONS

LONGER: Final = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

REASONING: Final = re.compile(
    r"cohere_command3|cohere_command4|deepseek_r1|deepseek_v3|deepseek_v4|deepseek_v41|ernie45|gemma4|glm45|glm47"
    r"|granite|granite_thinking_parser|hf|holo2|hunyuan_a13b|hy_v3|hy_v4|inkling|k2_horizon|kimi_k2|kimi_k3|ling3"
    r"|mimo|minicpmv|minimax_m2|minimax_m2_append_think|minimax_m3|mistral|muse_glimmer|nemotron_v3|olmo3"
    r"|openai_gptoss|plamo3|poolside_v1|qwen3|seed_oss|step3|step3p5"
)
TOOLS: Final = re.compile(
    r"apertus|cohere_command3|cohere_command4|deepseek_v3|deepseek_v31|deepseek_v32|deepseek_v4|deepseek_v41|dots"
    r"|ernie45|functiongemma|gemma4|gigachat3|glm45|glm47|granite|granite-20b-fc|granite4|hermes|hf|hunyuan_a13b"
    r"|hy_v3|hy_v4|inkling|internlm|jamba|k2_horizon|kimi_k2|kimi_k3|lfm2|ling3|llama3_json|llama4_json"
    r"|llama4_pythonic|longcat|mimo|minicpm5|minimax_m2|minimax_m3|mistral|muse_glimmer|olmo3|openai"
    r"|phi4_mini_json|plamo3|poolside_v1|pythonic|qwen3_coder|qwen3_json|qwen3_xml|seed_oss|step3|step3p5|xlam"
)
"""Names of parsers that vLLM registers."""


def refused(device: Device, config: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each reason why the engine refuses a configuration, and its remedy."""
    dtype = str(config.get("dtype", "auto"))
    if dtype not in ("auto", "bfloat16"):
        yield f"--dtype {dtype} is refused at the start: MXFP4 runs with bfloat16", "leave --dtype out"
    length = config.get("max-model-len", MAX_POSITIONS)
    allowed = env.get(LONGER, "0") in ("1", "true") or "hf-overrides" in config
    if isinstance(length, int) and length > MAX_POSITIONS and not allowed:
        yield f"--max-model-len {length} is refused at the start", f"gpt-oss has {MAX_POSITIONS:,} positions at most"
    yield from _parsers(config)
    template = config.get("chat-template")
    if template is not None and not set(str(template)) & set("{}\n") and not Path(str(template)).is_file():
        yield f"--chat-template {template}: there is no such file", "leave it out: the prompt of gpt-oss is Harmony"
    yield from _combinations(defaults.filled(device, config))


def _parsers(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    automatic, tools = config.get("enable-auto-tool-choice") is True, config.get("tool-call-parser")
    reasoning = config.get("reasoning-parser")
    if reasoning and "reasoning-parser-plugin" not in config and not REASONING.fullmatch(str(reasoning)):
        yield f"--reasoning-parser {reasoning}: vLLM has no such parser", "leave it out, or name openai_gptoss"
    if automatic and not tools:
        yield "--enable-auto-tool-choice is refused without --tool-call-parser", "add --tool-call-parser openai"
    if automatic and tools and "tool-parser-plugin" not in config and not TOOLS.fullmatch(str(tools)):
        yield f"--tool-call-parser {tools}: vLLM has no such parser", "name openai"


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
