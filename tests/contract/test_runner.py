"""vLLM's model runner as `vllm_gptoss/runner` mirrors it: what it reads, and the functions that it does the work of.

A release whose runner differs names what here, before a GPU does. 0.32's is left alone (`_vllm.runner.TRIED`).
"""

from __future__ import annotations

import ast
import hashlib
import re

import pytest

from tests.contract.source import ROOT, Release, find, parameters, releases
from vllm_gptoss import spec

RELEASES = [release for release in releases() if release.version == "0.33.0"]
GPU = "vllm.v1.worker.gpu"
CACHE = "vllm.v1.core.single_type_kv_cache_manager"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

MIRRORED = {
    f"{GPU}.model_runner:GPUModelRunner.execute_model": "2dc9c64543d3",
    f"{GPU}.model_runner:GPUModelRunner.finish_requests": "b36fb1751c4b",
    f"{GPU}.model_runner:GPUModelRunner.update_requests": "fa60c466d4d8",
    f"{GPU}.model_runner:GPUModelRunner.gather_batch_req_state": "c1d8831c2fe1",
    f"{GPU}.model_runner:GPUModelRunner.prepare_inputs": "e3ba4ab9cdc9",
    f"{GPU}.model_runner:GPUModelRunner.prepare_attn": "53c40ecb21f9",
    f"{GPU}.model_runner:GPUModelRunner.sample": "aa9df7fb5ee9",
    f"{GPU}.model_runner:GPUModelRunner.sample_tokens": "2c92e9301548",
    f"{GPU}.model_runner:GPUModelRunner.postprocess_sampled": "5e411f26ded7",
    f"{GPU}.model_states.default:DefaultModelState.prepare_attn": "620119b35cdc",
    f"{GPU}.sample.sampler:Sampler.__call__": "3ec31218c518",
    f"{GPU}.sample.sampler:Sampler.sample": "40333434d579",
    f"{GPU}.sample.sampler:Sampler.apply_sampling_params": "a5e499fbc9ba",
    f"{GPU}.sample.states:SamplingStates.get_top_k_top_p": "da950eb0feff",
    f"{GPU}.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask": "e7a6cdcfcc21",
    f"{GPU}.async_utils:AsyncOutput.get_output": "e1349ce3e11d",
    f"{GPU}.block_table:BlockTables.gather_block_tables": "7cb228aafe24",
    f"{GPU}.block_table:BlockTables.compute_slot_mappings": "8fd3029a3fed",
    f"{GPU}.block_table:BlockTables.apply_staged_writes": "c12cf2a0699a",
    f"{SCHEDULER}.schedule": "17c7aac6799d",
    f"{SCHEDULER}._make_cached_request_data": "522540f84a61",
    f"{SCHEDULER}._update_after_schedule": "52b7c827cfde",
    f"{SCHEDULER}.update_from_output": "42f76b8c3949",
    f"{SCHEDULER}._update_request_with_output": "f4eb733838ac",
    "vllm.v1.core.sched.utils:check_stop": "8ce0d86f294b",
    "vllm.v1.request:Request.append_output_token_ids": "0e517f7ef5a3",
    "vllm.v1.request:Request.update_block_hashes": "c5173243cda7",
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher": "2efb68aa049b",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks": "196aabbb1800",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.new_step_starts": "ca16bfde0a2c",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free": "b57fe8f5399d",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks": "4f0dbe45dfd4",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": "380bf2ac1d5a",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "6a7355911d79",
    f"{CACHE}:SingleTypeKVCacheManager.get_num_blocks_to_allocate": "35691847d4c2",
    f"{CACHE}:SingleTypeKVCacheManager.allocate_new_blocks": "1cd09f4402d8",
    f"{CACHE}:SingleTypeKVCacheManager.remove_skipped_blocks": "93d7a79c27fe",
    f"{CACHE}:SingleTypeKVCacheManager._remove_blocks_in_range": "efa903c89a9d",
    f"{CACHE}:SingleTypeKVCacheManager.cache_blocks": "18f67303d0f8",
    f"{CACHE}:FullAttentionManager.cache_blocks": "96d2b1f24e32",
    f"{CACHE}:SlidingWindowManager.get_num_skipped_tokens": "66d75bdd9cdc",
}
"""Functions whose work `runner/` does or relies on in its order, and a digest of their code as it was read."""

READ = {
    f"{GPU}.model_runner:GPUModelRunner": (
        "max_num_reqs", "device", "vocab_size", "req_states", "input_buffers", "block_tables", "sampler",
        "prompt_logprobs_worker", "model_state", "attn_groups", "kv_cache_config", "cudagraph_manager", "model",
        "execute_model_state", "parallel_config", "use_pp", "use_dcp", "speculative_config", "num_speculative_steps",
        "lora_config", "is_pooling_model", "is_encoder_decoder", "uses_inputs_embeds", "encoder_cache", "kv_connector",
        "aux_output_connector", "use_aux_hidden_state_outputs", "eplb", "observability_config", "pcp_manager",
        "batch_sharder", "ubatch_runner", "fast_prefill", "adaptive_verification", "pp_handler",
    ),
    f"{GPU}.states:RequestState": (
        "req_id_to_index", "all_token_ids", "prefill_len", "total_len", "num_computed_tokens",
        "num_computed_tokens_np", "num_computed_prefill_tokens", "last_sampled_tokens", "draft_tokens",
    ),
    f"{GPU}.input_batch:InputBuffers": ("input_ids", "positions", "is_padding", "query_start_loc", "seq_lens"),
    f"{GPU}.block_table:BlockTables": ("block_tables", "num_blocks", "_num_dirty_rows", "append_block_ids"),
    f"{GPU}.buffer_utils:StagedWriteTensor": (
        "gpu", "_staged_write_indices", "_staged_write_starts", "_staged_write_contents", "clear_staged_writes",
    ),
    f"{GPU}.sample.sampler:Sampler": (
        "sampling_states", "penalties_state", "logits_processors", "thinking_budget_state", "trace_replay_state",
        "needs_logits_processing", "return_sampling_mask", "compute_nans", "use_flashinfer", "use_xpu_sampler",
    ),
    f"{GPU}.sample.states:SamplingStates": ("temperature", "seeds", "top_k", "top_p", "min_p", "vocab_size"),
    f"{GPU}.sample.penalties:PenaltiesState": ("use_penalty", "output_bin_counts"),
    f"{GPU}.sample.logit_bias:LogitBiasState": ("use_logit_bias",),
    f"{GPU}.sample.bad_words:BadWordsState": ("num_bad_words",),
    f"{GPU}.sample.thinking_budget:ThinkingBudgetState": ("enabled", "use_thinking_budget"),
    f"{GPU}.sample.prompt_logprob:PromptLogprobsWorker": ("uses_prompt_logprobs", "token_id_scores"),
    f"{GPU}.cudagraph_utils:CudaGraphManager": ("graphs", "dispatch", "run_fullgraph"),
    f"{GPU}.model_states.default:DefaultModelState": ("rope_state", "prompt_embeds_state"),
    f"{GPU}.eplb_utils:EPLBController": ("state",),
    SCHEDULER: (
        "running", "requests", "waiting", "kv_holding_waiting", "policy", "max_num_scheduled_tokens", "max_model_len",
        "scheduler_config", "current_step", "num_executed_steps", "sched_step_seq", "defer_block_free",
        "_inflight_prefills", "_pause_state", "kv_cache_manager", "finished_req_ids", "reset_preempted_req_ids",
    ),
    "vllm.v1.request:Request": (
        "request_id", "client_index", "status", "sampling_params", "max_tokens", "num_prompt_tokens", "_all_token_ids",
        "_output_token_ids", "num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders",
        "num_stale_output_tokens", "next_decode_eligible_step", "is_prefill_chunk", "spec_token_ids", "mm_features",
        "block_hashes", "events", "prefill_stats", "structured_output_request", "trace_headers", "last_sched_seq",
    ),
}  # fmt: skip
"""Attributes of vLLM's objects that we read, by the class that sets them."""

FIELDS = {
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens", "scheduled_encoder_inputs", "finished_req_ids", "encoder_input_updates",
        "preempted_req_ids", "has_structured_output_requests", "kv_connector_metadata",
        "aux_output_connector_metadata", "ec_connector_metadata", "new_block_ids_to_zero", "kv_cache_block_copies",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens",
    ),
    "vllm.v1.outputs:ModelRunnerOutput": (
        "req_id_to_index", "sampled_token_ids", "pooler_output", "kv_connector_output", "ec_connector_output",
        "num_nans_in_logits", "sampling_masks", "aux_output_connector_output",
    ),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs", "scheduler_stats", "finished_requests"),
    "vllm.sampling_params:SamplingParams": ("logprobs", "repetition_detection", "_all_stop_token_ids"),
    f"{GPU}.cudagraph_utils:BatchExecutionDescriptor": ("cg_mode", "num_tokens", "num_reqs"),
    f"{GPU}.input_batch:prepare_pos_seq_lens": (
        "idx_mapping", "query_start_loc", "num_computed_tokens", "pos", "seq_lens",
    ),
    f"{GPU}.input_batch:combine_sampled_and_draft_tokens": (
        "input_ids", "idx_mapping", "last_sampled_tokens", "query_start_loc", "seq_lens", "prefill_len",
        "draft_tokens", "cu_num_logits", "num_logits", "num_new_sampled_tokens",
    ),
    f"{GPU}.input_batch:post_update": (
        "idx_mapping", "num_computed_tokens", "last_sampled_tokens", "output_bin_counts", "sampled_tokens",
        "num_sampled", "num_rejected", "query_start_loc", "all_token_ids", "total_len", "draft_tokens",
        "draft_tokens_out",
    ),
}  # fmt: skip
"""Parameters and fields that we give or look at, in their order where it is a function."""


def members(release: Release, name: str) -> set[str]:
    """Attributes that a class sets on itself or defines, its bases in the same tree included."""
    module, _, qualname = name.partition(":")
    node = find(release, module, qualname)
    assert isinstance(node, ast.ClassDef), f"vLLM {release.version} lost {name}"
    found = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            found.add(inner.attr)
    for base in node.bases:
        if isinstance(base, ast.Name) and find(release, module, base.id) is not None:
            found |= members(release, f"{module}:{base.id}")
    return found


def digest(release: Release, name: str) -> str:
    module, _, qualname = name.partition(":")
    node = find(release, module, qualname)
    assert node is not None, f"vLLM {release.version} lost {name}"
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
@pytest.mark.parametrize("name", MIRRORED)
def test_what_is_mirrored_is_as_it_was_read(release: Release, name: str) -> None:
    found = digest(release, name)
    assert found == MIRRORED[name], f"{name} changed: read it again, mend runner/, then write {found}"


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
@pytest.mark.parametrize("name", READ)
def test_attributes_are_there(release: Release, name: str) -> None:
    assert not set(READ[name]) - members(release, name)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
@pytest.mark.parametrize("name", FIELDS)
def test_parameters_are_there(release: Release, name: str) -> None:
    module, _, qualname = name.partition(":")
    node = find(release, module, qualname)
    assert node is not None, f"vLLM {release.version} lost {name}"
    have = parameters(node)
    if isinstance(node, ast.FunctionDef):
        assert tuple(have) == FIELDS[name]
    else:
        assert not set(FIELDS[name]) - set(have)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_the_input_batch_needs_nothing_that_we_do_not_give(release: Release) -> None:
    node = find(release, f"{GPU}.input_batch", "InputBatch")
    assert isinstance(node, ast.ClassDef)
    needed = {
        ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign) and field.value is None
    }
    begin = ast.parse((ROOT / "vllm_gptoss" / "runner" / "batch.py").read_text())
    calls = [
        node
        for node in ast.walk(begin)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".InputBatch")
    ]
    (call,) = calls
    given = {keyword.arg for keyword in call.keywords}
    assert needed <= given <= set(parameters(node))


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_a_token_is_said_by_two_fields(release: Release) -> None:
    """`scheduler.EngineCoreOutput(name, tokens)`: the others have defaults, and mean nothing special then."""
    node = find(release, "vllm.v1.engine", "EngineCoreOutput")
    assert isinstance(node, ast.ClassDef)
    fields = {ast.unparse(field.target): field.value for field in node.body if isinstance(field, ast.AnnAssign)}
    assert list(fields)[:2] == ["request_id", "new_token_ids"]
    assert {name for name, value in fields.items() if value is None} == {"request_id", "new_token_ids"}
    assert {ast.unparse(value) for value in fields.values() if value is not None} == {"None", "0"}


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_running_requests_can_be_passed_over(release: Release) -> None:
    """`scheduler.NEVER`: what vLLM's loop looks at before it takes a running request into a step."""
    schedule = find(release, "vllm.v1.core.sched.scheduler", "Scheduler.schedule")
    assert schedule is not None
    text = ast.unparse(schedule)
    passed = re.search(r"if self.current_step < request.next_decode_eligible_step:\s+req_index \+= 1\s+continue", text)
    assert passed is not None
    assert passed.start() < text.index("num_new_tokens = request.num_tokens_with_spec")


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_a_running_request_is_asked_for_in_one_way(release: Release) -> None:
    """`scheduler.NOTHING_SPECIAL`: another way would go unnoticed, and no search would be spared."""
    schedule = find(release, "vllm.v1.core.sched.scheduler", "Scheduler.schedule")
    assert schedule is not None
    calls = [node for node in ast.walk(schedule) if isinstance(node, ast.Call)]
    first = next(
        call for call in calls if ast.unparse(call.func).endswith(".allocate_slots") and len(call.keywords) < 3
    )
    assert [ast.unparse(argument) for argument in first.args] == ["request", "num_new_tokens"]
    assert [keyword.arg for keyword in first.keywords] == ["num_lookahead_tokens"]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_the_worker_can_be_named_before_the_platform_names_one(release: Release) -> None:
    config = release.module("vllm.config.vllm")
    assert config is not None
    text = config.read_text()
    assert text.index("self.try_verify_and_update_config()") < text.index(
        "current_platform.check_and_update_config(self)"
    )
    platform = release.module("vllm.platforms.cuda")
    assert platform is not None
    assert 'if parallel_config.worker_cls == "auto":' in platform.read_text()
    assert (
        f'"{spec.ARCHITECTURE}": GptOssForCausalLMConfig'
        in (release.module("vllm.model_executor.models.config") or platform).read_text()
    )
    assert find(release, "vllm.v1.worker.gpu_worker", "Worker._make_model_runner") is not None
