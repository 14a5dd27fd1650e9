from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.scheduler.demand import ALIKE, Demand, likeness
from service.scheduler.lane import REACH, Lane
from tests.unit.jobs import job


@given(st.lists(st.one_of(st.integers(0, 4), st.just(-1), st.just(-2)), max_size=300))
def test_a_job_is_overtaken_by_few_later_ones_and_none_is_lost(steps: list[int]) -> None:
    """A step puts a job of that likeness (0: like no other), serves one (-1), or one goes away (-2)."""
    lane: Lane[int] = Lane()
    waiting: list[int] = []
    overtaken: dict[int, int] = {}
    numbers = 0
    for step in steps + [-1] * len(steps):
        if step >= 0:
            numbers += 1
            lane.put(numbers, numbers, step)
            waiting.append(numbers)
            overtaken[numbers] = 0
        elif waiting and step == -2:
            gone = waiting.pop(len(waiting) // 2)
            assert lane.remove(gone) == gone
        elif waiting:
            number, item = lane.next()
            assert number == item and lane.take(number) == item
            for other in waiting:
                if other < item:
                    overtaken[other] += 1
                    assert overtaken[other] <= REACH
            waiting.remove(item)
        assert len(lane) == len(waiting) and sorted(lane) == waiting
        if waiting:
            assert lane.oldest() == waiting[0]
    assert not waiting and not lane._alike, "nothing is left behind"


def test_jobs_that_begin_alike_come_together() -> None:
    lane: Lane[str] = Lane()
    for n in range(30):
        lane.put(n, "abc"[n % 3], 1 + n % 3)
    served = "".join(lane.take(lane.next()[0]) for _ in range(30))
    assert served == "a" * 10 + "b" * 10 + "c" * 10


def test_a_steady_stream_of_one_kind_does_not_keep_another_waiting() -> None:
    lane: Lane[int] = Lane()
    lane.put(1, 1, 7)
    lane.take(1)
    lane.put(2, 2, 8)
    served = []
    for n in range(3, 3 * REACH):
        lane.put(n, n, 7)
        served.append(lane.take(lane.next()[0]))
    assert served.index(2) <= REACH


def test_without_likeness_first_come_first_served_by_number_whenever_it_is_put() -> None:
    lane: Lane[int] = Lane()
    for n in (5, 3, 9, 1, 7):
        lane.put(n, n)
    assert [lane.take(lane.next()[0]) for _ in range(5)] == [1, 3, 5, 7, 9]


def test_jobs_that_went_away_are_not_kept() -> None:
    lane: Lane[int] = Lane()
    for n in range(10_000):
        lane.put(n, n)
        if n:
            lane.remove(n)
    assert len(lane) == 1 and len(lane._order) < 200


SYSTEM = "You are a careful clerk. " * 20


def chat(*contents: Any) -> int:
    one = job()
    one.body = {"model": "m", "messages": [{"role": "user", "content": content} for content in contents]}
    return likeness(one)


def test_prompts_are_alike_by_how_they_begin() -> None:
    assert chat(SYSTEM, "one") == chat(SYSTEM, "two") != 0
    assert chat(SYSTEM) != chat("x" + SYSTEM)
    assert chat("short", SYSTEM, "one") == chat("short", SYSTEM, "two") != 0
    assert likeness(job(prompt="a" * ALIKE + "b")) == likeness(job(prompt="a" * ALIKE + "c")) != 0
    assert likeness(job(prompt=[1] * 100 + [2])) == likeness(job(prompt=[1] * 100 + [3])) != 0  # type: ignore[arg-type]


@pytest.mark.parametrize("contents", [("short",), (None,), ([{"type": "text", "text": SYSTEM}],), ()])
def test_short_prompts_and_what_is_no_text_are_like_no_other(contents: tuple[Any, ...]) -> None:
    assert chat(*contents) == 0


def test_what_a_body_demands() -> None:
    assert Demand.of(job(max_tokens=100, n=3)) == Demand(3, 100)
    assert Demand.of(job(max_tokens=100, max_completion_tokens=7)).most == 7
    assert Demand(3, 100).output(40) == 120 and Demand(3, 100).output(400) == 300 and Demand(2, None).output(9) == 18
