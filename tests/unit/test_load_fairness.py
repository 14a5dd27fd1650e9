"""The fairness bench's plans and figures: arrivals repeat, prompts share nothing, verdicts follow the bounds."""

from __future__ import annotations

import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.fairness import measures
from load.fairness.measures import Check, Share, fairness, p95, ratio, turn_wait, verdict
from load.fairness.offer import Offer, records
from load.fairness.plan import ENGINES, FACTOR, HEAVY, Shape, Writer, apart, arrivals, backlog, neighbours
from load.overhead import Interval, Round
from schemas.keys import partition_of
from service.engine import prefixes

SHAPE = Shape(128, 64, 192)
DELAYS = st.lists(st.floats(0.001, 10), min_size=1, max_size=60)


def test_one_neighbour_lies_on_the_floods_partition_and_every_other_on_its_own() -> None:
    names = neighbours(4, 12)
    places = [partition_of(name, 12) for name in names]
    assert places[0] == partition_of(HEAVY, 12)
    assert len(set(places)) == len(names) == 4


def test_backlogged_tenants_never_share_a_partition() -> None:
    names = apart(7, 12)
    assert len({partition_of(name, 12) for name in names}) == len(set(names)) == 7
    with pytest.raises(ValueError, match="partitions"):
        apart(13, 12)


def test_the_same_seed_gives_the_same_arrivals_in_every_window() -> None:
    one = arrivals(("a", "b"), 8.0, 30.0, SHAPE, seed=1)
    assert one == arrivals(("a", "b"), 8.0, 30.0, SHAPE, seed=1) != arrivals(("a", "b"), 8.0, 30.0, SHAPE, seed=2)
    assert [a.at_s for a in one] == sorted(a.at_s for a in one)
    assert all(SHAPE.low <= a.tokens <= SHAPE.high and a.at_s < 30.0 for a in one)
    # A tenant's arrivals are its own: another one beside it changes nothing.
    assert [a for a in one if a.tenant == "a"] == arrivals(("a",), 8.0, 30.0, SHAPE, seed=1)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_neighbours_ask_for_less_than_half_their_share(engine: str) -> None:
    sizes = ENGINES[engine]
    everything = sizes.heavy_per_s + sizes.neighbours * sizes.per_s
    assert sizes.per_s < everything / (sizes.neighbours + 1) / 2


def test_simulated_neighbours_have_the_samples_that_a_95th_percentile_needs() -> None:
    sizes = ENGINES["simulated"]
    assert sizes.per_s * sizes.window_s * sizes.rounds >= 100


def test_prompts_have_their_length_and_no_block_in_common() -> None:
    writer = Writer("r", "m")
    values = [orjson.loads(value) for value in backlog(writer, "acme", SHAPE, 50, seed=1)]
    texts = [value["body"]["prompt"] for value in values]
    assert all(len(text) == 4 * SHAPE.prompt for text in texts)
    named = [set(prefixes.blocks(text, SHAPE.prompt, "salt")) for text in texts]
    assert len(set.union(*named)) == sum(map(len, named))
    assert len({value["id"] for value in values}) == 50


def test_the_flood_is_jobs_as_everybody_writes_them_each_with_an_id_and_a_beginning_of_its_own() -> None:
    offer = Offer(
        bootstrap="b",
        pool="p",
        partitions=12,
        tenant=HEAVY,
        run="o",
        model="m",
        per_s=1.0,
        prompt=128,
        low=64,
        high=192,
    )
    stream = records(offer)
    values = [orjson.loads(next(stream).value or b"") for _ in range(500)]
    ids, texts = {value["id"] for value in values}, [value["body"]["prompt"] for value in values]
    assert len(ids) == len({text[:64] for text in texts}) == 500
    assert {len(text) for text in texts} == {4 * 128}
    like = orjson.loads(next(backlog(Writer("o", "m"), HEAVY, SHAPE, 1, seed=1)))
    assert all(value.keys() == like.keys() and value["body"].keys() == like["body"].keys() for value in values)
    assert {value["tenant"] for value in values} == {HEAVY} and FACTOR == 100


@given(DELAYS)
def test_nineteen_of_twenty_are_not_above_the_95th_percentile(delays: list[float]) -> None:
    found = p95(delays)
    assert found in delays
    assert sum(one <= found for one in delays) >= 0.95 * len(delays)
    assert sum(one < found for one in delays) < 0.95 * len(delays)


def test_a_ratio_is_the_others_percentile_over_the_bases_and_lies_in_its_interval() -> None:
    base = [0.01 * n for n in range(1, 101)]
    found = ratio(base, [2 * one for one in base])
    assert found.point == pytest.approx(2.0)
    assert found.low <= found.point <= found.high
    assert ratio(base, base).point == 1.0
    with pytest.raises(ValueError):
        ratio(base, [])


def test_shares_are_fair_when_they_go_by_weight() -> None:
    fair = {"a": Share(1, 100.0, 10), "b": Share(2, 200.0, 20), "c": Share(4, 400.0, 40)}
    equal = {name: Share(share.weight, 100.0, 10) for name, share in fair.items()}
    assert fairness(fair) == pytest.approx(1.0)
    assert fairness(equal) < 0.8


def test_a_baseline_counts_only_if_it_is_as_full_as_the_flood_and_has_no_backlog() -> None:
    assert measures.unlike(flood=290, baseline=286, queued=2) == ""
    assert "156" in measures.unlike(flood=290, baseline=156, queued=0)
    assert "22" in measures.unlike(flood=290, baseline=291, queued=22)


def test_a_turns_wait_counts_from_the_tenants_last_turn_or_the_jobs_arrival() -> None:
    # Three jobs came at 0; turns at 1, 2 and 5: the third waited 3 for its turn, not 5.
    assert turn_wait([(0, 1), (0, 2), (0, 5)]) == 3
    assert turn_wait([(0, 1), (9, 10)]) == 1  # nobody waited in between
    assert turn_wait([(0, 1)], until=8) == 7  # jobs were waiting when the measuring ended
    assert turn_wait([]) == 0.0


def test_cost_is_the_throughput_that_the_fair_one_loses() -> None:
    rounds = []
    for _ in range(4):
        rounds += [Round("A", 1000, 1.0), Round("B", 995, 1.0), Round("B", 995, 1.0), Round("A", 1000, 1.0)]
    found = measures.cost(rounds)
    assert found.point == pytest.approx(0.005) and found.low <= found.point <= found.high


def test_a_figure_past_its_bound_fails_only_if_its_whole_interval_is() -> None:
    assert Check("r", 1.1, 1.2, Interval(1.1, 1.0, 1.3)).verdict == "pass"
    assert Check("r", 1.3, 1.2, Interval(1.3, 1.1, 1.5)).verdict == "undecided"
    assert Check("r", 1.3, 1.2, Interval(1.3, 1.25, 1.5)).verdict == "fail"
    assert Check("j", 0.97, 0.98, at_least=True).verdict == "fail"
    assert Check("j", 0.99, 0.98, at_least=True).verdict == "pass"
    assert Check("r", math.inf, 1.2, Interval(math.inf, math.inf, math.inf)).verdict == "fail"


def test_the_verdict_is_that_of_the_worst() -> None:
    good, bad = Check("a", 1, 2), Check("b", 3, 2)
    open_ = Check("c", 3, 2, Interval(3, 1, 4))
    assert [verdict(found) for found in ([good], [good, open_], [bad, good, open_])] == ["pass", "undecided", "fail"]
