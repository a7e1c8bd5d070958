"""Attributes of vLLM that the package sets, and its imports of vLLM: `test_door.py` compares the source with them."""

from __future__ import annotations

from collections.abc import Mapping

REPLACED: Mapping[str, str] = {
    "module.HarmonyParser": "_vllm/replaced.py",
    "renderer._make_request_with_harmony": "_vllm/replaced.py",
    "state[name]": "_vllm/replaced.py",
    "request.make_request_output": "_vllm/replaced.py",
    "layer.attn_backend": "engine/attention/sm90.py",
    "layer.impl": "engine/attention/sm90.py",
    "module.MODELS_CONFIG_MAP[architecture]": "_vllm/runner.py",
}
"""Where each attribute is replaced. docs/harmony.md has the reasons."""

FILLED: Mapping[str, frozenset[str]] = {
    "_vllm/__init__.py": frozenset(
        {"streamed.stop", "streamed.output_text_buffer_length", "streamed.output_kind", "params.detokenize"}
    ),
    "_vllm/worker.py": frozenset({"target[name]"}),
    "server/chat/endpoint.py": frozenset(
        {
            "args.enable_auto_tool_choice",
            "args.tool_call_parser",
            "args.tool_strict_level",
            "args.middleware",
            "structured.reasoning_parser",
        }
    ),
    "server/chat/chat_logprobs.py": frozenset({"choice.token_ids", "copy[HIDES_REASONING]"}),
    "server/chat/messages_content.py": frozenset({"block.text", "block.source", "block.content"}),
    "server/chat/vllm_constraint.py": frozenset(
        {
            "request.structured_outputs",
            "request.response_format",
            "request.text",
            "request[RESPONSE_FORMAT]",
            "request[HELD]",
        }
    ),
    "server/streaming/fast_frames.py": frozenset({"response.stream_response"}),
    "server/chat/completions.py": frozenset({"choice.token_ids"}),
    "server/chat/chat_stream.py": frozenset({"choice.token_ids"}),
    "server/chat/custom_tools.py": frozenset({"response.body_iterator"}),
    "server/chat/vllm_parser.py": frozenset({"message.content", "message.reasoning", "message.tool_calls"}),
    "server/chat/vllm_stops.py": frozenset(
        {
            "output.outputs",
            "output.finished",
            "whole.metrics",
            "choice.token_ids",
            "choice.logprobs",
            "choice.finish_reason",
            "choice.stop_reason",
        }
    ),
    "server/responses/endpoint.py": frozenset({"args.tool_server"}),
    "_vllm/replaced.py": frozenset({"theirs[name]", "args.tool_server", "handler.tool_server"}),
    "_vllm/runner.py": frozenset({"parallel.worker_cls", "scheduling.scheduler_cls"}),
    "engine/runner/scheduler.py": frozenset(
        {
            "step.num_scheduled_tokens",
            "step.total_num_scheduled_tokens",
            "known.req_ids",
            "known.new_block_ids",
            "known.num_computed_tokens",
            "known.num_output_tokens",
            "step.has_structured_output_requests",
            "step.pending_structured_output_tokens",
            "request.num_computed_tokens",
            "request.num_in_flight_tokens",
            "request.num_output_placeholders",
            "request.spec_token_ids",
            "request.next_decode_eligible_step",
            "request.last_sched_seq",
            "message.outputs",
            "message.scheduler_stats",
            "first.scheduler_stats",
        }
    ),
    "engine/runner/model_runner.py": frozenset({"states.num_computed_tokens_np[batch.rows]"}),
    "engine/experts/config.py": frozenset({"moe.moe_backend"}),
    "engine/experts/dequantize.py": frozenset({"layer[f'{name}_scale']"}),
    "engine/experts/method.py": frozenset({"moe.moe_backend"}),
}
"""Values that vLLM hands us and we fill in or change: arguments, one request, one output, one layer's configuration."""

SUBCLASSES: Mapping[str, frozenset[str]] = {
    "engine/model/gpt_oss.py": frozenset({"GptOssForCausalLM"}),
    "engine/attention/sm90.py": frozenset(
        {"FlashAttentionBackend", "FlashAttentionImpl", "FlashAttentionMetadataBuilder"}
    ),
    "engine/experts/config.py": frozenset({"GptOssMxfp4Config"}),
    "engine/experts/dequantize.py": frozenset({"UnquantizedFusedMoEMethod", "GptOssMxfp4MoEMethod"}),
    "engine/experts/method.py": frozenset({"GptOssMxfp4MoEMethod"}),
    "engine/runner/worker.py": frozenset({"Worker"}),
    "engine/runner/model_runner.py": frozenset({"GPUModelRunner"}),
    "engine/runner/output.py": frozenset({"AsyncModelRunnerOutput"}),
    "engine/runner/scheduler.py": frozenset({"AsyncScheduler", "KVCacheManager"}),
}
"""Files outside this package that import from vLLM, and the bases of their classes. vLLM's processes import these
files only when they build a gpt-oss model."""

OURS: Mapping[str, frozenset[str]] = {
    "_vllm/__init__.py": frozenset({"ours.handlers", "ours.propagate"}),
    "_vllm/runner.py": frozenset({"WithClasses.worker"}),
    "plugin.py": frozenset({"os.environ['VLLM_PLUGINS']", "os.environ[COPIED]"}),
    "engine/runner/batch.py": frozenset({"self.sampler.sampling_states[name]"}),
    "engine/runner/scheduler.py": frozenset({"ours.groups", "ours.size", "ours.quiet"}),
    "engine/runner/captured_steps.py": frozenset({"tables._num_dirty_rows"}),
    "server/chat/custom_tools.py": frozenset({"custom.written"}),
    "server/chat/vllm_parser.py": frozenset({"calls[-1].arguments"}),
}
"""Attributes of objects that our own code made or copied, in files that also see vLLM's."""
