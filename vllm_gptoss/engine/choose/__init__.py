"""The only place that decides what runs: data in, a value with its reason out. Imports neither vLLM nor torch.

Modules, in reading order: `devices` lists GPUs by name. `deployment` describes the model and its configuration.
`measured` lists the combinations that were run on real GPUs. `bands` maps the tokens of a step to an implementation.
`conditions` lists every obstacle, `families` is the table of GPU families, and `decide` makes the decisions.

`device` detects the local GPU. `vllm_config` builds a deployment from vLLM's configuration.
"""

from vllm_gptoss.engine.choose.decide import (
    Choice,
    all_reduce,
    attention,
    available,
    experts,
    kv_cache_dtype,
    layers,
    many_tokens,
    one_token,
    runner,
    tensor_parallel,
    tokens_per_request,
)
from vllm_gptoss.engine.choose.deployment import Deployment, KvCache, RankExperts
from vllm_gptoss.engine.choose.families import FAMILIES, OTHER, GpuFamily, reads_sinks, unserved
from vllm_gptoss.engine.choose.families import of as family
from vllm_gptoss.settings import ChoiceError

__all__ = [
    "FAMILIES",
    "OTHER",
    "Choice",
    "ChoiceError",
    "Deployment",
    "GpuFamily",
    "KvCache",
    "RankExperts",
    "all_reduce",
    "attention",
    "available",
    "experts",
    "family",
    "kv_cache_dtype",
    "layers",
    "many_tokens",
    "one_token",
    "reads_sinks",
    "runner",
    "tensor_parallel",
    "tokens_per_request",
    "unserved",
]
