"""Which runners and which steps take the short way; everything else is vLLM's.

`choose.runner` has the conditions on the configuration, this module those on the runner that vLLM built of it.
"""

from __future__ import annotations

from typing import Any

from vllm_gptoss._vllm import runner as vllm
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import device
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.fallback import UnavailableError


def check_configuration(config: Any, wish: str = "auto", here: device.Device | None = None) -> bool:
    """True if a `VllmConfig` allows the short way. Called before the weights are loaded. here: the GPU, else detected.

    Raises:
        ChoiceError: wish is `gptoss`, and the configuration does not allow it.
        UnavailableError: the configuration does not allow it.
    """
    choice = choose.runner(here or device.detect(), describe.configuration(config), wish)
    if choice.value != "gptoss":
        raise UnavailableError(choice.reason)
    return True


def why_not(runner: Any) -> str | None:
    """Why no step of this runner may take the short way, or None. Called once, after vLLM's graph capture."""
    reasons = {
        "drafts that the layers or EAGLE3's graphs do not take": has_drafts(runner) and not verifies(runner),
        "no text generation": runner.is_pooling_model or runner.is_encoder_decoder,
        "embeddings as input": runner.uses_inputs_embeds or runner.encoder_cache is not None,
        "a KV connector of an unknown kind": runner.kv_connector is not vllm.parts().NO_OP_KV_CONNECTOR
        and type(runner.kv_connector) is not vllm.parts().ActiveKVConnector,
        "outputs of the model other than its tokens": runner.aux_output_connector is not None
        or (runner.use_aux_hidden_state_outputs and not has_drafts(runner)),
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


def has_drafts(runner: Any) -> bool:
    """Whether steps of this runner may verify drafts."""
    return bool(runner.speculative_config is not None or runner.num_speculative_steps > 0)


def verifies(runner: Any) -> bool:
    """Whether steps that verify as many drafts of each request may take the short way: EAGLE3's, whose first pass has a
    FULL graph, after layers that take several tokens of a request. vLLM samples, and runs the draft."""
    path, draft = getattr(runner.model, "fused_path", None), runner.speculator
    return bool(
        path is not None
        and path.per_request > runner.num_speculative_steps > 0
        and runner.decode_query_len == 1 + runner.num_speculative_steps
        and not runner.speculative_config.uses_dynamic_speculative_decoding()
        and type(draft) is vllm.parts().EagleSpeculator
        and any(found.cg_mode == vllm.parts().FULL for found in draft.prefill_cudagraph_manager.graphs)
    )


def _plans_on_the_host(runner: Any) -> bool:
    """Whether attention metadata depends on more of a step than a graph of the launches that build it contains."""
    drafts = runner.speculator.draft_attn_layer_names if has_drafts(runner) else set()
    return any(
        not type(builder).__module__.startswith("vllm_gptoss.engine.attention")
        and not (drafts.issuperset(group.layer_names) and type(builder) is vllm.parts().FlashAttentionMetadataBuilder)
        for groups in runner.attn_groups
        for group in groups
        for builder in [group.get_metadata_builder(0)]
    )


def _why_not_inside(runner: Any) -> str | None:
    parts, sampler, state = vllm.parts(), runner.sampler, runner.model_state
    reasons = {
        f"the sampler {type(sampler).__name__}": type(sampler) is not parts.Sampler,
        "logits processors": len(sampler.logits_processors) != 3,
        "sampling masks, traces or counted NaNs": sampler.return_sampling_mask
        or sampler.trace_replay_state is not None
        or sampler.compute_nans,
        "a model state of its own": type(state) is not parts.DefaultModelState
        or state.rope_state is not None
        or state.prompt_embeds_state is not None,
        "attention that plans on the host": _plans_on_the_host(runner),
        "no FULL graphs": not any(found.cg_mode == parts.FULL for found in runner.cudagraph_manager.graphs),
    }
    return next((why for why, applies in reasons.items() if applies), None)


def transfers(metadata: Any) -> bool:
    """Whether the metadata of a step contains work for the worker side of its KV connector.

    Each connector's metadata has other fields. All are empty in a step without work, except a clock, which is a float.
    The metadata of a MultiConnector has a tuple of others. True for an object whose fields cannot be read.
    """
    if isinstance(metadata, tuple):
        return any(map(transfers, metadata))
    fields = getattr(metadata, "__dict__", {"unknown": metadata}).values()
    return any(transfers(each) if isinstance(each, tuple) else not isinstance(each, float) and each for each in fields)


def only_decodes(step: Any, each: int = 1) -> bool:
    """Whether a `SchedulerOutput` only schedules one more token for each of its requests, and `each` - 1 drafts.

    Requests may have ended and got blocks since the last step. A grammar's mask comes with the sampling. A KV connector
    loads and stores nothing.
    """
    known, drafts = step.scheduled_cached_reqs, step.scheduled_spec_decode_tokens
    count = len(known.req_ids)
    return (
        0 < count == len(step.num_scheduled_tokens)
        and step.total_num_scheduled_tokens == count * each
        and not step.scheduled_new_reqs
        and not known.resumed_req_ids
        and len(drafts) == (count if each > 1 else 0)
        and all(len(of) == each - 1 == step.num_scheduled_tokens[name] - 1 for name, of in drafts.items())
        and not step.scheduled_encoder_inputs
        and (step.kv_connector_metadata is None or not transfers(step.kv_connector_metadata))
        and step.ec_connector_metadata is None
        and step.aux_output_connector_metadata is None
        and known.req_ids == list(step.num_scheduled_tokens)
    )
