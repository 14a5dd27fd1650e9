"""The flood of `headrace bench fairness` without a machine: the scheduler's turns and the fitted engine, one clock.

What the bench shows on a real worker holds processors, Kafka and processes too; here only who runs when is left.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from load.fairness.measures import RATIO_MOST, p95
from load.fairness.plan import HEAVY, Shape, arrivals, neighbours
from service.engine import bounds
from service.engine.batch import Batch, Sequence
from service.engine.profiles import PROFILES
from service.scheduler.entry import Entry
from service.settings import EngineSettings
from tests.unit.turns_kit import Hall

SECONDS, WARM = 40.0, 10.0
QUEUED = 512  # of the flood, in the worker: its partition is not read beyond that
ACKNOWLEDGED = 0.04  # from a job's last token until its place is free
# Shorter outputs than the bench's, whose records a worker must read: more first tokens to rank.
SLOTS, SHAPE, PER_S = 256, Shape(384, 96, 288), 3.5
NAMES = neighbours(4, 12)


class World:
    def __init__(self) -> None:
        settings = EngineSettings(max_num_seqs=SLOTS)
        profile = PROFILES["h200-8b"]
        slots = bounds.slots(settings)
        self.hall = Hall(slots, bounds.reserved(settings), profile.kv_tokens, settings.reserve)
        self.hall.on_start = self._start
        self.batch: Batch[Sequence] = Batch(slots, 8192, profile.kv_tokens, profile.time)
        self.chance = random.Random(1)
        self.came: dict[Entry, float] = {}
        self.first: dict[Entry, float] = {}
        self.running: list[int] = []
        self.on_end: Callable[[Entry], None] = lambda entry: None
        self._entries: dict[Sequence, Entry] = {}
        self._stepping = False
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = itertools.count()

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._serial), what, arguments))

    def run(self) -> None:
        self.hall.now = 0.0
        self.at(0.0, self._tick)
        while self._events and self._events[0][0] <= SECONDS:
            self.hall.now, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)

    def put(self, tenant: str, tokens: int) -> None:
        self.came[self.hall.put(tenant, max_tokens=tokens, prompt_tokens=SHAPE.prompt)] = self.hall.now
        self.hall.turn()

    def heavy(self) -> None:
        self.put(HEAVY, self.chance.randint(SHAPE.low, SHAPE.high))

    def delays(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in NAMES}
        for entry, came in self.came.items():
            if entry.job.tenant in found and WARM <= came < SECONDS - 3.0:
                found[entry.job.tenant].append(self.first.get(entry, SECONDS) - came)
        return found

    def _tick(self) -> None:
        self.hall.turns.survey(self.hall.now, self.batch.kv / PROFILES["h200-8b"].kv_tokens)
        self.hall.turn()
        if self.hall.now > WARM:
            self.running.append(self.batch.running)
        self.at(self.hall.now + 0.25, self._tick)

    def _start(self, entry: Entry) -> None:
        assert entry.prepared is not None
        one = Sequence(entry.priority, self.hall.now, SHAPE.prompt, (), entry.prepared.max_tokens)
        self._entries[one] = entry
        self.batch.add(one)
        if not self._stepping:
            self._begin()

    def _begin(self) -> None:
        seconds = self.batch.begin()
        self._stepping = seconds is not None
        if seconds is not None:
            self.at(self.hall.now + seconds, self._finish)

    def _finish(self) -> None:
        step = self.batch.finish()
        for one in step.started:
            self.first.setdefault(self._entries[one], self.hall.now)
            self._entries[one].first_output()
        done = [one for one in step.told if one.produced >= one.limit]
        for one in step.told:
            one.tell_at = one.limit
        self.batch.retire(done)
        for one in done:
            self.at(self.hall.now + ACKNOWLEDGED, self._end, self._entries.pop(one))
        self._begin()

    def _end(self, entry: Entry) -> None:
        assert entry.prepared is not None
        self.hall.end(entry, entry.prepared.max_tokens)
        self.hall.turns.learn(entry.job, entry.prepared.max_tokens, 1, self.hall.now)
        self.on_end(entry)
        self.hall.turn()


def flood() -> World:
    world = World()

    def again(entry: Entry) -> None:
        if entry.job.tenant == HEAVY:
            world.heavy()

    world.on_end = again
    for _ in range(QUEUED):
        world.at(0.0, world.heavy)
    return world


def closed_loop(in_flight: int) -> World:
    world = World()

    def fill(entry: Entry | None = None) -> None:
        while len(world.came) - ended[0] < in_flight:
            world.heavy()

    def end(entry: Entry) -> None:
        ended[0] += 1
        fill()

    ended = [0]
    world.on_end = end
    world.at(0.0, fill)
    return world


def measured(world: World) -> tuple[float, dict[str, list[float]]]:
    for one in arrivals(NAMES, PER_S, SECONDS, SHAPE, seed=1):
        world.at(one.at_s, world.put, one.tenant, one.tokens)
    world.run()
    return sum(world.running) / len(world.running), world.delays()


def test_a_flood_delays_no_neighbours_first_token_by_more_than_a_fifth_at_equal_load() -> None:
    running, loud = measured(flood())
    # As many in flight as ran: a few fewer run, and none waits. One more than the ordinary slots would be a backlog,
    # and the two worlds the same.
    base_running, base = measured(closed_loop(round(running)))
    assert base_running == pytest.approx(running, rel=0.03), "the two are not equally full"
    assert running > SLOTS, "the engine is not full"
    assert base != loud, "the baseline has a backlog too"
    everybody = [one for delays in loud.values() for one in delays], [one for delays in base.values() for one in delays]
    assert p95(everybody[0]) / p95(everybody[1]) <= RATIO_MOST
    for name in NAMES:
        assert len(base[name]) == len(loud[name]) > 50
        assert p95(loud[name]) / p95(base[name]) <= RATIO_MOST + 0.1, "few samples of each"
