"""What tenants may rely on: shares, a bound on waiting, the reserve, a flood that hurts only itself."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.scheduler.entry import Entry, Stage
from service.scheduler.turns import WINDOW
from tests.unit.turns_kit import Hall


class Machine:
    """Runs a hall's engine in simulated time: each output token takes a tenth of a second."""

    def __init__(self, hall: Hall) -> None:
        self.hall = hall
        self.ends: list[tuple[float, int, Entry]] = []
        self.served: dict[str, float] = {}
        hall.on_start = self._start

    def _start(self, entry: Entry) -> None:
        assert entry.prepared is not None
        length = entry.prepared.max_tokens
        heapq.heappush(self.ends, (self.hall.now + length / 10, entry.number, entry))
        entry.first_output()

    def run(self, until: float) -> None:
        self.hall.turn()
        while self.ends and self.ends[0][0] <= until:
            self.hall.now, _, entry = heapq.heappop(self.ends)
            if entry.stage is not Stage.RUNNING:
                continue
            assert entry.prepared is not None
            n, output = entry.prepared.n, entry.prepared.max_tokens
            cost = entry.prepared.prompt_tokens + 8 * n * output
            self.served[entry.job.tenant] = self.served.get(entry.job.tenant, 0.0) + cost
            self.hall.end(entry, n * output)
            self.hall.turn()
        self.hall.now = until
        self.hall.turns.survey(until, None)
        self.hall.turn()


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_backlogged_tenants_get_the_engine_by_weight_whatever_their_jobs_are_like(seed: int) -> None:
    chance = random.Random(seed)
    hall = Hall(seqs=30, reserved=2, reserve=0.06)
    weights = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 1.0, "e": 2.0, "f": 4.0}
    for name, weight in weights.items():
        hall.tenant(name, weight)
        for _ in range(900):
            low, high = (16, 48) if name in "abc" else (32, 96)
            hall.put(name, prompt_tokens=chance.randint(50, 250), max_tokens=chance.randint(low, high))
    machine = Machine(hall)
    machine.run(hall.now + 10)
    machine.served.clear()
    machine.run(hall.now + 300)
    shares = [machine.served[name] / weight for name, weight in weights.items()]
    assert jain(shares) >= 0.98, shares


def test_tiers_share_the_engine_however_many_tenants_each_has() -> None:
    """One interactive tenant, two of standard, forty of bulk: 16 to 4 to 1."""
    hall = Hall(seqs=21)
    for n in range(43):
        tier = "interactive" if n == 0 else "standard" if n < 3 else "bulk"
        for _ in range(1500 if n == 0 else 300 if n < 3 else 20):
            hall.put(f"t{n}", tier, max_tokens=20)
    machine = Machine(hall)
    machine.run(hall.now + 120)
    served = [
        sum(cost for tenant, cost in machine.served.items() if low <= int(tenant[1:]) < high)
        for low, high in ((0, 1), (1, 3), (3, 43))
    ]
    assert served[0] / served[1] == pytest.approx(4, rel=0.15)
    assert served[1] / served[2] == pytest.approx(4, rel=0.25)


def test_a_flood_does_not_keep_a_neighbour_waiting() -> None:
    """The worst case: the flood's jobs were admitted together and end together, ten seconds later."""
    hall = Hall(seqs=66, reserved=4, reserve=0.06)
    machine = Machine(hall)
    for _ in range(5000):
        hall.put("flood", max_tokens=100)
    machine.run(hall.now)
    assert len(hall.running) == 62, "the reserve is left"
    machine.run(hall.now + 3.0)
    for _ in range(4):
        late = hall.put("neighbour", max_tokens=20)
        machine.run(hall.now)
        assert late.stage is Stage.RUNNING, "at once, from the reserve"
    waits = hall.put("neighbour", max_tokens=20)
    machine.run(hall.now + 2.0)
    assert waits.stage is Stage.RUNNING, "as soon as one of its own has ended"


def test_a_neighbour_overtakes_what_waits_inside_the_engine() -> None:
    """vLLM serves the lowest priority first, when its cache or its budget of tokens is full."""
    hall = Hall(seqs=100)
    for _ in range(60):
        hall.put("flood")
    flood = hall.turn()
    for entry in flood[:10]:
        entry.first_output()
    hall.put("neighbour")
    (neighbour,) = hall.turn()
    assert neighbour.priority <= min(e.priority for e in flood[11:])
    assert [e.priority for e in flood] == sorted(e.priority for e in flood)
    assert isinstance(neighbour.priority, int)


def test_the_reserve_is_not_for_the_flood_even_if_it_is_interactive() -> None:
    hall = Hall(seqs=24, reserved=4)
    for _ in range(200):
        hall.put("flood", "interactive", max_tokens=100)
    hall.put("other", "standard", max_tokens=100)
    hall.turn()
    hall.now += 1
    hall.turn()
    assert sum(e.job.tenant == "flood" for e in hall.running) <= 22, "half of the reserve at most"
    assert any(e.job.tenant == "other" for e in hall.running)


def test_a_tenant_alone_uses_all_ordinary_slots_and_never_the_reserve() -> None:
    hall = Hall(seqs=24, reserved=4)
    for _ in range(200):
        hall.put("only", n=3)
    hall.turn()
    assert sum(e.claim.sequences for e in hall.running if e.claim) == 18


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(st.sampled_from(["interactive", "standard", "bulk"]), st.integers(1, 4)), min_size=1, max_size=6
    ),
    st.integers(0, 1000),
)
def test_no_tenant_waits_longer_for_its_turn_than_the_bound(
    width: int, floods: list[tuple[str, int]], seed: int
) -> None:
    """Newcomers of higher tiers without end, and one wide bulk job. Once it has waited for the bound, only those start
    that have waited longer; with the time that running jobs need to end, that is when it starts."""
    chance = random.Random(seed)
    hall = Hall(seqs=12, max_wait_s=30.0, bulk_wait_s=1000.0)
    machine = Machine(hall)
    numbers = 0

    def more() -> None:
        nonlocal numbers
        while sum(e.stage in (Stage.QUEUED, Stage.PICKED) for e in hall.entries) < 40:
            for tier, weight in floods:
                numbers += 1  # every one a tenant of its own: its tag is never above virtual time
                name = f"n{numbers}"
                hall.tenant(name, float(weight) * 100)
                hall.put(name, tier, max_tokens=chance.randint(10, 50))

    more()
    machine.run(hall.now + 1)
    hall.tenant("meek", 0.01)
    meek = hall.put("meek", "bulk", n=width, max_tokens=50)
    began = since = hall.now
    hall.now += 0.01  # whoever comes now comes later
    while meek.stage is not Stage.RUNNING:
        more()
        before = len(hall.started)
        overdue = hall.now - began > 30.0
        machine.run(hall.now + 0.5)
        if overdue:
            for entry in hall.started[before:]:
                if entry is meek:
                    break
                assert entry.number < meek.number, "it came later, and went first"
                since = hall.now
            assert hall.now - since <= 5.0 + 1.0, "the longest job that ran, two ticks"
        else:
            since = hall.now
        hall.entries[:] = [e for e in hall.entries if e.stage is not Stage.GONE]


def test_the_bulk_tier_is_never_still_for_long() -> None:
    """One interactive tenant that could use all of the engine, with jobs so dear that bulk's turn is minutes away."""
    hall = Hall(seqs=2, max_wait_s=10_000.0, bulk_wait_s=20.0)
    machine = Machine(hall)
    for _ in range(3):
        hall.put("batch", "bulk", n=2, max_tokens=2000)
    machine.run(hall.now + 1)
    gaps, last = [], hall.now
    for _ in range(400):
        if sum(e.stage is Stage.QUEUED for e in hall.entries) < 10:
            hall.put("rush", "interactive", max_tokens=10)
        machine.run(hall.now + 1.0)
        started = [e for e in hall.started if e.tier == "bulk"]
        if len(started) > len(gaps):
            gaps.append(hall.now - last)
            last = hall.now
    assert len(gaps) >= 2 and max(gaps[1:]) < 200.0 + 20.0 + 2.0, "the time of the one before, and the bound"


def test_time_in_which_nothing_could_be_admitted_ages_nobody() -> None:
    hall = Hall(seqs=1, max_wait_s=30.0)
    machine = Machine(hall)
    hall.put("busy", max_tokens=10_005)  # it ends when the hold is over
    machine.run(hall.now)
    for name in ("first", "second"):
        hall.tenant(name, 1.0 if name == "first" else 50.0)
        for _ in range(3):
            hall.put(name, max_tokens=10)
    hall.turns.clock.hold(hall.now)
    hall.now += 500.0
    for name in ("third", "second"):  # whoever comes meanwhile begins to wait afterwards
        hall.put(name, max_tokens=10)
    hall.now += 500.0
    hall.turns.clock.unhold(hall.now)
    machine.run(hall.now + 1)
    assert not any(e.aged for e in hall.started)
    assert all(
        abs(since - hall.turns.clock.at(hall.now)) < 2 for since in hall.turns.tiers["standard"].waiting.values()
    )


def test_jobs_of_one_prefix_run_together_within_their_tenants_queue() -> None:
    hall = Hall(seqs=1)
    for n in range(24):
        hall.put("acme", prompt=("a" if n % 2 else "b") * 400)
        hall.put("other")
    machine = Machine(hall)
    machine.run(hall.now + 1000)
    prompts = "".join(e.job.body["prompt"][0] for e in hall.started if e.job.tenant == "acme")
    assert prompts == "b" * 12 + "a" * 12
    assert [e.job.tenant for e in hall.started[10:20]].count("acme") == 5, "turns go on"


def test_conversations_run_in_order_and_side_by_side() -> None:
    hall = Hall(seqs=8)
    hall.tenant("talks", order="conversation")
    for n in range(40):
        hall.put("talks", conversation="xyz"[n % 3])
    hall.put("talks")
    hall.put("other")
    assert len(hall.turn()) == 5, "one of each conversation, one without, and the neighbour"
    machine = Machine(hall)
    for entry in hall.running:
        machine._start(entry)
    machine.run(hall.now + 100)
    for talk in "xyz":
        numbers = [e.number for e in hall.started if e.job.conversation == talk]
        assert numbers == sorted(numbers) and len(numbers) in (13, 14)


def test_a_job_that_comes_back_from_a_lost_engine_keeps_its_turn_and_its_key() -> None:
    hall = Hall(seqs=1)
    hall.tenant("strict", order="tenant")
    first, second = hall.put("strict"), hall.put("strict")
    hall.turn()
    hall.turns.requeue(first, hall.now)
    first.prepared = None
    hall.check()
    hall.put("other")
    hall.turn()
    assert second.stage is Stage.BEHIND
    hall.rendering.append(first)
    for entry in hall.running:
        hall.end(entry, 1)
    hall.turn()
    assert first.stage is Stage.RUNNING
    hall.end(first, 1)
    assert hall.turn() == [second]


def test_the_window_takes_in_a_newcomer_that_comes_before_those_in_it() -> None:
    hall = Hall(seqs=1)
    for _ in range(10 * WINDOW):
        hall.put("flood")
    hall.turn()
    late = hall.put("late")
    hall.turn()
    assert late.stage is Stage.PICKED
    hall.end(hall.running[0], 1)
    assert hall.turn() == [late]


def test_plain_fifo_serves_by_arrival_and_knows_no_tenants() -> None:
    hall = Hall(seqs=3, reserved=1, policy="fifo")
    hall.tenant("few", running_jobs=1)
    for n in range(60):
        hall.put(("few", "other")[n % 3 == 0], ("interactive", "bulk")[n % 2])
    machine = Machine(hall)
    machine.run(hall.now + 1000)
    assert [e.number for e in hall.started] == list(range(1, 61))
    assert {e.priority for e in hall.started} == {0}


def test_who_comes_later_does_not_wait_for_all_that_waited_when_a_dear_job_began() -> None:
    """A tenant of hardly any weight, alone at first, starts jobs whose tags lie far ahead. Others come before the
    engine has begun with those, and are picked with tags of before; virtual time must not leave them behind."""
    hall = Hall(seqs=2, max_wait_s=1e9)
    hall.tenant("rare", 0.001)
    for name in ("early", "late"):
        hall.tenant(name)
    for _ in range(4):
        hall.put("rare", max_tokens=10)
    first = hall.turn()
    assert len(first) == 2
    for _ in range(40):
        hall.put("early", max_tokens=10)
    hall.turn()  # picked, in the window
    for entry in first:
        hall.end(entry, 10)
    for _ in range(40):
        hall.put("late", max_tokens=10)
    while len(hall.started) < 22:
        hall.turn()
        hall.end(hall.running[0], 10)
    served = [entry.job.tenant for entry in hall.started[2:]]
    assert abs(served.count("early") - served.count("late")) <= 2, served
