"""The whole-step kernel without a GPU: it compiles for both models, host and device agree on every struct, it fits."""

from __future__ import annotations

import ctypes

import pytest

from tests.engine.kernels.cubins import compiled
from vllm_gptoss.engine.kernels import cache, layer, nvrtc, step
from vllm_gptoss.engine.kernels.dense import SHARED_LIMIT

SHAPES = {
    "20b": step.Shape(24, 2880, 64, 2880, 32, (46, 46)),
    "120b": step.Shape(36, 2880, 64, 2880, 128, (46, 46)),
    "20b, fp8 cache": step.Shape(24, 2880, 64, 2880, 32, (46, 46), cache.E4M3),
    "120b, fp8 cache": step.Shape(36, 2880, 64, 2880, 128, (46, 46), cache.E4M3),
    "120b, TP 2": step.Shape(36, 2880, 32, 1472, 128, (46, 24), ranks=2),
    "20b, TP 4": step.Shape(24, 2880, 16, 768, 32, (46, 12), ranks=4),
}
SMS = {"H100 PCIe": 114, "H100 and H200": 132}


@pytest.mark.parametrize("sms", SMS.values(), ids=list(SMS))
@pytest.mark.parametrize("model", SHAPES)
def test_it_compiles_and_host_and_device_agree(model: str, sms: int) -> None:
    made = step.plan(SHAPES[model], sms)
    sizes = {"Layer": step.Layer, "Group": step.Group, "Args": step.StepArgs, "CacheScales": layer.CacheScales}
    probe = nvrtc.source(step.SOURCE) + "".join(
        f'static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "{name}");' for name, kind in sizes.items()
    )
    probe += f'static_assert(sizeof(Zeros) == {made.zero_bytes}, "zeros");'
    if made.received_bytes:
        probe += f'static_assert(sizeof(Received) == {made.received_bytes}, "received");'
    probe += f'static_assert(X_BYTES + (BUFFERS * SUM + DENSE) * 4 == {made.staged + made.sums}, "scratch");'
    probe += f'static_assert(sizeof(Shared) + sizeof(Layer) * LAYERS <= {SHARED_LIMIT - made.shared_bytes}, "fits");'
    assert compiled(probe, "sm_90", [f"-D{name}={value}" for name, value in made.macros.items()])


@pytest.mark.parametrize("model", SHAPES)
def test_the_ring_holds_what_is_waited_for_at_once(model: str) -> None:
    """`out` waits for eight chunks of two rows before it gives one back: a shorter ring would never fill."""
    shape = SHAPES[model]
    chunk = 2 * (2 * shape.query_heads * 64 + 16)
    assert step.plan(shape, 132).ring >= 8 * chunk + chunk, "eight, and the rest that a wrap leaves empty"


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (step.Shape(24, 2944, 64, 2944, 32, (46, 46)), "hidden size 2944 does not divide"),
        (step.Shape(24, 2880, 64, 2944, 32, (46, 46)), "intermediate size 2944"),
        (step.Shape(24, 2880, 64, 1440, 32, (46, 46)), "intermediate size 1440"),
        (step.Shape(24, 2880, 8, 384, 32, (46, 6), ranks=8), "8 query heads are too few"),
        (step.Shape(23, 2880, 32, 1472, 32, (46, 24), ranks=2), "23 layers"),
        (step.Shape(24, 2880, 64, 2880, 48, (46, 46)), "48 experts"),
        (step.Shape(24, 2880, 60, 2880, 32, (46, 46)), "60 query heads"),
    ],
)
def test_another_shape_is_named(shape: step.Shape, why: str) -> None:
    assert why in str(step.unsupported(shape))
