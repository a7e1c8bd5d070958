"""Random shapes against the kernels' host checks: a rejection has a reason, an accepted shape has a plan that fits.

The sample model of this repository once failed to start on a GPU: its experts are 32 x 32, and their layout was sampled
before their shape was checked.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kernels.cubins import compiled
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import Deployment, RankExperts
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.experts import sm90
from vllm_gptoss.engine.kernels import attention, dense, experts, experts_many, experts_plan, nvrtc, step
from vllm_gptoss.engine.spec import ModelSpec

H200 = Device("nvidia", "NVIDIA H200", "sm90", 139.8)
SMS = (78, 114, 132)

some = st.integers(0, 9000)
round64 = st.integers(1, 120).map(lambda n: 64 * n)
sizes = st.one_of(some, round64)
counts = st.one_of(st.integers(0, 300), st.sampled_from([8, 24, 32, 64, 128]))
models = st.builds(
    ModelSpec,
    name=st.just("random"),
    layers=st.integers(1, 200),
    hidden=sizes,
    intermediate=sizes,
    experts=counts,
    active_experts=st.integers(0, 40),
    query_heads=st.one_of(st.integers(0, 300), st.integers(1, 40).map(lambda n: 8 * n)),
    kv_heads=st.integers(0, 40),
    head_size=st.sampled_from([16, 32, 64, 128]),
    vocabulary=st.just(201_088),
)
deployments = st.builds(
    Deployment, model=models, tensor_parallel=st.sampled_from([1, 2, 3, 4, 8, 16]), expert_parallel=st.booleans()
)


@settings(max_examples=300, deadline=None)
@given(deployments)
def test_every_shape_gets_an_answer(deployment: Deployment) -> None:
    for choice in (choose.layers(H200, deployment), choose.one_token(H200, deployment)):
        assert choice.value in ("gptoss", "upstream", "one launch", "six launches")
        assert choice.reason
    try:
        assert choose.experts(H200, deployment).value in ("gptoss", "triton")
    except choose.ChoiceError as error:
        assert "do not divide" in str(error)  # noqa: PT017


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(dense.Mode), sizes, sizes, st.integers(0, 40))
def test_a_projection_that_is_taken_has_a_plan_that_fits_every_gpu(
    mode: dense.Mode, rows: int, columns: int, top_k: int
) -> None:
    if dense.unsupported(mode, rows, columns, top_k) is not None:
        with pytest.raises(ValueError, match="."):
            dense.plan(mode, rows, columns, 1, 132, top_k)
        return
    for sms, tokens in itertools.product(SMS, range(1, dense.MAX_TOKENS + 1)):
        plan = dense.plan(mode, rows, columns, tokens, sms, top_k)
        assert 0 < plan.shared_bytes <= dense.SHARED_LIMIT
        assert 0 < plan.grid <= sms
        assert plan.units * plan.grid >= rows // dense.UNIT
        assert plan.block <= 1024
        assert plan.columns % (plan.part * dense.BLOCK) == 0


def rank(experts_: int, rows: int, columns: int) -> experts.Projection:
    """A projection of the given shape on the meta device, without memory."""
    values = torch.empty(experts_, rows // 4, columns * 2, dtype=torch.uint8, device="meta")
    lines, width = -(-rows // 256) * 8, -(-columns // 128) * 2 * 64
    scales = torch.empty(experts_, lines, width, dtype=torch.uint8, device="meta")
    return experts.Projection(values, scales, torch.empty(experts_, rows, device="meta"))


@settings(max_examples=300, deadline=None)
@given(sizes, sizes, counts, st.integers(0, 6))
def test_experts_that_are_taken_pass_the_launchers_checks_and_fit(
    hidden: int, intermediate: int, count: int, active: int
) -> None:
    if experts_plan.unsupported(hidden, intermediate, count, active) is not None:
        return
    few = experts.FewTokenExperts(
        rank(count, 2 * intermediate, hidden), rank(count, hidden, intermediate), active, count, alpha=1.7, limit=7.0
    )
    for which, tokens in itertools.product(experts.ONLY, range(1, experts_plan.MAX_TOKENS + 1)):
        projection, tuning = few._tuned(which, tokens)
        assert tuning.depth % tuning.chunk == 0
        rows, _ = experts_plan.staged_rows(which, tokens)
        shared = few._shared(tuning, projection, rows, experts_plan.compiled_for(tokens))
        assert shared <= experts_plan.SHARED_LIMIT
    many = experts_many.ManyTokenExperts(few)
    for most in many.tunings:
        assert many.compile_job(most, torch.bfloat16).shared <= experts_plan.SHARED_LIMIT


@settings(max_examples=100, deadline=None)
@given(round64, round64, st.integers(1, 3))
def test_whatever_shape_is_taken_can_be_sampled(hidden: int, intermediate: int, count: int) -> None:
    """Two experts of the shape in memory, as a rank holds them."""
    if experts_plan.unsupported(hidden, intermediate, count, 4) is not None:
        return
    for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate)):
        blocks = torch.zeros(1, dtype=torch.uint8).expand(count, rows, columns // 2)
        scales = torch.zeros(1, dtype=torch.uint8).expand(count, rows, columns // 32)
        values, exponents = sm90.sample(blocks, scales)
        assert values.numel()
        assert exponents.numel()


def test_the_sample_models_experts_are_refused_before_they_are_sampled() -> None:
    found = Deployment(ModelSpec("small", 4, 32, 32, 4, 2, 8, 2, 16, 1000), rank_experts=RankExperts(4, 32, 32))
    assert choose.layers(H200, found).value == "upstream"
    choice = choose.experts(H200, found)
    assert choice.value == "triton"
    assert "32 x 32 are not multiples of 64" in choice.reason


widths = st.integers(1, 8).map(lambda n: 960 * n)
heads = st.integers(1, 80).map(lambda n: 8 * n)
experts_of_step = st.sampled_from([32, 64, 96, 128])
steps = st.builds(step.Shape, st.integers(1, 400), widths, heads, widths, experts_of_step, st.just((46, 46)))


@settings(max_examples=300, deadline=None)
@given(steps, st.sampled_from(SMS))
def test_a_whole_step_that_is_taken_fits(shape: step.Shape, sms: int) -> None:
    if step.unsupported(shape, sms) is None:
        plan = step.plan(shape, sms)
        assert 0 < plan.shared_bytes <= dense.SHARED_LIMIT
        assert plan.splits * (shape.query_heads // attention.GROUP) <= sms


# Of what the checks take, the compiler must take all: one of each kind at the edge of what is allowed.

EDGES = [(64, 64, 1, 1), (64, 4096, 128, 4), (4096, 64, 3, 2), (6144, 6144, 128, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "intermediate", "count", "active"), EDGES)
def test_experts_at_the_edges_compile(hidden: int, intermediate: int, count: int, active: int) -> None:
    if (why := experts_plan.unsupported(hidden, intermediate, count, active)) is not None:
        assert "shared memory" in why, "an edge that is refused for another reason is no edge"
        return
    few = experts.FewTokenExperts(
        rank(count, 2 * intermediate, hidden), rank(count, hidden, intermediate), active, count, alpha=1.7, limit=7.0
    )
    source = nvrtc.source(experts.SOURCE)
    for which, tokens in itertools.product(experts.ONLY, (1, 32, 64)):
        job = few.compile_job(which, torch.bfloat16, tokens)
        macros = {**dict(job.options), "ONLY": experts.ONLY[which]}
        options = [*(f"-D{name}={value}" for name, value in macros.items()), f"--maxrregcount={job.registers}"]
        assert compiled(source, "sm_90", options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(1, 960, 16, 960, 32), (24, 1920, 64, 1920, 64), (36, 3840, 64, 3840, 128), (24, 2880, 128, 2880, 32)],
    ids=str,
)
def test_a_whole_step_at_the_edges_compiles(shape: tuple[int, int, int, int, int]) -> None:
    pairs = -(-shape[1] // 128) * 2
    of = step.Shape(*shape, (pairs, pairs))
    if (why := step.unsupported(of)) is not None:
        assert "bytes of" in why, "an edge that is refused for another reason is no edge"
        return
    macros = step.plan(of, 132).macros
    assert compiled(nvrtc.source(step.SOURCE), "sm_90", [f"-D{k}={v}" for k, v in macros.items()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "rows", "columns", "top_k"),
    [
        (dense.Mode.QKV, 192, 512, 0),
        (dense.Mode.OUT, 8, 8192, 0),
        (dense.Mode.ROUTER, 32, 512, 1),
        (dense.Mode.ROUTER, 256, 4096, 8),
    ],
)
def test_projections_at_the_edges_compile(mode: dense.Mode, rows: int, columns: int, top_k: int) -> None:
    assert dense.unsupported(mode, rows, columns, top_k) is None
    for tokens in (1, 16):
        macros = dense.plan(mode, rows, columns, tokens, 132, top_k).macros
        assert compiled(nvrtc.source(dense.SOURCE), "sm_90", [f"-D{k}={v}" for k, v in macros.items()])
