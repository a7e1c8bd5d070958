"""Which steps take the short way."""

from __future__ import annotations

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
        "has_structured_output_requests": False,
        "kv_connector_metadata": None,
        "ec_connector_metadata": None,
        "aux_output_connector_metadata": None,
        "finished_req_ids": {"c"},
    }
    return SimpleNamespace(**fields | {name: value for name, value in changes.items() if not name.startswith("known_")})


def test_a_token_each_is_what_it_takes() -> None:
    assert eligibility.only_decodes(step())


def test_a_grammar_is_for_the_sampling() -> None:
    assert eligibility.only_decodes(step(has_structured_output_requests=True))


@pytest.mark.parametrize(
    "change",
    [
        {"scheduled_new_reqs": ["new"]},
        {"known_resumed_req_ids": {"a"}},
        {"num_scheduled_tokens": {"a": 2, "b": 1}, "total_num_scheduled_tokens": 3},
        {"num_scheduled_tokens": {"b": 1, "a": 1}},
        {"num_scheduled_tokens": {}, "total_num_scheduled_tokens": 0, "known_req_ids": []},
        {"scheduled_spec_decode_tokens": {"a": [3]}},
        {"kv_connector_metadata": object()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_else_is_vllms(change: dict[str, Any]) -> None:
    assert not eligibility.only_decodes(step(**change))


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
