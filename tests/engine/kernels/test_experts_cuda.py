"""The sm90 expert kernels without a GPU: they compile for every shape, and the cubin cache survives what disks do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.engine.kernels.cubins import compiled, judged
from tests.support.scale import SOAK
from vllm_gptoss.engine.kernels import experts, experts_plan, nvrtc

SOURCE = 'extern "C" __global__ void touch(int* p) { p[threadIdx.x] = N; }'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


RANKS = [(2880, 32, 32), (2880, 128, 128), (768, 32, 32), (384, 128, 128), (2880, 16, 32)]
"""Intermediate size, local and routed experts: 20b and 120b at TP 1, 20b at TP 4, 120b at TP 8, a rank of EP 2."""

TUNINGS = [
    ("experts_up", experts_plan.UP, experts_plan.NARROW_TOKENS),
    ("experts_down", experts_plan.DOWN, experts_plan.NARROW_TOKENS),
    ("experts_down", experts_plan.DOWN_FEWEST, experts_plan.NARROW_TOKENS),
    ("experts_up", experts_plan.UP_WIDE, experts_plan.WIDE_TOKENS),
    ("experts_down", experts_plan.DOWN_WIDE, experts_plan.WIDE_TOKENS),
    ("experts_up", experts_plan.UP_WIDE, experts_plan.MAX_TOKENS),
    ("experts_down", experts_plan.DOWN_WIDE, experts_plan.MAX_TOKENS),
]


@pytest.mark.parametrize(("intermediate", "local", "routed"), RANKS)
def test_both_projections_compile_for_every_rank(intermediate: int, local: int, routed: int) -> None:
    """To the end for the 20b and for the 120b's most tokens; in `make soak` all."""
    for which, tuning, most in TUNINGS:
        rows, columns = (2 * intermediate, 2880) if which == "experts_up" else (2880, intermediate)
        tuning = experts_plan.fitted(tuning, columns // 64)
        pairs = -(-columns // 128) * 2
        macros = experts_plan.defines(
            tuning, rows, columns // 64, pairs, local, 4, routed, (1, 0), local != routed, most
        )
        macros["ONLY"] = experts.ONLY[which]
        options = [*(f"-D{k}={v}" for k, v in macros.items()), f"--maxrregcount={tuning.registers}"]
        is_120b = (intermediate, local) == (2880, 128)
        if SOAK or (intermediate, local) == (2880, 32) or (is_120b and most == experts_plan.MAX_TOKENS):
            assert which.encode() in compiled(nvrtc.source(experts.SOURCE), "sm_90", options)
        else:
            judged(nvrtc.source(experts.SOURCE), "sm_90", options)


@pytest.mark.parametrize("mode", [(0, 0), (0, 1), (1, 0), (2, 0)])
def test_every_routing_dtype_compiles(mode: tuple[int, int]) -> None:
    macros = experts_plan.defines(experts_plan.UP, 5760, 45, 46, 32, 4, 32, mode, True)
    judged(nvrtc.source(experts.SOURCE), "sm_90", [f"-D{k}={v}" for k, v in macros.items()])


@pytest.mark.parametrize(("which", "tuning", "most"), TUNINGS)
def test_shared_memory_fits_for_every_token_count(which: str, tuning: experts_plan.Tuning, most: int) -> None:
    wide = 128 if most > experts_plan.NARROW_TOKENS else 0
    for tokens in range(1, most + 1):
        if experts_plan.compiled_for(tokens) == most:
            rows, _ = experts_plan.staged_rows(which, tokens)
            assert experts_plan.shared_bytes(tuning, 45, rows, 4, wide, most) <= experts_plan.SHARED_LIMIT


@pytest.mark.parametrize("local", [16, 32, 128])
@pytest.mark.parametrize(("which", "tuning", "most"), TUNINGS)
def test_both_sides_lay_shared_memory_out_alike(which: str, tuning: experts_plan.Tuning, most: int, local: int) -> None:
    """The host allocates the size of the kernel's types: with a byte less, it would read past the end."""
    macros = experts_plan.defines(tuning, 5760, 45, 46, local, 4, local, (1, 0), False, most)
    ours = experts_plan.shared_bytes(tuning, 45, 1, 4, local if most > experts_plan.NARROW_TOKENS else 0, most)
    check = f"\nstatic_assert(META_BYTES + RED_BYTES + RING_BYTES + XSTRIDE == {ours});"
    options = [f"-D{k}={v}" for k, v in {**macros, "ONLY": experts.ONLY[which]}.items()]
    judged(nvrtc.source(experts.SOURCE) + check, "sm_90", options)
    with pytest.raises(nvrtc.NvrtcError, match="static assertion failed"):
        judged(nvrtc.source(experts.SOURCE) + check.replace("== ", "== 1 + "), "sm_90", options)


def test_a_source_error_carries_the_compilers_log() -> None:
    with pytest.raises(nvrtc.NvrtcError, match="undefined"):
        nvrtc.compile_cubin(SOURCE, "sm_90", [])


def test_second_use_reads_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.cubin(SOURCE, "sm_90", ["-DN=1"])
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert nvrtc.cubin(SOURCE, "sm_90", ["-DN=1"]) == first
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]


def test_a_damaged_entry_is_compiled_again_and_said(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = nvrtc.cubin(SOURCE, "sm_90", ["-DN=2"])
    [entry] = cache.iterdir()
    entry.write_bytes(entry.read_bytes()[:-7])
    with caplog.at_level(logging.WARNING):
        assert nvrtc.cubin(SOURCE, "sm_90", ["-DN=2"]) == whole
    assert [record for record in caplog.records if "damaged" in record.message]
    assert nvrtc._verified(entry.read_bytes()) == whole


def test_an_unwritable_cache_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path / "file" / "kernels"))
    with caplog.at_level(logging.WARNING):
        assert nvrtc.cubin(SOURCE, "sm_90", ["-DN=3"])
    assert sum("not stored" in record.message for record in caplog.records) == 1


def test_kernels_compiled_side_by_side_are_the_same_and_a_refusal_ends_none_of_the_others(cache: Path) -> None:
    options = [[f"-DN={number}"] for number in range(6, 12)]
    alone = [nvrtc.compile_cubin(SOURCE, "sm_90", each) for each in options]
    with pytest.raises(nvrtc.NvrtcError, match="undefined"):
        nvrtc.at_once((nvrtc.cubin, SOURCE, "sm_90", each) for each in [(), *map(tuple, options)])
    assert {nvrtc._verified(entry.read_bytes()) for entry in cache.iterdir()} == set(alone)


def test_options_and_source_make_different_entries(cache: Path) -> None:
    nvrtc.cubin(SOURCE, "sm_90", ["-DN=4"])
    nvrtc.cubin(SOURCE, "sm_90", ["-DN=5"])
    nvrtc.cubin(SOURCE + "\n", "sm_90", ["-DN=5"])
    assert len(list(cache.iterdir())) == 3
