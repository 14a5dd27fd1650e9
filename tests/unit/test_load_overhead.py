"""The benchmark's statistics: a verdict is only given when the interval allows it."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.overhead import Interval, Pair, Round, added_delay_ms, jain, judge, median_interval, order, paired, summary


def rounds(*rates: float) -> list[Round]:
    return [
        Round(side, round(rate * 1000), 1000.0, 10.0) for side, rate in zip(order(len(rates) // 2), rates, strict=True)
    ]


def test_sides_alternate_so_that_a_drift_hits_both() -> None:
    assert order(4) == ["A", "B", "B", "A", "A", "B", "B", "A"]
    drifting = rounds(*(100.0 + n for n in range(8)))  # the machine speeds up all the time, the sides are equal
    ratios = [pair.ratio for pair in paired(drifting)]
    assert abs(statistics.mean(ratios) - 1) < 0.0005


def test_pairs_are_neighbours_of_unlike_sides() -> None:
    first, second = paired(rounds(100, 98, 97, 100))
    assert (first.ratio, second.ratio) == (0.98, 0.97)
    assert first.added_cpu_us is not None and first.added_cpu_us > 0
    assert Pair(Round("A", 1, 1.0), Round("B", 1, 1.0)).added_cpu_us is None
    for wrong in ([Round("A", 1, 1.0)], [Round("A", 1, 1.0)] * 2, [Round("A", 0, 1.0), Round("B", 1, 1.0)]):
        with pytest.raises(ValueError):
            paired(wrong)


@given(st.lists(st.floats(0.5, 1.5), min_size=2, max_size=12), st.integers(0, 5))
def test_the_interval_holds_the_median_and_stays_within_the_values(values: list[float], seed: int) -> None:
    interval = median_interval(values, seed=seed, resamples=400)
    assert min(values) <= interval.low <= interval.point <= interval.high <= max(values)
    assert interval == median_interval(values, seed=seed, resamples=400)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    chance = random.Random(3)
    covered = 0
    for seed in range(200):
        interval = median_interval([chance.gauss(0.97, 0.02) for _ in range(9)], seed=seed, resamples=300)
        covered += interval.low <= 0.97 <= interval.high
    assert covered > 180


def test_one_pair_is_no_interval() -> None:
    with pytest.raises(ValueError, match="two"):
        median_interval([1.0])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.98, 1.0, "pass"), (0.9, 0.979, "fail"), (0.97, 0.98, "undecided"), (0.9, 1.1, "undecided")],
)
def test_the_verdict_is_undecided_while_the_threshold_lies_inside(low: float, high: float, verdict: str) -> None:
    assert judge(Interval((low + high) / 2, low, high), 0.98) == verdict


def test_the_summary_lists_every_round_and_agrees_with_itself() -> None:
    told = summary(rounds(100, 99, 99, 100, 100, 99, 98.5, 100), threshold=0.98)
    assert told["ratio"] == 0.99 and told["verdict"] == "pass" and len(told["rounds"]) == 8
    assert told["ratio_ci95"][0] <= told["ratio"] <= told["ratio_ci95"][1]
    assert summary(rounds(100, 90, 91, 100), threshold=0.98)["verdict"] == "fail"


def test_the_added_delay_is_a_difference_of_medians() -> None:
    assert added_delay_ms([0.010, 0.020, 0.030], [0.026, 0.025, 9.0]) == pytest.approx(6.0)
    with pytest.raises(ValueError):
        added_delay_ms([], [1.0])


def test_jains_index_is_one_for_equal_shares_and_low_for_one_winner() -> None:
    assert jain([5, 5, 5]) == pytest.approx(1.0)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
