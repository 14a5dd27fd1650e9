"""Limits over which a tenant's jobs wait: exact, live, and in nobody else's way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ErrorCode, Refusal
from schemas.tenants import TenantLimits
from service.scheduler import quota
from service.scheduler.entry import Stage
from service.scheduler.quota import Account, Accounts, check_queue, check_room
from tests.unit.turns_kit import Hall


@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(1, 900)), min_size=1, max_size=60), st.integers(100, 1000))
def test_a_rate_is_kept_over_any_time(steps: list[tuple[float, int]], per_minute: int) -> None:
    """Begun within T seconds: at most a minute's tokens, those of T seconds more, and the last job's excess."""
    limits, account = TenantLimits(tokens_per_minute=per_minute), Account("x")
    now, begun = 100.0, []
    for wait, tokens in steps:
        now += wait
        if account.may_pick(limits, tokens, now):
            account.meter(tokens)
            begun.append((now, tokens))
    for first, (since, _) in enumerate(begun):
        for last in range(first, len(begun)):
            total = sum(tokens for _, tokens in begun[first : last + 1])
            excess = max(0, begun[last][1] - per_minute)
            allowed = per_minute + (begun[last][0] - since) * per_minute / 60
            assert total <= allowed + excess + 1e-6


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=50))
def test_a_rate_counts_what_was_used_and_not_what_was_expected(jobs: list[tuple[int, int]]) -> None:
    """A plain bucket, one job after the other, each expected to take one number and taking another."""
    limits, account, level, now = TenantLimits(tokens_per_minute=600), Account("x"), 600.0, 0.0
    for expected, used in jobs:
        may = account.may_pick(limits, expected, now)
        assert may == (level >= min(expected, 600))
        if may:
            account.meter(expected)
            account.meter(used - expected)
            level -= used
        now += 10.0
        level = min(600.0, level + 100.0)


def test_a_rate_waits_and_goes_on_by_itself() -> None:
    hall = Hall(seqs=50)
    hall.tenant("slow", tokens_per_minute=600)
    for _ in range(6):
        hall.put("slow", prompt_tokens=50, max_tokens=150)
    hall.put("other")
    hall.turn()
    begun = [sum(e.job.tenant == "slow" for e in hall.started)]
    assert any(e.job.tenant == "other" for e in hall.started), "in nobody's way"
    for _ in range(60):
        hall.now += 1.0
        hall.turns.survey(hall.now, None)
        begun.append(len(hall.turn()))
    assert sum(begun) == 6 and begun[0] == 3
    assert [n for n, count in enumerate(begun) if count] == [0, 20, 40, 60], "600 a minute is 200 in 20 s"


def test_a_rate_is_corrected_when_a_job_has_ended() -> None:
    hall = Hall(seqs=50)
    hall.tenant("slow", tokens_per_minute=600)
    for _ in range(6):
        hall.put("slow", prompt_tokens=50, max_tokens=150)
    for entry in hall.turn():
        hall.end(entry, 0)  # each used 50 of the 200 it was expected to use
    assert len(hall.turn()) == 2


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_jobs_run_than_the_limit_and_others_pass(limit: int) -> None:
    hall = Hall(seqs=100)
    hall.tenant("few", running_jobs=limit)
    for _ in range(50):
        hall.put("few")
    for _ in range(10):
        hall.put("other")
    hall.turn()
    assert sorted(e.job.tenant for e in hall.running) == ["few"] * limit + ["other"] * 10
    few = next(e for e in hall.running if e.job.tenant == "few")
    hall.end(few, 1)
    assert [e.job.tenant for e in hall.turn()] == ["few"]


def test_a_limit_counts_the_jobs_of_all_tiers() -> None:
    hall = Hall(seqs=100)
    hall.tenant("few", running_jobs=2)
    for tier in ("interactive", "standard", "bulk"):
        hall.put("few", tier)
    hall.turn()
    assert len(hall.running) == 2


def test_tokens_in_the_engine_are_those_of_the_rendered_prompt() -> None:
    """What is expected before rendering is 50 tokens a prompt; they turn out to have 500."""
    hall = Hall(seqs=100)
    hall.tenant("few", tokens_in_engine=1200)
    for _ in range(8):
        hall.put("few", prompt_tokens=500, max_tokens=20)
    hall.put("other")
    hall.turn()
    assert sorted(e.job.tenant for e in hall.running) == ["few", "few", "other"]
    hall.check()
    hall.end(hall.started[0], 1)
    assert len(hall.turn()) == 1


def test_one_job_of_a_tenant_always_runs_unless_it_never_could() -> None:
    hall = Hall(seqs=100)
    hall.tenant("few", tokens_in_engine=100)
    hall.put("few", prompt_tokens=90, max_tokens=200)
    hall.put("few", prompt_tokens=1, max_tokens=1)
    hall.turn()
    assert len(hall.running) == 1
    with pytest.raises(Refusal) as refused:
        check_room(TenantLimits(tokens_in_engine=100), 98, 4)
    assert refused.value.code == ErrorCode.QUOTA_EXCEEDED and "102" in refused.value.message
    assert "100" in refused.value.message
    check_room(TenantLimits(tokens_in_engine=100), 96, 4)


def test_a_limit_that_is_raised_holds_at_once_for_those_that_wait() -> None:
    hall = Hall(seqs=100)
    hall.tenant("few", running_jobs=1)
    for _ in range(5):
        hall.put("few")
    hall.turn()
    hall.tenant("few", running_jobs=4)
    hall.turns.survey(hall.now, None)
    hall.turn()
    assert len(hall.running) == 4
    hall.tenant("few", running_jobs=2)
    for entry in hall.running[:2]:
        hall.end(entry, 1)
    assert not hall.turn(), "lowered: those that run go on, and none comes on top"


def test_those_that_wait_for_a_limit_leave_the_window_to_others() -> None:
    """64 tenants over their limits, each with a window's worth of jobs, and one that is not."""
    hall = Hall(seqs=1000)
    for n in range(64):
        hall.tenant(f"t{n}", running_jobs=1)
        for _ in range(64):
            hall.put(f"t{n}")
    hall.turn()
    hall.put("free")
    assert [e.job.tenant for e in hall.turn()] == ["free"]
    assert len(hall.running) == 65


def test_a_full_queue_is_a_clear_error() -> None:
    check_queue(TenantLimits(), 10**6)
    check_queue(TenantLimits(queued_jobs=3), 2)
    with pytest.raises(Refusal) as refused:
        check_queue(TenantLimits(queued_jobs=3), 3)
    assert refused.value.code == ErrorCode.QUOTA_EXCEEDED and "limit is 3" in refused.value.message


def test_accounts_of_tenants_that_left_are_forgotten_but_their_debts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "ACCOUNTS", 10)
    accounts, limits = Accounts(), TenantLimits(tokens_per_minute=60)
    debtor = accounts.of("debtor", 0.0)
    assert debtor.may_pick(limits, 60, 0.0)
    debtor.meter(10_000)
    for n in range(100):
        accounts.of(f"t{n}", 1000.0)
    assert len(accounts._accounts) <= 11 and accounts.of("debtor", 1000.0) is debtor


def test_a_waiting_job_may_go_away_wherever_a_limit_holds_it() -> None:
    hall = Hall(seqs=100)
    hall.tenant("few", tokens_in_engine=1200)
    for _ in range(8):
        hall.put("few", prompt_tokens=500, max_tokens=20)
    hall.turn()
    for entry in hall.entries:
        if entry.stage is not Stage.RUNNING:
            hall.turns.remove(entry, hall.now)
            hall.check()
    hall.drain()


def test_who_waits_behind_a_limit_goes_on_waiting_when_the_job_before_goes_away() -> None:
    """The job that went held its tenant's only place: the one behind it has waited as long, and keeps its turn."""
    hall = Hall(seqs=4, max_wait_s=30.0)
    hall.tenant("one", running_jobs=1)
    hall.slow = True
    first, second = (hall.put("one", "interactive", max_tokens=10) for _ in range(2))
    hall.turn()
    assert (first.stage, second.stage) == (Stage.PICKED, Stage.QUEUED)
    waiting = hall.turns.tiers["interactive"].waiting
    before = list(waiting.values())
    hall.now += 20.0
    hall.turns.remove(first, hall.now)
    assert list(waiting.values()) == before, "its tenant's wait began anew"
    hall.check()
    hall.drain()
