"""Limits of one caller: counted by its key, for all of its users."""

from __future__ import annotations

import pytest

from vllm_gptoss.tools.python.quotas import PythonQuotaError, PythonQuotas, account


def test_runs_are_counted_for_the_caller_whoever_of_its_users_asks() -> None:
    quotas = PythonQuotas(runs=3)
    for user in ("team/a", "team/b", "team"):
        quotas.count_run(user)
    with pytest.raises(PythonQuotaError, match=r"3 python calls a minute; the next one in \d+ s"):
        quotas.count_run("team/c")
    quotas.count_run("others")


def test_a_minute_later_there_is_room_again_and_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("vllm_gptoss.tools.python.quotas.time.monotonic", lambda: now[0])
    quotas = PythonQuotas(runs=1)
    for number in range(100):
        quotas.count_run(f"caller {number}")
    now[0] += 61
    quotas.count_run("caller 0")
    assert len(quotas._runs) == 1


def test_files_that_would_be_too_much_are_refused_and_none_is_no_limit() -> None:
    PythonQuotas(kept=10).check_kept("a", 4, 6)
    with pytest.raises(PythonQuotaError, match="may keep 10 bytes of files and has 5; this one has 6"):
        PythonQuotas(kept=10).check_kept("a", 5, 6)
    PythonQuotas().check_kept("a", 1 << 50, 1 << 50)


def test_an_account_is_the_callers_own_part() -> None:
    assert account("team/user") == account("team") == "team"
