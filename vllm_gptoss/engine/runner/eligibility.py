"""Which runners and which steps take the short way; everything else is vLLM's."""

from __future__ import annotations

from typing import Any

from vllm_gptoss._vllm import runner as vllm


def why_not(runner: Any) -> str | None:
    """Why no step of this runner may take the short way, or None. Called once, after vLLM's graph capture."""
    parallel = runner.parallel_config
    reasons = {
        "several GPUs": parallel.world_size > 1 or parallel.data_parallel_size > 1 or runner.use_pp or runner.use_dcp,
        "drafts": runner.speculative_config is not None or runner.num_speculative_steps > 0,
        "LoRA": runner.lora_config is not None,
        "no text generation": runner.is_pooling_model or runner.is_encoder_decoder,
        "embeddings as input": runner.uses_inputs_embeds or runner.encoder_cache is not None,
        "a KV connector": runner.kv_connector is not vllm.parts().NO_OP_KV_CONNECTOR,
        "outputs of the model other than its tokens": runner.aux_output_connector is not None
        or runner.use_aux_hidden_state_outputs,
        "load balancing of experts": runner.eplb.state is not None,
        "metrics of graphs": bool(runner.observability_config.cudagraph_metrics),
        "a special way through the model": any(
            part is not None
            for part in (
                runner.pcp_manager,
                runner.batch_sharder,
                runner.ubatch_runner,
                runner.fast_prefill,
                runner.adaptive_verification,
                runner.pp_handler,
            )
        ),
    }
    return next((why for why, applies in reasons.items() if applies), None) or _why_not_inside(runner)


def _why_not_inside(runner: Any) -> str | None:
    parts, sampler, state = vllm.parts(), runner.sampler, runner.model_state
    builders = [type(group.get_metadata_builder(0)) for groups in runner.attn_groups for group in groups]
    reasons = {
        f"the sampler {type(sampler).__name__}": type(sampler) is not parts.Sampler,
        "logits processors": len(sampler.logits_processors) != 3,
        "sampling masks, traces or counted NaNs": sampler.return_sampling_mask
        or sampler.trace_replay_state is not None
        or sampler.compute_nans,
        "a model state of its own": type(state) is not parts.DefaultModelState
        or state.rope_state is not None
        or state.prompt_embeds_state is not None,
        "attention that plans on the host": any(
            not builder.__module__.startswith("vllm_gptoss.engine.attention") for builder in builders
        ),
        "no FULL graphs": not any(found.cg_mode == parts.FULL for found in runner.cudagraph_manager.graphs),
    }
    return next((why for why, applies in reasons.items() if applies), None)


def only_decodes(step: Any) -> bool:
    """Whether a `SchedulerOutput` only schedules one more token for each of its requests.

    Requests may have ended and got blocks since the last step. A grammar's mask comes with the sampling.
    """
    known = step.scheduled_cached_reqs
    count = len(known.req_ids)
    return (
        0 < count == step.total_num_scheduled_tokens == len(step.num_scheduled_tokens)
        and not step.scheduled_new_reqs
        and not known.resumed_req_ids
        and not step.scheduled_spec_decode_tokens
        and not step.scheduled_encoder_inputs
        and step.kv_connector_metadata is None
        and step.ec_connector_metadata is None
        and step.aux_output_connector_metadata is None
        and known.req_ids == list(step.num_scheduled_tokens)
    )
