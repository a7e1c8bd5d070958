"""Attributes of vLLM that the package sets, and its imports of vLLM: `test_door.py` compares the source with them."""

from __future__ import annotations

from collections.abc import Mapping


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


REPLACED: Mapping[str, str] = {
    "module.HarmonyParser": "_vllm/replaced.py",
    "state[name]": "_vllm/replaced.py",
    "request.make_request_output": "_vllm/replaced.py",
    "module.MODELS_CONFIG_MAP[architecture]": "_vllm/runner.py",
}
"""Where each attribute is replaced. docs/harmony.md has the reasons."""

FILLED: Mapping[str, frozenset[str]] = {
    "_vllm/__init__.py": _set(
        "params.detokenize streamed.output_kind streamed.output_text_buffer_length streamed.stop"
    ),
    "_vllm/worker.py": _set("target[name]"),
    "server/chat/endpoint.py": _set(
        "args.enable_auto_tool_choice args.middleware args.tool_call_parser args.tool_strict_level "
        "structured.reasoning_parser"
    ),
    "server/chat/chat_logprobs.py": _set("choice.token_ids copy[HIDES_REASONING]"),
    "server/chat/messages_content.py": _set("block.content block.source block.text"),
    "server/chat/vllm_constraint.py": _set(
        "request.response_format request.structured_outputs request.text request[HELD] request[RESPONSE_FORMAT]"
    ),
    "server/streaming/fast_frames.py": _set("response.stream_response"),
    "server/chat/completions.py": _set("choice.token_ids"),
    "server/chat/chat_stream.py": _set("choice.token_ids"),
    "server/chat/custom_tools.py": _set("response.body_iterator"),
    "server/chat/vllm_parser.py": _set("message.content message.reasoning message.tool_calls"),
    "server/chat/vllm_stops.py": _set(
        "choice.finish_reason choice.logprobs choice.stop_reason choice.token_ids output.finished output.outputs "
        "whole.metrics"
    ),
    "server/responses/endpoint.py": _set("args.tool_server"),
    "_vllm/replaced.py": _set("args.tool_server handler.tool_server theirs[name]"),
    "_vllm/runner.py": _set(
        "parallel.worker_cls parallel.worker_extension_cls scheduling.scheduler_cls "
        "vllm_config.compilation_config.cudagraph_capture_sizes"
    ),
    "engine/runner/scheduler.py": _set(
        "first.scheduler_stats known.new_block_ids known.num_computed_tokens known.num_output_tokens "
        "known.req_ids message.outputs message.scheduler_stats request.last_sched_seq "
        "request.next_decode_eligible_step request.num_computed_tokens request.num_in_flight_tokens "
        "request.num_output_placeholders request.spec_token_ids step.has_structured_output_requests "
        "step.num_scheduled_tokens step.pending_structured_output_tokens step.total_num_scheduled_tokens"
    ),
    "engine/runner/model_runner.py": _set("states.num_computed_tokens_np[batch.rows]"),
    "engine/experts/config.py": _set("moe.is_lora_enabled moe.moe_backend"),
    "engine/experts/dequantize.py": _set("layer[f'{name}_scale']"),
    "engine/experts/method.py": _set("moe.is_lora_enabled moe.moe_backend"),
    "engine/experts/sm80.py": _set("moe.moe_backend"),
}
"""Values that vLLM hands us and we fill in or change: arguments, one request, one output, one layer's configuration."""

SUBCLASSES: Mapping[str, frozenset[str]] = {
    "engine/model/gpt_oss.py": _set("GptOssForCausalLM"),
    "engine/attention/decode.py": _set("AttentionImpl"),
    "engine/attention/sm80.py": _set("TritonAttentionBackend TritonAttentionImpl"),
    "engine/attention/sm90.py": _set("FlashAttentionBackend FlashAttentionImpl FlashAttentionMetadataBuilder"),
    "engine/experts/config.py": _set("GptOssMxfp4Config"),
    "engine/experts/dequantize.py": _set("GptOssMxfp4MoEMethod UnquantizedFusedMoEMethod"),
    "engine/experts/method.py": _set("GptOssMxfp4MoEMethod"),
    "engine/experts/sm80.py": _set("GptOssMxfp4MoEMethod"),
    "engine/runner/worker.py": _set("Worker"),
    "engine/runner/model_runner.py": _set("GPUModelRunner"),
    "engine/runner/output.py": _set("AsyncModelRunnerOutput"),
    "engine/runner/scheduler.py": _set("AsyncScheduler KVCacheManager"),
}
"""Files outside this package that import from vLLM, and the bases of their classes. vLLM's processes import these
files only when they build a gpt-oss model."""

OURS: Mapping[str, frozenset[str]] = {
    "_vllm/__init__.py": _set("ours.handlers ours.propagate sys.modules['torch._inductor.lowering']"),
    "_vllm/runner.py": _set("WithClasses.worker"),
    "plugin.py": _set("os.environ['VLLM_PLUGINS'] os.environ[COPIED]"),
    "engine/runner/batch.py": _set("self.sampler.sampling_states[name]"),
    "engine/runner/scheduler.py": _set("ours.groups ours.quiet ours.size"),
    "engine/attention/decode.py": _set("layer.impl.most_per_request"),
    "engine/runner/captured_steps.py": _set("have.seq_lens_cpu_upper_bound[:count] tables._num_dirty_rows"),
    "engine/runner/model_runner.py": _set("batch.inputs.has_structured_output_reqs"),
    "server/chat/custom_tools.py": _set("custom.written"),
    "server/chat/vllm_parser.py": _set("calls[-1].arguments"),
}
"""Attributes of objects that our own code made or copied, in files that also see vLLM's."""
