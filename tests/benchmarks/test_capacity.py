"""The capacity model: its arithmetic by hand, what it refuses, and that more is never cheaper."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from benchmarks import capacity
from benchmarks.capacity import Engine, Wishes, plan
from vllm_gptoss.engine.spec import GPT_OSS_20B

SIMPLE = Engine(GPT_OSS_20B, "a GPU", 1, {1: 2.0, 11: 12.0}, prefill=10_000, per_token_ns=0.0, kv_gib=100.0)
"""A step is one ms, and one for each request."""
WISHES = Wishes(context=512, read=0, answer=500, speed=100.0, fill=1.0, spare=0)


def test_a_step_between_two_batches_lies_on_the_line_and_context_costs_more() -> None:
    assert SIMPLE.step_ms(6, 512) == pytest.approx(7.0)
    longer = dataclasses.replace(SIMPLE, per_token_ns=10.0)
    assert longer.step_ms(6, 512 + 1000) == pytest.approx(7.0 + 6 * 1000 * 10 / 1e6)


def test_more_than_was_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="only up to 11"):
        SIMPLE.step_ms(12, 512)


def test_streams_are_the_most_that_are_as_fast_as_wished() -> None:
    """100 tokens a second are 10 ms: nine requests. Prompts of 100 tokens are 9 ms for each token of the answer."""
    assert SIMPLE.streams(WISHES) == 9
    reading = dataclasses.replace(WISHES, read=100)  # 500 tokens: 9 * 100 / 10,000 s = 90 ms more, 0.18 ms each
    assert SIMPLE.speed(9, reading) == pytest.approx(500 / (500 * 0.010 + 0.09))
    assert SIMPLE.streams(reading) == 8


def test_a_cache_that_is_full_bounds_streams() -> None:
    small = dataclasses.replace(SIMPLE, kv_gib=0.1)
    long = dataclasses.replace(WISHES, context=2048, speed=1.0)
    assert 0 < small.fits(long) < 11
    assert small.streams(long) == small.fits(long)


def test_users_become_replicas_and_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """900 users, 0.2 of whom read: 180 streams, nine a replica: 20. A replica says 900 tokens a second, 1 ms each."""
    monkeypatch.setattr(capacity, "host_us_per_token", lambda: 1000.0)
    monkeypatch.setattr(capacity, "transactions_per_response", lambda background: 10.0)
    p = plan(900, SIMPLE, dataclasses.replace(WISHES, fill=1.0))
    assert (p.streams, p.streams_per_replica, p.replicas, p.gpus) == (180, 9, 20, 20)
    assert p.turns == pytest.approx(180 * 100 / 500)
    assert p.transactions == pytest.approx(360)
    assert (p.api_servers, p.connections) == (20, 20 * capacity.POOL)


def test_a_speed_that_no_engine_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="slower than 600"):
        plan(10, SIMPLE, dataclasses.replace(WISHES, speed=600.0))


@pytest.mark.parametrize("engine", capacity.engines(), ids=lambda e: f"{e.model.name} {e.gpu}")
def test_more_users_and_higher_wishes_never_need_less(engine: Engine) -> None:
    wishes = Wishes()
    plans = [plan(users, engine, wishes) for users in (10, 100, 1_000, 10_000)]
    for less, more in itertools.pairwise(plans):
        assert all(a <= b for a, b in zip(dataclasses.astuple(less), dataclasses.astuple(more), strict=True))
    usual = engine.streams(wishes)
    for harder in ({"speed": 80.0}, {"context": 65_536}, {"read": 8_000}):
        assert engine.streams(dataclasses.replace(wishes, **harder)) <= usual, harder


def test_the_engines_are_the_measured_ones() -> None:
    assert {engine.steps[64] < 25 for engine in capacity.engines()} == {True}
    assert [max(engine.steps) for engine in capacity.engines()] == [512, 512, 256, 256]


def test_a_row_of_another_gpu_changes_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = capacity.engines()
    other = dataclasses.replace(capacity.MEASURED[0], device="B200", kv_gib=1.0)
    more = [dataclasses.replace(other, model=model) for model in ("20b", "120b")]
    cut = [dataclasses.replace(other, device="H200", **change) for change in ({"count": 2}, {"layers": 8})]
    monkeypatch.setattr(capacity, "MEASURED", [*more, *cut, *capacity.MEASURED, *more])
    assert capacity.engines() == before
    assert [engine.kv_gib for engine in before] == [113.86, 57.77, 65.71, 9.53]


def test_transactions_are_those_of_the_soak_that_measured_them_last() -> None:
    assert capacity.transactions_per_response(1.0) == pytest.approx(28.9)
    assert capacity.transactions_per_response(0.1) == pytest.approx(0.1 * 28.9 + 0.9 * 6.5)
    (row,) = [row for row in capacity.table([10_000]) if row[:2] == ["20b", "H200"]]
    a_second = 2_000 * Wishes().speed / Wishes().answer * capacity.transactions_per_response(Wishes().background)
    assert dict(zip(capacity.HEAD, row, strict=True))["store transactions/s"] == f"{a_second:,.0f}"
