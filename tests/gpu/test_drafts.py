"""Tokens that are drawn with drafts have the distribution of those that are drawn without: 10,000 draws of each.

Random weights and eight allowed tokens, so that every one of them is likely, the drafted ones too.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint, shapes
from benchmarks.consistency import VOCABULARY
from benchmarks.decode.worker import draft_config
from tests.gpu.marks import SM90
from tests.support import jobs

pytestmark = [
    *SM90,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM for CUDA"),
]

MODEL = replace(shapes.shape("20b:6"), vocabulary=VOCABULARY)
DRAWS = 10_000
ALLOWED = range(100, 108)
PROMPT = random.Random(0).choices(ALLOWED, k=100)
COLDER = 0.9
"""Draws at this temperature must differ measurably from draws at 1."""
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3, "draft_load_config": {"load_format": "dummy"}},
}


def requests(temperature: float = 1.0) -> list[dict[str, Any]]:
    return [{"prompt": PROMPT, "max_tokens": 8, "temperature": temperature, "allowed_token_ids": list(ALLOWED)}] * DRAWS


def job(model: Path, host: str, rounds: list[list[dict[str, Any]]], **more: Any) -> dict[str, Any]:
    args = {
        "enforce_eager": False, "max_num_seqs": 64, "compilation_config": {"cudagraph_capture_sizes": [1, 64, 256]},
        "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30, "enable_prefix_caching": True,
        "disable_log_stats": False, "additional_config": {"gptoss": {"layers": "gptoss", "host": host}}, **more,
    }  # fmt: skip
    environ = {"VLLM_PLUGINS": "gptoss", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    return {"model": str(model), "args": args, "rounds": rounds, "environ": environ, "paths": True, "seconds": 300}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, jobs.Results]:
    base = tmp_path_factory.mktemp("drafts")
    checkpoint.write(MODEL, base / "model")
    (base / "eagle3").mkdir()
    head = draft_config(MODEL) | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    (base / "eagle3" / "config.json").write_text(json.dumps(head))
    methods = METHODS | {"eagle3": METHODS["eagle3"] | {"model": str(base / "eagle3")}}
    works = {"plain": job(base / "model", "auto", [requests(), requests(COLDER)])} | {
        name: job(base / "model", "gptoss" if name == "eagle3" else "auto", [requests()], speculative_config=drafts)
        for name, drafts in methods.items()
    }
    with ThreadPoolExecutor(len(works)) as pool:
        done = pool.map(lambda name: jobs.run({"job": works[name]}, base / f"of {name}"), works)
        return dict(zip(works, done, strict=True))


def distance(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Chi-squared of the three tokens after the first in two samples of one size, as standard deviations above its mean
    for equal distributions. Sequences of fewer than ten are one class."""
    first, second = (Counter(tuple(answer["tokens"][1:4]) for answer in answers) for answers in (some, others))
    rare = {each for each in first | second if first[each] + second[each] < 10}
    pairs = [(first[each], second[each]) for each in (first | second).keys() - rare]
    pairs.append((sum(first[each] for each in rare), sum(second[each] for each in rare)))
    pairs = [pair for pair in pairs if sum(pair)]
    free = len(pairs) - 1
    chi_squared = sum((one - other) ** 2 / (one + other) for one, other in pairs)
    return float((chi_squared - free) / (2 * free) ** 0.5)


LIMIT = 6.0
"""Standard deviations. Rounding moves a log-probability by hundredths, which adds less than one; `COLDER` gives 9."""


@pytest.mark.parametrize("method", METHODS)
def test_drawn_tokens_have_the_distribution_of_those_without_drafts(
    method: str, results: dict[str, jobs.Results]
) -> None:
    plain, colder = results["plain"].rounds("job")
    [drawn] = results[method].rounds("job")
    assert len(drawn) == DRAWS
    assert distance(plain, drawn) < LIMIT
    assert distance(plain, colder) > LIMIT, "the draws are too few to notice a change"


def test_drafts_were_accepted_and_refused(results: dict[str, jobs.Results]) -> None:
    results["ngram"].rounds("job")
    proposed, accepted = (results["ngram"]["job"][name] for name in ("drafts", "accepted"))
    assert 0.02 < accepted / proposed < 0.9, (proposed, accepted)


@pytest.mark.parametrize("name", ["plain", *METHODS])
def test_the_fused_layers_ran(name: str, results: dict[str, jobs.Results]) -> None:
    results[name].rounds("job")
    paths = results[name]["job"]["paths"]
    assert (paths["fused_layers"], paths["many_tokens"], paths["own_experts"]) == (MODEL.layers,) * 3
