"""Functions and classes of vLLM that the plugin calls, replaces or relies on, with the parameters that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from tests.contract.source import Release, find, parameters


@dataclass(frozen=True)
class Seam:
    """A function or class of vLLM, the parameters we rely on, and what breaks without them."""

    module: str
    name: str
    parameters: tuple[str, ...]
    used_for: str


SEAMS = (
    Seam("vllm.v1.engine.core", "EngineCoreProc._reject_add_in_shutdown", ("request",), "what a stopped engine begins"),
    Seam(
        "vllm.model_executor.models.registry",
        "_ModelRegistry.register_model",
        ("model_arch", "model_cls"),
        "registering the model class",
    ),
    Seam(
        "vllm.model_executor.layers.quantization",
        "register_quantization_config",
        ("quantization",),
        "registering the quantisation method",
    ),
    Seam(
        "vllm.v1.attention.backends.registry",
        "register_backend",
        ("backend", "class_path"),
        "registering attention backends",
    ),
    Seam("vllm.plugins", "load_general_plugins", (), "doctor's discovery"),
    Seam("vllm.plugins", "load_endpoint_plugins", ("supported_tasks",), "doctor's discovery"),
    Seam("vllm.plugins.endpoint_plugins.interface", "EndpointPlugin.attach_router", ("app",), "adding our routes"),
    Seam(
        "vllm.plugins.endpoint_plugins.interface",
        "EndpointPlugin.init_state",
        ("engine_client", "state", "args"),
        "starting the store and the tools",
    ),
    Seam(
        "vllm.transformers_utils.config",
        "get_config",
        ("model", "trust_remote_code", "revision"),
        "knowing the model before the app is built",
    ),
    Seam(
        "vllm.renderers.online_renderer",
        "OnlineRenderer._make_request_with_harmony",
        ("request", "should_include_tools"),
        "rendering chat prompts in the trained form",
    ),
    Seam(
        "vllm.entrypoints.anthropic.serving",
        "AnthropicServingMessages.to_chat_completion_request",
        ("anthropic_request", "merge_inline_system"),
        "rendering long prompts of /v1/messages before the event loop has to",
    ),
    Seam("vllm.entrypoints.anthropic.api_router", "create_messages", ("request", "raw_request"), "our route before it"),
    Seam("vllm.entrypoints.anthropic.api_router", "count_tokens", ("request", "raw_request"), "our route before it"),
    Seam("vllm.outputs", "RequestOutput.add", ("next_output", "aggregate"), "answers that a stop string ended"),
    Seam("vllm.sampling_params", "SamplingParams.clone", (), "looking for stop strings ourselves"),
    Seam("vllm.v1.attention.backends.fa_utils", "get_flash_attn_version", (), "planning for FlashAttention 3 only"),
    Seam(
        "vllm.model_executor.utils",
        "replace_parameter",
        ("layer", "param_name", "new_tensor"),
        "experts in BF16 on a CPU without AMX",
    ),
    Seam(
        "vllm.model_executor.layers.quantization.utils.mxfp4_utils",
        "weight_mx_scale",
        ("precision_config",),
        "reading upstream's laid out scales in place",
    ),
    Seam("vllm.v1.attention.backend", "CommonAttentionMetadata.replace", (), "planning as a graph was captured"),
    Seam("vllm.config.compilation", "CUDAGraphMode.separate_routine", (), "planning as a graph was captured"),
    Seam("vllm.config.vllm", "VllmConfig.num_speculative_tokens", (), "planning as a graph was captured"),
    Seam("vllm.envs", "enable_envs_cache", (), "reading vLLM's variables once"),
    Seam(
        "vllm.entrypoints.openai.chat_completion.serving",
        "OpenAIServingChat.chat_completion_stream_generator",
        ("request", "result_generator", "request_id"),
        "framing the text of streams",
    ),
    Seam(
        "vllm.entrypoints.openai.completion.serving",
        "OpenAIServingCompletion.completion_stream_generator",
        ("request", "engine_inputs", "result_generator", "request_id"),
        "framing the text of completions",
    ),
    Seam("vllm.entrypoints.openai.completion.api_router", "create_completion", ("request", "raw_request"), "our route"),
    Seam(
        "vllm.v1.engine.detokenizer",
        "IncrementalDetokenizer.get_next_output_text",
        ("finished", "delta"),
        "the text of completions that goes straight",
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "RequestState.make_request_output",
        (
            "new_token_ids",
            "pooling_output",
            "finish_reason",
            "stop_reason",
            "kv_transfer_params",
            "ec_transfer_params",
            "error",
        ),
        "taking text before it is queued",
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "RequestOutputCollector.put",
        ("output",),
        "taking text only while none waits",
    ),
    Seam(
        "vllm.v1.executor.abstract",
        "Executor.execute_model",
        ("scheduler_output", "non_block"),
        "measuring the API server without a model",
    ),
    Seam("vllm.model_executor.models.gpt_oss", "GptOssForCausalLM", ("vllm_config", "prefix"), "subclassing the model"),
)


def problem(release: Release, seam: Seam) -> str:
    """What `release` lacks of a seam; empty if nothing."""
    node = find(release, seam.module, seam.name)
    if node is None:
        return f"seam: vLLM {release.version} lost {seam.module}.{seam.name}: needed for {seam.used_for}"
    lost = [name for name in seam.parameters if name not in parameters(node)]
    return f"seam: {seam.module}.{seam.name} lost parameters {lost}: needed for {seam.used_for}" if lost else ""
