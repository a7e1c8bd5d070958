"""Environment variables of old gpt-oss recipes that vLLM 0.32 and 0.33 no longer read, and what replaced them.

Checked against `vllm/envs.py` of both versions, which has no such names. vLLM only warns "Unknown vLLM environment
variable", without a remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_MXFP8 = "GPTOSS_EXPERTS=flashinfer_trtllm_mxfp8 (MXFP8 activations on sm100: faster, lossy)"
_TRTLLM = "nothing on sm100; to force it: --attention-config.use_trtllm_attention true"

REPLACED: Final[Mapping[str, str]] = {
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": _MXFP8,
    "VLLM_USE_FLASHINFER_MXFP4_MOE": _MXFP8,
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "nothing: BF16 activations are the default on sm100",
    "VLLM_USE_FLASHINFER_MXFP4_BF16_MOE": "nothing: BF16 activations are the default on sm100",
    "VLLM_MXFP4_USE_MARLIN": "--moe-backend marlin",
    "VLLM_USE_FLASHINFER_MOE_FP4": "--moe-backend flashinfer_trtllm",
    "VLLM_FLASHINFER_MOE_BACKEND": "--moe-backend flashinfer_trtllm or _cutlass",
    "VLLM_ATTENTION_BACKEND": "nothing: one that reads sinks is chosen; to force another: --attention-backend",
    "VLLM_USE_TRTLLM_ATTENTION": _TRTLLM,
    "VLLM_USE_TRTLLM_DECODE_ATTENTION": _TRTLLM,
    "VLLM_USE_TRTLLM_CONTEXT_ATTENTION": _TRTLLM,
    "VLLM_FLASH_ATTN_VERSION": "--attention-config.flash_attn_version",
    "VLLM_USE_AITER_UNIFIED_ATTENTION": "VLLM_ROCM_USE_AITER=1 and --attention-backend ROCM_AITER_UNIFIED_ATTN",
    "VLLM_USE_AITER_TRITON_FUSED_SPLIT_QKV_ROPE": "nothing: the fusion is no longer a switch",
    "VLLM_USE_AITER_TRITON_FUSED_ADD_RMSNORM_PAD": "nothing: the fusion is no longer a switch",
    "VLLM_USE_AITER_TRITON_GEMM": "nothing: VLLM_ROCM_USE_AITER_TRITON_GEMM is on by default",
    "VLLM_USE_V1": "nothing: there is only one engine",
    "PYTHON_EXECUTION_BACKEND": "nothing: --tool-server demo runs python in the plugin's own sandbox",
    "TRITON_HIP_PRESHUFFLE_SCALES": "nothing: vLLM shuffles the scales where AITER needs it",
}

IGNORED_BY_US: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_RESPONSES_API_STORE": "responses are stored by the plugin, in GPTOSS_STORE",
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": "any MCP label works with the plugin's --tool-server",
}
"""Variables of vLLM's Responses handler that the plugin's does not need."""


def remedy(instead: str) -> str:
    """What to do about a variable, from what replaced it."""
    kind, sign, why = instead.partition(": ")
    return f"unset it: {why}" if sign and kind == "nothing" else f"unset it; instead: {instead}"


def dead(environ: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Variables that are set and do nothing: name to what replaces it.

    `known` are the names that the installed vLLM reads; any other `VLLM_*` name does nothing.
    """
    found = {name: REPLACED[name] for name in environ if name in REPLACED}
    read = set(known)
    if read:
        unknown = (name for name in environ if name.startswith("VLLM_") and name not in read and name not in found)
        found |= dict.fromkeys(unknown, "nothing: this vLLM has no such variable")
    return dict(sorted(found.items()))
