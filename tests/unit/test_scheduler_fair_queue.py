from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.scheduler.fair_queue import FairQueue


def drain(queue: FairQueue[tuple[str, float]]) -> list[tuple[str, float]]:
    out = []
    while (popped := queue.pop()) is not None:
        out.append(popped[0])
    return out


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.integers(1, 8), st.lists(st.floats(1, 100), min_size=1, max_size=40)),
        min_size=2,
    )
)
def test_backlogged_flows_get_service_by_weight_within_one_job(flows: dict[str, tuple[int, list[float]]]) -> None:
    """SFQ's bound (Goyal et al., theorem 1) while backlogged: |W_f/w_f − W_g/w_g| ≤ c_f^max/w_f + c_g^max/w_g."""
    queue: FairQueue[tuple[str, float]] = FairQueue()
    left = {}
    for name, (weight, costs) in flows.items():
        left[name] = len(costs)
        for cost in costs:
            queue.put(name, (name, cost), cost, weight)
    served = dict.fromkeys(flows, 0.0)
    for name, cost in drain(queue):
        served[name] += cost
        left[name] -= 1
        busy = [n for n in flows if left[n]]
        for f in busy:
            for g in busy:
                (wf, cf), (wg, cg) = flows[f], flows[g]
                assert abs(served[f] / wf - served[g] / wg) <= max(cf) / wf + max(cg) / wg + 1e-6


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 50)), max_size=60))
def test_nothing_is_lost_and_each_flow_keeps_its_order(puts: list[tuple[str, float]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for n, (flow, cost) in enumerate(puts):
        queue.put(flow, (flow, n), cost)
    assert len(queue) == len(puts)
    out = []
    while (popped := queue.pop()) is not None:
        out.append(popped[0])
    assert sorted(n for _, n in out) == list(range(len(puts)))
    for flow in "abc":
        numbers = [n for f, n in out if f == flow]
        assert numbers == sorted(numbers)
    assert len(queue) == 0


def test_a_flood_does_not_delay_a_newcomer() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(1000):
        queue.put("flood", "flood", 10)
    for _ in range(5):
        queue.pop()
    queue.put("late", "late", 10)
    assert "late" in [queue.pop()[0] for _ in range(2)]  # type: ignore[index]


def test_idling_saves_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("busy", "busy", 10)
    for _ in range(100):
        queue.pop()
        queue.put("busy", "busy", 10)
    for _ in range(10):
        queue.put("idle", "idle", 10)
    first = [queue.pop()[0] for _ in range(2)]  # type: ignore[index]
    assert sorted(first) == ["busy", "idle"]


def test_a_corrected_cost_counts() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(3):
        queue.put("a", "a", 1)
        queue.put("b", "b", 1)
    queue.pop()
    queue.charge("a", 100)
    assert [queue.pop()[0] for _ in range(3)] == ["b", "b", "b"]  # type: ignore[index]


def test_removed_items_are_returned_and_not_served() -> None:
    queue: FairQueue[int] = FairQueue()
    for n in range(10):
        queue.put(n % 2, n, 1)
    assert sorted(queue.remove(lambda n: n in (0, 3, 4))) == [0, 3, 4]
    assert len(queue) == 7
    served = [queue.pop()[0] for _ in range(7)]  # type: ignore[index]
    assert sorted(served) == [1, 2, 5, 6, 7, 8, 9]
    assert queue.pop() is None


def test_flows_are_forgotten_when_the_queue_runs_empty() -> None:
    queue: FairQueue[int] = FairQueue()
    for n in range(2000):
        queue.put(n, n, 1)
        queue.pop()
    assert len(queue._flows) == 0
