"""The simulated engine's scheduling and timing: it keeps to what was measured on an H200, and to vLLM's rules."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine import prefixes
from service.engine.batch import Batch, Sequence, StepTime
from service.engine.prefixes import BLOCK, Prefixes
from service.engine.profiles import PROFILES

PLAIN = StepTime(base=1.0, per_seq=0.0, per_prefill_token=0.0, per_kv_token=0.0)
_numbers = itertools.count()


def sequence(prompt: int = 4, output: int = 4, priority: int = 0, blocks: tuple[int, ...] = ()) -> Sequence:
    return Sequence(priority, next(_numbers), prompt, blocks, output, tell_at=output)


def batch(slots: int = 8, budget: int = 64, kv: int = 10_000, time: StepTime = PLAIN) -> Batch[Sequence]:
    return Batch(slots, budget, kv, time)


def step(engine: Batch[Sequence]) -> list[Sequence]:
    """One whole step; those that ended in it."""
    assert engine.begin() is not None
    done = [s for s in engine.finish().told if s.produced >= s.limit]
    engine.retire(done)
    return done


@dataclass
class Run:
    wall: float
    first: list[float]  # seconds, in order of size
    whole: list[float]

    @property
    def mean_first(self) -> float:
        return sum(self.first) / len(self.first)

    @property
    def mean_whole(self) -> float:
        return sum(self.whole) / len(self.whole)


def closed_loop(in_flight: int, jobs: int = 1000, prompt: int = 128, output: int = 128) -> Run:
    """The measured workload in simulated time: so many requests in flight until all are through."""
    profile = PROFILES["h200-8b"]
    engine: Batch[Sequence] = Batch(512, 8192, profile.kv_tokens, profile.time)
    now, left = 0.0, jobs
    began: dict[Sequence, float] = {}
    first: dict[Sequence, float] = {}
    whole = []

    def submit(count: int) -> None:
        nonlocal left
        for _ in range(min(count, left)):
            one = sequence(prompt, output)
            began[one] = now
            engine.add(one)
            left -= 1

    submit(in_flight)
    while (seconds := engine.begin()) is not None:
        now += seconds
        made = engine.finish()
        for one in made.started:
            first.setdefault(one, now - began[one])
        done = [one for one in made.told if one.produced >= one.limit]
        whole += [now - began[one] for one in done]
        engine.retire(done)
        submit(len(done))
    return Run(now, sorted(first.values()), whole)


# Measured on one H200 with the shape of Qwen3-8B: 1,000 requests, 128 tokens in and 128 out (seconds).
MEASURED = [
    # in flight, in all, first token mean and p99, whole job mean
    (64, 15.335, 0.1934, 0.2184, 0.9528),
    (256, 8.952, 0.4343, 0.7500, 2.1912),
    (1000, 7.897, 2.7398, 5.1851, 6.0196),  # 512 slots
]


@pytest.mark.parametrize(("in_flight", "wall", "first_mean", "first_p99", "whole_mean"), MEASURED)
def test_the_h200_profile_agrees_with_what_was_measured_there_within_ten_percent(
    in_flight: int, wall: float, first_mean: float, first_p99: float, whole_mean: float
) -> None:
    run = closed_loop(in_flight)
    assert run.wall == pytest.approx(wall, rel=0.05)
    assert run.mean_whole == pytest.approx(whole_mean, rel=0.05)
    assert run.mean_first == pytest.approx(first_mean, rel=0.10)
    assert run.first[int(0.99 * len(run.first))] == pytest.approx(first_p99, rel=0.10)


@pytest.mark.parametrize(("running", "measured"), [(64, 0.00598), (256, 0.0120), (512, 0.0190)])
def test_its_steps_take_what_a_step_took(running: int, measured: float) -> None:
    """Measured: (whole job - first token) / 127 at 64; at 256 and 512 less the prompts of the others in that time."""
    context = running * (128 + 64)
    assert PROFILES["h200-8b"].time.seconds(running, 0, context) == pytest.approx(measured, rel=0.12)


def test_long_prompts_go_in_chunks_within_the_steps_budget() -> None:
    engine = batch(budget=10, time=StepTime(0.0, 0.0, 1.0, 0.0))
    long, short = sequence(prompt=25, output=1), sequence(prompt=3, output=1)
    engine.add(long)
    engine.add(short)
    assert engine.begin() == 10.0
    engine.finish()
    assert engine.begin() == 10.0  # the rest of the budget is the long one's again
    engine.finish()
    assert engine.begin() == 8.0  # 5 + 3
    assert engine.finish().started == [long, short]


def test_running_sequences_take_their_token_from_the_budget_first() -> None:
    engine = batch(budget=6, time=StepTime(0.0, 0.0, 1.0, 0.0))
    running = [sequence(prompt=1, output=50) for _ in range(4)]
    for one in running:
        engine.add(one)
    step(engine)
    engine.add(sequence(prompt=10, output=1))
    assert engine.begin() == 0.0  # planned before it came
    engine.finish()
    assert engine.begin() == 2.0  # 6 - 4


def test_the_lowest_priority_value_waits_least_and_equals_go_in_order_of_arrival() -> None:
    engine = batch(slots=1)
    engine.add(sequence(output=3))
    step(engine)
    late, second, first = sequence(priority=9), sequence(priority=5), sequence(priority=1)
    third = sequence(priority=5)
    for one in (late, second, first, third):
        engine.add(one)
    order: list[Sequence] = []
    while engine.begin() is not None:
        order += [s for s in engine.finish().told if s.produced >= s.limit]
        engine.retire([s for s in order if not s.finished])
    assert order[1:] == [first, second, third, late]


def test_what_arrives_while_a_step_runs_is_in_the_step_after_the_next() -> None:
    engine = batch()
    engine.add(sequence(output=9))
    assert engine.begin() is not None
    engine.add(late := sequence(output=9))
    engine.finish()
    assert engine.begin() is not None and engine.admitted == []
    engine.finish()
    assert engine.begin() is not None and engine.admitted == [late]


def test_reading_the_context_takes_its_time() -> None:
    engine = batch(time=StepTime(0.0, 0.0, 0.0, 1.0))
    engine.add(sequence(prompt=7, output=3))
    times = [engine.begin()]
    engine.finish()
    times.append(engine.begin())
    engine.finish()
    times.append(engine.begin())
    assert times == [0.0, 8.0, 9.0]  # the prompt and what was produced


def test_a_sequence_that_is_dropped_leaves_nothing_behind() -> None:
    engine = batch(slots=2, budget=4)
    ones = [sequence(prompt=6, output=5) for _ in range(4)]
    for one in ones:
        engine.add(one)
    step(engine)
    step(engine)
    for one in ones:
        engine.drop(one)
    assert engine.begin() is None
    assert (engine.running, engine.kv) == (0, 0)


JOBS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30
)


@settings(max_examples=200, deadline=None)
@given(JOBS, st.integers(1, 6), st.integers(1, 30), st.integers(4, 200))
def test_every_sequence_gets_exactly_its_tokens_and_all_room_is_given_back(
    jobs: list[tuple[int, int, int, int]], slots: int, budget: int, kv: int
) -> None:
    engine = batch(slots, budget, kv)
    todo = [
        sequence(prompt, output, priority, prefixes.blocks(f"{text}" * 40, prompt, "salt"))
        for prompt, output, priority, text in jobs
    ]
    for one in todo:
        engine.add(one)
    produced: dict[Sequence, int] = dict.fromkeys(todo, 0)
    for _ in range(20_000):
        before = {one: one.produced for one in todo}
        if engine.begin() is None:
            break
        assert engine.running <= slots
        done = [s for s in engine.finish().told if s.produced >= s.limit]
        for one in todo:
            assert one.produced - before[one] in (0, 1)
            produced[one] += one.produced - before[one]
        engine.retire(done)
    assert all(one.finished and produced[one] == one.limit for one in todo)
    assert (engine.running, engine.kv) == (0, 0)
    assert engine.generated == sum(one.limit for one in todo)


def blocks_of(text: str, salt: str = "s") -> tuple[int, ...]:
    return prefixes.blocks(text, len(text) // 4, salt)


def test_blocks_are_known_by_all_that_comes_before_them_and_by_the_salt() -> None:
    one, other = blocks_of("a" * 64 + "b" * 64), blocks_of("c" * 64 + "b" * 64)
    assert len(one) == 2 and not set(one) & set(other)
    assert blocks_of("a" * 64 + "d" * 64)[0] == one[0]
    assert not set(blocks_of("a" * 64 + "b" * 64, salt="t")) & set(one)
    assert blocks_of("short") == ()


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    cache = Prefixes(1000)
    names = blocks_of("a" * 128)
    cache.take(names)
    assert cache.hits(names, prompt=2 * BLOCK) == 1
    assert cache.hits(names, prompt=2 * BLOCK + 1) == 2


def test_unused_blocks_stay_until_the_room_is_needed_the_longest_unused_go_first() -> None:
    cache = Prefixes(3 * BLOCK)
    old, new = blocks_of("a" * 64), blocks_of("b" * 64)
    for names in (old, new):
        cache.take(names)
        cache.give(names)
    assert cache.used == 0
    cache.evict(own=2 * BLOCK)
    found: list[Any] = [cache.hits(names, 100) for names in (old, new)]
    assert found == [0, 1]
