"""The only place that decides what runs: data in, a value with its reason out. Imports neither vLLM nor torch.

Modules, in reading order: `devices` lists GPUs by name. `deployment` describes the model and its configuration.
`measured` lists the combinations that were run on real GPUs. `bands` maps the tokens of a step to an implementation.
`conditions` lists every obstacle, `families` is the table of GPU families, and `decide` makes the decisions.

`device` detects the local GPU. `vllm_config` builds a deployment from vLLM's configuration.
"""

from vllm_gptoss.engine.choose import families
from vllm_gptoss.engine.choose.decide import Choice as Choice
from vllm_gptoss.engine.choose.decide import all_reduce as all_reduce
from vllm_gptoss.engine.choose.decide import attention as attention
from vllm_gptoss.engine.choose.decide import available as available
from vllm_gptoss.engine.choose.decide import experts as experts
from vllm_gptoss.engine.choose.decide import kv_cache_dtype as kv_cache_dtype
from vllm_gptoss.engine.choose.decide import layers as layers
from vllm_gptoss.engine.choose.decide import many_tokens as many_tokens
from vllm_gptoss.engine.choose.decide import one_token as one_token
from vllm_gptoss.engine.choose.decide import runner as runner
from vllm_gptoss.engine.choose.decide import tensor_parallel as tensor_parallel
from vllm_gptoss.engine.choose.decide import tokens_per_request as tokens_per_request
from vllm_gptoss.engine.choose.deployment import Deployment as Deployment
from vllm_gptoss.engine.choose.deployment import KvCache as KvCache
from vllm_gptoss.engine.choose.deployment import RankExperts as RankExperts
from vllm_gptoss.engine.choose.families import FAMILIES as FAMILIES
from vllm_gptoss.engine.choose.families import OTHER as OTHER
from vllm_gptoss.engine.choose.families import GpuFamily as GpuFamily
from vllm_gptoss.engine.choose.families import reads_sinks as reads_sinks
from vllm_gptoss.engine.choose.families import unserved as unserved
from vllm_gptoss.settings import ChoiceError as ChoiceError

family = families.of
