"""Which steps take the short way."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_gptoss.engine.runner import batch, eligibility


def step(**changes: Any) -> Any:
    """A `SchedulerOutput` of two requests that decode, and changes; `known_` begins those of its cached requests."""
    known = {"req_ids": ["a", "b"], "resumed_req_ids": set(), "new_block_ids": [None, ([4], [5])]}
    known |= {name.removeprefix("known_"): value for name, value in changes.items() if name.startswith("known_")}
    fields: dict[str, Any] = {
        "scheduled_cached_reqs": SimpleNamespace(**known),
        "scheduled_new_reqs": [],
        "num_scheduled_tokens": {"a": 1, "b": 1},
        "total_num_scheduled_tokens": 2,
        "scheduled_spec_decode_tokens": {},
        "scheduled_encoder_inputs": {},
        "kv_connector_metadata": None,
        "ec_connector_metadata": None,
        "aux_output_connector_metadata": None,
        "finished_req_ids": {"c"},
    }
    return SimpleNamespace(**fields | {name: value for name, value in changes.items() if not name.startswith("known_")})


DRAFTS: dict[str, Any] = {
    "num_scheduled_tokens": {"a": 4, "b": 4},
    "total_num_scheduled_tokens": 8,
    "scheduled_spec_decode_tokens": {"b": [-1] * 3, "a": [-1] * 3},
}
NOTHING = SimpleNamespace(load_jobs={}, store_jobs={}, jobs_to_flush=None)
CLOCK = SimpleNamespace(reqs_to_recv={}, reqs_in_batch=set(), scheduler_clock=7.5)


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ({}, 1),
        (DRAFTS, 4),
        *(
            ({"kv_connector_metadata": idle}, 1)
            for idle in (NOTHING, CLOCK, SimpleNamespace(metadata=(NOTHING, CLOCK), extra=None))
        ),
    ],
    ids=str,
)
def test_as_many_tokens_of_each_request_are_what_it_takes(change: dict[str, Any], tokens: int) -> None:
    assert eligibility.only_decodes(step(**change), tokens)


@pytest.mark.parametrize(
    "change",
    [
        {"scheduled_new_reqs": ["new"]},
        {"known_resumed_req_ids": {"a"}},
        {"num_scheduled_tokens": {"a": 2, "b": 1}, "total_num_scheduled_tokens": 3},
        {"num_scheduled_tokens": {"b": 1, "a": 1}},
        {"num_scheduled_tokens": {}, "total_num_scheduled_tokens": 0, "known_req_ids": []},
        {"scheduled_spec_decode_tokens": {"a": [3]}},
        *(
            {"kv_connector_metadata": at_work}
            for at_work in (
                object(),
                SimpleNamespace(load_jobs={1: "job"}, store_jobs={}, jobs_to_flush=None),
                SimpleNamespace(load_jobs={}, store_jobs={1: "job"}, jobs_to_flush=None),
                SimpleNamespace(load_jobs={}, store_jobs={}, jobs_to_flush={1}),
                SimpleNamespace(reqs_to_recv={}, reqs_in_batch={"a"}, scheduler_clock=7.5),
                SimpleNamespace(metadata=(NOTHING, SimpleNamespace(requests=["a"])), extra=None),
                SimpleNamespace(metadata=(NOTHING, NOTHING), extra={"a": 1}),
                SimpleNamespace(unknown="metadata"),
            )
        ),
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_else_is_vllms(change: dict[str, Any]) -> None:
    assert not eligibility.only_decodes(step(**change))


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        (DRAFTS, 3),
        (DRAFTS, 1),
        ({}, 4),
        (DRAFTS | {"scheduled_spec_decode_tokens": {"a": [-1] * 3}}, 4),
        (DRAFTS | {"scheduled_spec_decode_tokens": {"a": [-1] * 2, "b": [-1] * 3}}, 4),
        (DRAFTS | {"scheduled_spec_decode_tokens": {}}, 4),
        (DRAFTS | {"num_scheduled_tokens": {"a": 3, "b": 5}}, 4),
        (DRAFTS | {"num_scheduled_tokens": {"a": 4, "b": 3}, "total_num_scheduled_tokens": 7}, 4),
        (DRAFTS | {"known_resumed_req_ids": {"b"}}, 4),
    ],
    ids=str,
)
def test_unequal_drafts_are_vllms(change: dict[str, Any], tokens: int) -> None:
    assert not eligibility.only_decodes(step(**change), tokens)


@pytest.mark.vllm
@pytest.mark.parametrize("job", ["", "load_jobs", "store_jobs", "jobs_to_flush"])
def test_vllms_own_metadata_is_read(job: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

    jobs: Any = {"load_jobs": {}, "store_jobs": {}, "jobs_to_flush": set()}
    offloading = OffloadingConnectorMetadata(**jobs | ({job: {1: None}} if job else {}))
    both = MultiKVConnectorMetadata(metadata=(NixlConnectorMetadata(), offloading))
    assert [eligibility.transfers(each) for each in (offloading, both)] == [bool(job)] * 2


def a_runner(**changes: Any) -> Any:
    """What `verifies` reads of a runner with three drafts of EAGLE3 in layers that take eight tokens of a request."""
    draft = EagleSpeculator()
    draft.prefill_cudagraph_manager = SimpleNamespace(graphs=[SimpleNamespace(cg_mode="full")])
    fields = {
        "model": SimpleNamespace(fused_path=SimpleNamespace(per_request=8)),
        "speculator": draft,
        "num_speculative_steps": 3,
        "decode_query_len": 4,
        "speculative_config": SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False),
    }
    return SimpleNamespace(**fields | changes)


class EagleSpeculator:
    prefill_cudagraph_manager: Any


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        ({"num_speculative_steps": 7, "decode_query_len": 8}, True),
        ({"num_speculative_steps": 8, "decode_query_len": 9}, False),
        ({"model": SimpleNamespace(fused_path=SimpleNamespace(per_request=1))}, False),
        ({"model": SimpleNamespace(fused_path=None)}, False),
        ({"decode_query_len": 3}, False),
        ({"speculator": SimpleNamespace()}, False),
        ({"speculative_config": SimpleNamespace(uses_dynamic_speculative_decoding=lambda: True)}, False),
    ],
    ids=lambda value: "+".join(value) or "as it is" if isinstance(value, dict) else str(value),
)
def test_drafts_that_may_take_the_short_way(change: dict[str, Any], may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = SimpleNamespace(FULL="full", EagleSpeculator=EagleSpeculator)
    monkeypatch.setattr(eligibility.vllm, "parts", lambda: parts)
    assert eligibility.verifies(a_runner(**change)) is may


def replayed(**changes: Any) -> Any:
    """What `why_not` reads of a runner that replays decode steps, and changes by a path to their place."""
    none = dict.fromkeys((*SPECIAL, "encoder_cache", "aux_output_connector", "speculative_config"))
    no = ("is_pooling_model", "is_encoder_decoder", "uses_inputs_embeds", "use_aux_hidden_state_outputs")
    made = SimpleNamespace(
        **none, **dict.fromkeys(no, False), num_speculative_steps=0, speculator=None, kv_connector=None, attn_groups=[],
        model=SimpleNamespace(fused_path=None), observability_config=SimpleNamespace(cudagraph_metrics=False),
        sampler=Sampler(
            logits_processors=[1, 2, 3], return_sampling_mask=False, trace_replay_state=None, compute_nans=False
        ),
        model_state=State(rope_state=None, prompt_embeds_state=None),
        cudagraph_manager=SimpleNamespace(graphs=[SimpleNamespace(cg_mode="piecewise"), SimpleNamespace(cg_mode=FULL)]),
    )  # fmt: skip
    for path, value in changes.items():
        *above, name = path.split(".")
        setattr(functools.reduce(getattr, above, made), name, value)
    return made


class Sampler(SimpleNamespace): ...


class State(SimpleNamespace): ...


FULL, HOST_BUILDER = "full", SimpleNamespace(get_metadata_builder=lambda number: None, layer_names=["layer"])
SPECIAL = ("pcp_manager", "batch_sharder", "ubatch_runner", "fast_prefill", "adaptive_verification", "pp_handler")


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("num_speculative_steps", 3, "drafts that the layers or EAGLE3's graphs do not take"),
        ("is_pooling_model", True, "no text generation"),
        ("is_encoder_decoder", True, "no text generation"),
        ("uses_inputs_embeds", True, "embeddings as input"),
        ("encoder_cache", {}, "embeddings as input"),
        ("kv_connector", "another", "a KV connector of an unknown kind"),
        ("aux_output_connector", "one", "outputs of the model other than its tokens"),
        ("use_aux_hidden_state_outputs", True, "outputs of the model other than its tokens"),
        ("observability_config.cudagraph_metrics", True, "metrics of graphs"),
        *((part, {}, "a special way through the model") for part in SPECIAL),
        ("sampler.__class__", State, "the sampler State"),
        ("sampler.logits_processors", [1, 2, 3, 4], "logits processors"),
        ("sampler.return_sampling_mask", True, "sampling masks, traces or counted NaNs"),
        ("sampler.trace_replay_state", {}, "sampling masks, traces or counted NaNs"),
        ("sampler.compute_nans", True, "sampling masks, traces or counted NaNs"),
        ("model_state.__class__", Sampler, "a model state of its own"),
        ("model_state.rope_state", {}, "a model state of its own"),
        ("model_state.prompt_embeds_state", {}, "a model state of its own"),
        ("attn_groups", [[HOST_BUILDER]], "attention that plans on the host"),
        ("cudagraph_manager.graphs", [SimpleNamespace(cg_mode="piecewise")], "no FULL graphs"),
    ],
)
def test_a_runner_that_does_more_than_the_graphs_contain_is_vllms(
    path: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = SimpleNamespace(
        FULL=FULL, NO_OP_KV_CONNECTOR=None, ActiveKVConnector=SimpleNamespace, Sampler=Sampler, DefaultModelState=State
    )
    monkeypatch.setattr(eligibility.vllm, "parts", lambda: parts)
    assert eligibility.why_not(replayed(**{path: value})) == why
    assert eligibility.why_not(replayed()) is None
    assert eligibility.why_not(replayed(kv_connector=SimpleNamespace())) is None


def sampler(**states: Any) -> Any:
    """Three rows of vLLM's `Sampler`: greedy, at temperature 1, and one with other options."""
    none = np.zeros(3, dtype=bool)
    values = {
        "temperature": [0.0, 1.0, 0.5],
        "top_k": [100, 100, 5],
        "top_p": [1.0, 1.0, 0.5],
        "min_p": [0.0, 0.0, 0.2],
    }
    values |= {name: value for name, value in states.items() if name in values}
    made = {name: SimpleNamespace(np=np.array(value)) for name, value in values.items()}
    sampling = SimpleNamespace(
        **made,
        vocab_size=100,
        any_greedy=lambda rows: bool((made["temperature"].np[rows] == 0).any()),
        any_explicit_seed=lambda rows: bool(states.get("seeded", False)),
    )
    return SimpleNamespace(
        logits_processors=[
            SimpleNamespace(use_logit_bias=np.array(states.get("bias", none))),
            SimpleNamespace(use_penalty=np.array(states.get("penalty", none))),
            SimpleNamespace(num_bad_words=SimpleNamespace(np=np.zeros(3, dtype=np.int32))),
        ],
        thinking_budget_state=SimpleNamespace(enabled=False),
        sampling_states=sampling,
        get_logprobs_dims=lambda rows: states.get("logprobs"),
        needs_logits_processing=np.array([False, False, True]),
        use_flashinfer=states.get("fused", False),
        use_xpu_sampler=False,
    )


PROMPTS = SimpleNamespace(uses_prompt_logprobs=np.zeros(3, dtype=bool), token_id_scores={})
GREEDY = np.array([0, 1])
ALL = np.array([0, 1, 2])


def test_what_sampling_launches_follows_from_the_rows() -> None:
    assert batch.sampling(sampler(), PROMPTS, GREEDY) == (False,) * 6
    assert batch.sampling(sampler(), PROMPTS, ALL) == (True, True, True, True, True, False)
    alone = sampler(top_k=[100, 100, 100])
    assert batch.sampling(alone, PROMPTS, ALL) == (True, True, True, False, True, True)


@pytest.mark.parametrize(
    "more", [{"logprobs": (2, 0)}, {"bias": [False, True, False]}, {"penalty": [True, False, False]}], ids=list
)
def test_more_than_sampling_is_vllms(more: dict[str, Any]) -> None:
    assert batch.sampling(sampler(**more), PROMPTS, GREEDY) is None


def test_a_fused_sampler_with_a_state_of_its_own_is_vllms() -> None:
    rows = np.array([1, 2])
    assert batch.sampling(sampler(fused=True), PROMPTS, rows) is None
    assert batch.sampling(sampler(fused=True, seeded=True), PROMPTS, rows) is not None
    assert batch.sampling(sampler(fused=True), PROMPTS, ALL) is not None, "a greedy request is not for that sampler"
