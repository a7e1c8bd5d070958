"""vLLM with the plugin against the oracle: the same random checkpoint, the same tokens, logprobs side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import jobs, tiny, whole_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]

SHAPE = tiny.Shape(layers=3, hidden=128, intermediate=128, experts=8, active_experts=4)
UNEVEN = replace(SHAPE, intermediate=96)
"""Three groups of 32: two ranks hold 64 and 32 rows. Only the MXFP4 kernel takes 32 of 64; BF16's does not."""

LENGTHS = (1, 2, 127, 128, 129, 200)
NEW_TOKENS = 6
AMX = bool(torch.cpu._is_amx_tile_supported())
TWO_RANKS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}

COMPILED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
"""Traced and split as by default, without C++ from inductor, which takes half a minute."""

JOBS: dict[str, tuple[tiny.Format, tiny.Shape, dict[str, str], dict[str, Any]]] = {
    "dequantize": ("mxfp4", SHAPE, {"GPTOSS_EXPERTS": "dequantize"}, {}),
    "compiled": ("mxfp4", SHAPE, {"GPTOSS_EXPERTS": "dequantize"}, COMPILED),
    "bf16": ("bf16", SHAPE, {}, {}),
    "two ranks": ("mxfp4", UNEVEN if AMX else SHAPE, TWO_RANKS, {"tensor_parallel_size": 2}),
}
if AMX:
    JOBS["native"] = ("mxfp4", UNEVEN, {"GPTOSS_EXPERTS": "native"}, {})
"""What vLLM for CPU can run. With pipeline or expert parallelism vllm-cpu 0.32.0 dies, without the plugin too: the
first by an illegal instruction in its shared-memory send, the second in `fused_experts_cpu` (MXFP4: "Expected
total_cnts_t_1[e] == total_cnts_t_2[e]"; BF16: segmentation fault).
"""


def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(7)
    return [torch.randint(0, SHAPE.vocabulary - 2, (length,), generator=rng).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


def checkpoint(base: Path, fmt: tiny.Format, shape: tiny.Shape) -> Path:
    directory = base / f"{fmt}-{shape.intermediate}-{shape.layers}"
    return directory if directory.exists() else tiny.write(directory, shape, fmt, seed=11)


@pytest.fixture(scope="module")
def answers(base: Path) -> jobs.Results:
    sampling = {"max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS, "logprobs": 20, "prompt_logprobs": 20}
    rounds = [[{"prompt": prompt, **sampling} for prompt in prompts()]]
    work = {
        name: {"model": str(checkpoint(base, fmt, shape)), "environ": environ, "args": args, "rounds": rounds}
        for name, (fmt, shape, environ, args) in JOBS.items()
    }
    work["window"] = {
        "model": str(checkpoint(base, "mxfp4", replace(SHAPE, layers=1))),
        "rounds": [[{"prompt": prompt, "max_tokens": 1, "logprobs": 20}] for prompt in window_prompts()],
    }
    return jobs.run(work, base / "answers")


@dataclass(frozen=True)
class Compared:
    """One prompt and its new tokens. Logprobs of the 20 likeliest tokens at every position, flat: vLLM's, and the
    oracle's in float32, in bfloat16, and in float32 without sinks. gaps: of each new token to the oracle's best."""

    theirs: torch.Tensor
    exact: torch.Tensor
    coarse: torch.Tensor
    sinkless: torch.Tensor
    gaps: torch.Tensor


@cache
def oracles(directory: Path) -> tuple[whole_model.Model, whole_model.Model, whole_model.Model]:
    exact = whole_model.load(directory)
    layers = tuple(replace(at, sinks=torch.full_like(at.sinks, -30.0)) for at in exact.layers)
    return exact, whole_model.load(directory, torch.bfloat16), replace(exact, layers=layers)


@pytest.fixture(scope="module", params=JOBS)
def compared(request: pytest.FixtureRequest, base: Path, answers: jobs.Results) -> list[Compared]:
    fmt, shape, _, _ = JOBS[request.param]
    models = oracles(checkpoint(base, fmt, shape))
    out = []
    for prompt, answer in zip(prompts(), answers.rounds(request.param)[0], strict=True):
        tokens = torch.tensor(prompt + answer["tokens"])
        tables = [torch.log_softmax(whole_model.forward(model, tokens).float(), -1)[:-1] for model in models]
        theirs = answer["prompt_logprobs"][1:] + answer["logprobs"]
        assert len(theirs) == len(tokens) - 1
        positions = torch.tensor([position for position, at in enumerate(theirs) for _ in at])
        chosen = torch.tensor([int(token) for at in theirs for token in at])
        values = torch.tensor([value for at in theirs for value in at.values()])
        new = tables[0][len(prompt) - 1 :]
        gaps = new.max(-1).values - new.gather(1, tokens[len(prompt) :, None])[:, 0]
        out.append(Compared(values, *(table[positions, chosen] for table in tables), gaps))
    return out


def test_logprobs_are_as_near_as_bfloat16_allows(compared: list[Compared]) -> None:
    """vLLM computes in bfloat16 in another order than the oracle, so its distance from the float32 oracle may be that
    of the bfloat16 oracle, give or take. Measured: mean and median 0.9 to 1.3 times over all prompts. Twice is the
    limit; leaving the sinks out is 8 to 70 times. The largest differences are routers that choose another expert, in
    both alike, hence no bound on the maximum.
    """
    ours = torch.cat([(c.coarse - c.exact).abs() for c in compared])
    theirs = torch.cat([(c.theirs - c.exact).abs() for c in compared])
    assert theirs.mean() < 2 * ours.mean()
    assert theirs.median() < 2 * ours.median()
    for each in compared:
        assert (each.theirs - each.exact).abs().mean() < (each.sinkless - each.exact).abs().mean() / 4


def test_greedy_tokens_are_the_oracles_unless_two_are_as_likely(compared: list[Compared]) -> None:
    """Random weights give near ties: the chosen token must be within bfloat16's noise of the best. Each of the two
    logprobs is off by at most 0.12 but for 1 in 100 (measured)."""
    for each in compared:
        assert each.gaps.max() < 0.25


def window_prompts() -> list[list[int]]:
    """128 and 129 tokens, each twice with another first token."""
    long = prompts()[-1]
    return [[first, *long[1:length]] for length in (128, 129) for first in (3, 300)]


def test_the_window_is_128_tokens_to_the_token(answers: jobs.Results) -> None:
    """In a model of one windowed layer position 127 sees the first token and position 128 cannot, bit for bit."""
    seen, other_seen, unseen, other_unseen = (r[0]["logprobs"] for r in answers.rounds("window"))
    assert seen != other_seen
    assert unseen == other_unseen


def test_what_runs_is_what_was_asked_for(answers: jobs.Results) -> None:
    assert "experts: dequantize (asked for" in answers.log("dequantize")
    if AMX:
        assert "experts: native" in answers.log("native")
        assert "CPUExpertsMxfp4" in answers.log("native")
