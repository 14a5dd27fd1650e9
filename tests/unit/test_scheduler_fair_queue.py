from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.scheduler.fair_queue import FairQueue, Flow


class Served(FairQueue[tuple[str, float]]):
    """A queue in front of one server: what is taken begins to be served at once, unless a test says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.flow: Flow[tuple[str, float]] | None = None

    def add(self, key: str, cost: float, weight: float = 1.0) -> None:
        self.numbers += 1
        self.put(key, self.numbers, (key, cost), weight)

    def pop(self, *, begin: bool = True) -> tuple[str, float] | None:
        self.flow = flow = self.first()
        if flow is None:
            return None
        number, item = flow.lane.next()
        start = self.take(flow, number, item[1])
        if begin:
            self.begin(start)
        return item

    def drain(self) -> list[tuple[str, float]]:
        found = []
        while (item := self.pop()) is not None:
            found.append(item)
        return found


FLOWS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.integers(1, 8), st.lists(st.floats(1, 100), min_size=1, max_size=40)),
    min_size=2,
)


@given(FLOWS)
def test_backlogged_flows_get_service_by_weight_within_one_job_each(flows: dict[str, tuple[int, list[float]]]) -> None:
    """SFQ's bound (Goyal et al., theorem 1) while backlogged: |W_f/w_f − W_g/w_g| ≤ c_f^max/w_f + c_g^max/w_g."""
    queue = Served()
    left = {}
    for name, (weight, costs) in flows.items():
        left[name] = len(costs)
        for cost in costs:
            queue.add(name, cost, weight)
    served = dict.fromkeys(flows, 0.0)
    for name, cost in queue.drain():
        served[name] += cost
        left[name] -= 1
        busy = [n for n in flows if left[n]]
        for f in busy:
            for g in busy:
                (wf, cf), (wg, cg) = flows[f], flows[g]
                assert abs(served[f] / wf - served[g] / wg) <= max(cf) / wf + max(cg) / wg + 1e-6


class Reference:
    """The paper's algorithm, as plain as it can be: tags on arrival, the lowest start tag first, one server."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.finish: dict[str, float] = {}
        self.queue: list[tuple[float, int, str, float]] = []
        self.serial = 0

    def add(self, key: str, cost: float, weight: float) -> None:
        start = max(self.virtual_time, self.finish.get(key, 0.0))
        self.finish[key] = start + cost / weight
        self.serial += 1
        self.queue.append((start, self.serial, key, cost))

    def pop(self) -> list[tuple[str, float]]:
        """Those that may be next: more than one if tags are equal."""
        least = min(self.queue)[0]
        self.virtual_time = least
        heads: dict[str, tuple[float, int, str, float]] = {}
        for item in sorted(self.queue):
            heads.setdefault(item[2], item)
        return [(key, cost) for start, _, key, cost in heads.values() if math.isclose(start, least, abs_tol=1e-9)]

    def drop(self, key: str, cost: float) -> None:
        item = min(i for i in self.queue if i[2] == key)
        self.queue.remove(item)


@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.tuples(st.sampled_from("abcd"), st.integers(1, 40)), st.none()), min_size=1, max_size=120),
    st.fixed_dictionaries({key: st.integers(1, 5) for key in "abcd"}),
)
def test_it_serves_in_the_order_of_the_paper_whatever_arrives_when(
    steps: list[tuple[str, int] | None], weights: dict[str, int]
) -> None:
    """A step adds a job or serves one. The queue never runs quite empty: the end of a busy period is our own rule."""
    queue, reference = Served(), Reference()
    queue.add("a", 1000, weights["a"])
    reference.add("a", 1000, weights["a"])
    queue.pop()  # stays in service all the time: the busy period goes on
    assert reference.pop() == [("a", 1000)]
    reference.drop("a", 1000)
    for step in steps:
        if step is not None:
            queue.add(step[0], step[1], weights[step[0]])
            reference.add(step[0], step[1], weights[step[0]])
        elif (item := queue.pop()) is not None:
            assert item in reference.pop()
            reference.drop(*item)
        else:
            assert not reference.queue


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 50)), max_size=60), st.data())
def test_nothing_is_lost_whoever_goes_away_and_each_flow_keeps_its_order(
    puts: list[tuple[str, float]], data: st.DataObject
) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    flows = {}
    for n, (key, _) in enumerate(puts):
        flows[n] = queue.put(key, n, (key, n))
    gone = data.draw(st.sets(st.sampled_from(range(len(puts))))) if puts else set()
    for n in gone:
        queue.remove(flows[n], n)
    assert len(queue) == len(puts) - len(gone)
    out = []
    while (flow := queue.first()) is not None:
        number, item = flow.lane.next()
        queue.begin(queue.take(flow, number, puts[number][1]))
        out.append(item)
    assert {n for _, n in out} == set(range(len(puts))) - gone
    for key in "abc":
        numbers = [n for k, n in out if k == key]
        assert numbers == sorted(numbers)
    assert len(queue) == 0


def test_a_flood_does_not_delay_a_newcomer() -> None:
    queue = Served()
    for _ in range(1000):
        queue.add("flood", 10)
    for _ in range(5):
        queue.pop()
    queue.add("late", 10)
    assert ("late", 10) in [queue.pop() for _ in range(2)]


def test_a_newcomer_comes_before_what_was_taken_and_has_not_begun() -> None:
    """Else it would wait behind all that is rendered ahead, and behind the engine's own queue."""
    queue = Served()
    for _ in range(100):
        queue.add("flood", 10)
    ahead = []
    for _ in range(20):
        queue.pop(begin=False)
        assert queue.flow is not None
        ahead.append(queue.flow.finish - 10)
    queue.begin(ahead[4])  # five of them have
    queue.add("late", 10)
    late = queue.first()
    assert late is not None and late.key == "late"
    assert late.start <= ahead[5], "its tag is not above those that still wait"


def test_idling_saves_nothing_up() -> None:
    queue = Served()
    queue.add("busy", 10)
    for _ in range(100):
        queue.pop()
        queue.add("busy", 10)
    for _ in range(10):
        queue.add("idle", 10)
    assert sorted(str(queue.pop()) for _ in range(2)) == ["('busy', 10)", "('idle', 10)"]


def test_being_over_a_limit_saves_nothing_up() -> None:
    queue = Served()
    for _ in range(100):
        queue.add("limited", 10)
        queue.add("other", 10)
    flow = queue.flows["limited"]
    queue.block(flow)
    assert {queue.pop() for _ in range(50)} == {("other", 10)}
    queue.unblock(flow)
    assert sorted(str(queue.pop()) for _ in range(4)) == ["('limited', 10)"] * 2 + ["('other', 10)"] * 2


def test_a_blocked_flow_keeps_nobody_waiting_and_loses_nothing() -> None:
    queue = Served()
    queue.add("limited", 1)
    queue.block(queue.flows["limited"])
    queue.add("limited", 1)
    queue.add("other", 1)
    assert [queue.pop(), queue.pop()] == [("other", 1), None]
    assert len(queue) == 2
    queue.unblock(queue.flows["limited"])
    assert queue.drain() == [("limited", 1)] * 2


def test_a_corrected_cost_counts() -> None:
    queue = Served()
    for _ in range(4):
        queue.add("a", 1)
        queue.add("b", 1)
    queue.pop()
    queue.charge(queue.flows["a"], 100)
    assert [queue.pop() for _ in range(4)] == [("b", 1)] * 4


def test_what_was_paid_too_much_is_given_back_but_not_more_than_to_now() -> None:
    queue = Served()
    for _ in range(10):
        queue.add("a", 10)
        queue.add("b", 10)
    for _ in range(10):
        queue.pop()
    queue.charge(queue.flows["a"], -10_000)
    assert sum(item == ("a", 10) for item in [queue.pop() for _ in range(6)]) <= 4, "no credit from before"


def test_a_changed_weight_holds_from_the_next_job_on() -> None:
    queue = Served()
    for _ in range(60):
        queue.add("a", 10)
        queue.add("b", 10)
    for _ in range(40):
        flow = queue.first()
        assert flow is not None
        number, _ = flow.lane.next()
        queue.begin(queue.take(flow, number, 10, 3.0 if flow.key == "a" else 1.0))
    assert queue.active_weight == pytest.approx(4.0)
    assert 28 <= 60 - len(queue.flows["a"].lane) <= 32


def test_flows_are_forgotten_when_their_debt_is_paid() -> None:
    queue = Served()
    queue.add("busy", 1)
    for n in range(2000):
        queue.add(str(n), 1)
        queue.add("busy", 1)
        for _ in range(2):
            queue.pop()
            assert queue.flow is not None
            queue.done(queue.flow)
    assert len(queue.flows) < 300 and len(queue._heads) < 300
    while queue.pop() is not None:
        assert queue.flow is not None
        queue.done(queue.flow)
    assert queue.active == 0 and queue.active_weight == 0.0 and not queue.flows


def test_a_debt_outlives_a_pause() -> None:
    queue = Served()
    for n in range(20):
        queue.add("other", 10)
        if n < 1:
            queue.add("debtor", 500)
    for _ in range(2):
        queue.pop()
    debtor = queue.flows["debtor"]
    queue.done(debtor)  # all it had has ended
    queue.add("debtor", 10)
    assert [queue.pop() for _ in range(15)] == [("other", 10)] * 15
