"""The rules for readers hold for every interleaving of attempts, runs, repeats and late terminals."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from client.reader import TERMINAL, Reader, Step

Event = dict[str, Any]


def event(kind: str, attempt: str = "A", seq: int = 0, run: int = 0, **more: Any) -> Event:
    return {"type": kind, "attempt": attempt, "seq": seq, "run": run, "tenant": "acme", "job_id": "j", **more}


def chunk(attempt: str, seq: int, offset: int, tokens: int = 1, run: int = 0) -> Event:
    return event("chunk", attempt, seq, run, offset=offset, tokens=tokens, chunk={"n": seq})


@st.composite
def an_attempt(draw: st.DrawFn, name: str, run: int) -> list[Event]:
    """One writer's attempt as it would write it, cut off at any point (killed), with producer repeats in place."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=6))
    events = [event("started", name, 0, run)]
    tokens = 0
    for n, size in enumerate(sizes):
        events.append(chunk(name, n + 1, tokens, size, run))
        tokens += size
    end = draw(st.sampled_from([*sorted(TERMINAL), "abandoned"]))
    events.append(event(end, name, len(sizes) + 1, run))
    events = events[: draw(st.integers(0, len(events)))]
    repeated: list[Event] = []
    for one in events:
        repeated += [one] * draw(st.sampled_from([1, 1, 1, 2, 3]))
    return repeated


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """Attempts of runs 0 to 2, each in its own order, interleaved in any way; `waiting` events strewn in."""
    writers = [
        draw(an_attempt(f"{run}{number}", run))
        for run in range(draw(st.integers(1, 3)))
        for number in range(draw(st.integers(1, 3)))
    ]
    writers.append(
        [{"type": "waiting", "run": 0, "tenant": "acme", "job_id": "j", "reason": "quota"}] * draw(st.integers(0, 2))
    )
    log: list[Event] = []
    while any(writers):
        writer = draw(st.sampled_from([one for one in writers if one]))
        log.append(writer.pop(0))
    return log


def steps(log: list[Event], run: int = 0) -> list[tuple[Step, Event]]:
    reader = Reader(run)
    return [(reader.feed(one), one) for one in log]


@given(logs(), st.integers(0, 2))
def test_exactly_one_terminal_per_run_and_it_is_the_first_on_the_log(log: list[Event], asked: int) -> None:
    ends = [one for step, one in steps(log, asked) if step is Step.END]
    runs = [one["run"] for one in ends]
    assert len(set(runs)) == len(runs), "a (job, run) ended twice"
    assert runs == sorted(runs), "a lower run ended after a higher one"
    present = [one for one in log if one["type"] in TERMINAL and one["run"] >= asked]
    highest = max((one["run"] for one in log if one["run"] >= asked), default=asked)
    final = [one for one in present if one["run"] == highest]
    if final:
        assert ends[-1] is final[0]
    else:
        assert all(run < highest for run in runs)


@given(logs(), st.integers(0, 2))
def test_what_is_shown_is_the_contiguous_beginning_of_the_attempt_started_last(log: list[Event], asked: int) -> None:
    attempt, tokens, run, ended = None, 0, asked, False
    for step, one in steps(log, asked):
        if one["run"] > run:
            attempt, tokens, run, ended = None, 0, one["run"], False
        if step is Step.STARTED:
            assert not ended
            attempt, tokens = one["attempt"], 0
        elif step is Step.CHUNK:
            assert not ended and one["attempt"] == attempt and one["run"] == run
            assert one["offset"] == tokens, "a chunk was shown twice, or one was left out"
            tokens += one["tokens"]
        elif step is Step.END:
            ended = True
        if one["type"] == "started" and one["run"] == run and not ended and step is Step.IGNORED:
            assert one["attempt"] == attempt, "a new attempt was not taken up"


@given(logs(), st.data())
def test_a_stream_joined_later_shows_no_chunk_before_a_started_and_ends_all_the_same(
    log: list[Event], data: st.DataObject
) -> None:
    joined = log[data.draw(st.integers(0, len(log))) :]
    started: set[str] = set()
    seen = steps(joined)
    for step, one in seen:
        if one["type"] == "started":
            started.add(one["attempt"])
        if step is Step.CHUNK:
            assert one["attempt"] in started
    highest = max((one["run"] for one in joined), default=0)
    if any(one["type"] in TERMINAL and one["run"] == highest for one in joined):
        assert any(step is Step.END and one["run"] == highest for step, one in seen)


def test_a_gap_makes_the_attempt_result_only_and_the_next_attempt_streams_again() -> None:
    log = [
        event("started"),
        chunk("A", 1, 0),
        chunk("A", 3, 2),
        chunk("A", 4, 3),
        event("started", "B"),
        chunk("B", 1, 0),
    ]
    assert [step for step, _ in steps(log)] == [
        Step.STARTED,
        Step.CHUNK,
        Step.GAP,
        Step.IGNORED,
        Step.STARTED,
        Step.CHUNK,
    ]


def test_numbers_that_run_on_while_tokens_are_missing_are_a_gap_too() -> None:
    assert [step for step, _ in steps([event("started"), chunk("A", 1, 0, 2), chunk("A", 2, 5)])][-1] is Step.GAP


def test_a_terminal_of_an_older_attempt_wins_when_it_comes_first() -> None:
    log = [event("started"), event("started", "B"), event("completed", "A", 1), event("completed", "B", 1)]
    assert [step for step, _ in steps(log)] == [Step.STARTED, Step.STARTED, Step.END, Step.IGNORED]


def test_the_highest_run_takes_the_place_of_lower_ones() -> None:
    log = [event("started"), event("started", "R", 0, 1), event("completed", "A", 1), event("completed", "R", 1, 1)]
    assert [step for step, _ in steps(log)] == [Step.STARTED, Step.STARTED, Step.IGNORED, Step.END]


def test_events_of_types_this_reader_does_not_know_are_ignored() -> None:
    assert [step for step, _ in steps([event("started"), event("heartbeat", seq=1), chunk("A", 1, 0)])] == [
        Step.STARTED,
        Step.IGNORED,
        Step.CHUNK,
    ]
