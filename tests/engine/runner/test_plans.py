"""The benchmark of planning: both schedulers do the steps that it times."""

from __future__ import annotations

import pytest

from benchmarks import plans

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("changing", [False, True])
def test_every_part_of_both_is_timed(changing: bool) -> None:
    rows = plans.measure(8, changing, turns=2, steps=8)
    assert [row["scheduler"] for row in rows] == [plans.VLLM, plans.PLUGIN]
    for row in rows:
        assert all(row[part] > 0 for part in plans.PARTS), row
