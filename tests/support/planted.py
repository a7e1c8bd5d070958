"""Where tests plant an exception: every step of the plugin between choosing and a replayed graph.

Each is `module:attribute`, and the part of the plugin that must then be upstream's. CPU tests run them against fakes
(`tests/test_fallback.py`), GPU tests in a real engine (`tests/gpu/test_fallback.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

LAYERS = (
    "vllm_gptoss.engine.choose.vllm_config:built_model",
    "vllm_gptoss.engine.choose:layers",
    "vllm_gptoss.engine.choose:attention",
    "vllm_gptoss.engine.model.fused_path:FusedPath.__init__",
    "vllm_gptoss.engine.attention.decode:set_up",
    "vllm_gptoss.engine.model.addresses:look_up",
    "vllm_gptoss.engine.choose.vllm_config:first_step",
    "vllm_gptoss.engine.model.one_token:OneToken.__init__",
    "vllm_gptoss.engine.kernels.nvrtc:at_once",
    "vllm_gptoss.engine.model.one_token:OneToken.__call__",
    "vllm_gptoss.engine.model.layer_upto16:layer",
)
"""Steps of the fused layers: choosing, setting up, looking up, compiling, running or capturing."""

MANY = ("vllm_gptoss.engine.kernels.norm_rope_router:norm", "vllm_gptoss.engine.model.layer_upto512:layer")
"""Steps of the layers of decode steps of many tokens: running or capturing."""

EXPERTS = (
    "vllm_gptoss.engine.choose:experts",
    "vllm_gptoss.engine.experts.method:GptOssExpertsMethod.__init__",
    "vllm_gptoss.engine.choose.vllm_config:built_experts",
    "vllm_gptoss.engine.experts.sm90:reserve",
    "vllm_gptoss.engine.experts.sm90:sample",
    "vllm_gptoss.engine.experts.sm90:prepare",
    "vllm_gptoss.engine.experts.sm90:apply",
)
"""Steps of the experts: choosing, sampling, laying out, compiling, running."""

EXPERTS_ON_A_GPU = ("vllm_gptoss.engine.kernels.experts_many:unit_maps",)
"""Steps that fakes do not have: registration of the weights with the driver."""

ATTENTION = (
    "vllm_gptoss.engine.attention.sm90:registered",
    "vllm_gptoss.engine.attention.decode:compiled",
    "vllm_gptoss.engine.kernels.attention_many:attend",
)
"""Steps of attention for decode steps of many tokens: registering, compiling, running or capturing."""

MESSAGE = "planted, to see who catches it"


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError(MESSAGE)


def plant(where: str, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replaces what `where` names by a function that raises."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    put(owner, name, fail)
