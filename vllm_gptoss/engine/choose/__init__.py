"""The only place that decides what runs: data in, a value with its reason out. Imports neither vLLM nor torch.

Read downwards: `devices` has the GPUs by name, `deployment` is what is to be served, `measured` what ran on a GPU of
ours, `bands` what runs a step of how many tokens, `conditions` every obstacle, `families` the table of GPU families,
`decide` the decisions.

`device` is the GPU that is here; `vllm_config` makes a deployment of vLLM's configuration.
"""

from vllm_gptoss.engine.choose.decide import (
    Choice,
    attention,
    available,
    experts,
    kv_cache_dtype,
    layers,
    many_tokens,
    one_token,
    tensor_parallel,
)
from vllm_gptoss.engine.choose.deployment import Cache, Deployment, RankExperts
from vllm_gptoss.engine.choose.families import FAMILIES, OTHER, Family, reads_sinks, unserved
from vllm_gptoss.engine.choose.families import of as family
from vllm_gptoss.settings import ChoiceError

__all__ = [
    "FAMILIES",
    "OTHER",
    "Cache",
    "Choice",
    "ChoiceError",
    "Deployment",
    "Family",
    "RankExperts",
    "attention",
    "available",
    "experts",
    "family",
    "kv_cache_dtype",
    "layers",
    "many_tokens",
    "one_token",
    "reads_sinks",
    "tensor_parallel",
    "unserved",
]
