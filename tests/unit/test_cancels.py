"""Which records a cancel hits (R13)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.cancels import Cancels, Wish


def test_a_cancel_hits_records_that_are_not_younger() -> None:
    cancels = Cancels()
    cancels.add(Wish("acme", "a", None, 1000))
    assert cancels.hit("acme", "a", 0, 1000) and cancels.hit("acme", "a", 7, 1)
    assert not cancels.hit("acme", "a", 0, 1001)
    assert not cancels.hit("acme", "b", 0, 1000)
    assert not cancels.hit("globex", "a", 0, 1000)


def test_a_cancel_of_one_run_leaves_the_others() -> None:
    cancels = Cancels()
    cancels.add(Wish("acme", "a", 1, 1000))
    assert cancels.hit("acme", "a", 1, 1000)
    assert not cancels.hit("acme", "a", 0, 1000)


def test_a_cancel_of_a_tenant_hits_all_of_its_jobs() -> None:
    cancels = Cancels()
    cancels.add(Wish("acme", None, None, 1000))
    assert cancels.hit("acme", "whatever", 3, 1000)
    assert not cancels.hit("acme", "whatever", 3, 1001)
    assert not cancels.hit("globex", "whatever", 3, 1000)


def test_of_too_many_the_oldest_are_forgotten() -> None:
    cancels = Cancels(most=3)
    for number in range(5):
        cancels.add(Wish("acme", str(number), None, number))
    cancels.add(Wish("acme", "2", None, 9))  # told again: the youngest now
    cancels.add(Wish("acme", "5", None, 5))
    assert len(cancels) == 3 and cancels.forgotten == 3
    assert [n for n in range(6) if cancels.hit("acme", str(n), 0, 0)] == [2, 4, 5]


wishes = st.builds(
    Wish,
    tenant=st.sampled_from("ab"),
    job_id=st.sampled_from(["x", "y", None]),
    run=st.just(None),
    at_ms=st.integers(0, 9),
) | st.builds(
    Wish, tenant=st.sampled_from("ab"), job_id=st.sampled_from("xy"), run=st.integers(0, 1), at_ms=st.integers(0, 9)
)


@given(st.lists(wishes, max_size=20))
def test_a_record_is_hit_if_any_of_them_names_it_and_is_not_older(told: list[Wish]) -> None:
    cancels = Cancels()
    for wish in told:
        cancels.add(wish)
    for tenant in "ab":
        for job_id in "xy":
            for run in (0, 1):
                for at in range(10):
                    expected = any(
                        w.tenant == tenant and w.job_id in (job_id, None) and w.run in (run, None) and at <= w.at_ms
                        for w in told
                    )
                    assert cancels.hit(tenant, job_id, run, at) == expected
