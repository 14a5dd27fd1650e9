"""What becomes of further records of a job: one runs, the others get its end (R7). Without broker or engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import Cancelled, ErrorCode, Expired, Refusal
from service.delivery import records
from service.frames import Answer, Ended
from service.identity import copies as room
from service.identity.archive import Unread
from service.identity.copies import GRACE_S, WAITING_FIRST_S, Copies
from service.identity.identities import Arrival
from service.identity.window import Spot
from service.job import Job, Place, Ticket
from service.settings import Settings
from tests.unit.jobs import job

ATTEMPT = "01JZ8X4T5V6W7X8Y9Z0A1B2C3D"
JOBS = "inference.default.jobs.standard"


def arrival(
    offset: int,
    id: str = "a",
    *,
    partition: int = 0,
    digest: str = "0",
    origin: str = "",
    reply: str = "r",
    **more: Any,
) -> Arrival:
    made = job(offset, partition=partition, **more)
    head = made.head
    head.job_id, head.digest, head.reply_topic = id, digest * 64, reply
    head.origin = origin or head.origin
    return Arrival.of(made)


class Archive:
    """The status topic and the reply topic as lists."""

    def __init__(self) -> None:
        self.held: dict[Place, bytes] = {}
        self.gate: asyncio.Event | None = None
        self.away = False  # the broker
        self.missing = ""  # topic
        self.asked = 0

    async def read(self, place: Place) -> bytes | None:
        self.asked += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.away or place.topic == self.missing:
            raise Unread
        await asyncio.sleep(0)
        return self.held.get(place)

    async def stop(self) -> None: ...


class Doors:
    def __init__(self) -> None:
        self.running: dict[Place, Arrival] = {}
        self.answered: list[tuple[Arrival, str, Answer]] = []
        self.turned_away: list[tuple[Arrival, Refusal]] = []
        self.dropped: list[Arrival] = []
        self.told: list[tuple[Job, str]] = []
        self.cancelled: set[Place] = set()
        self.unstarted: set[Place] = set()
        self.room = True

    def go_on(self, arrival: Arrival) -> None:
        twice = [a for a in self.running.values() if a.identity == arrival.identity]
        assert not twice, "two copies of one job run at a time"
        self.running[arrival.place] = arrival

    def answer(self, arrival: Arrival, kind: str, answer: Answer) -> None:
        self.answered.append((arrival, kind, answer))

    def turn_away(self, arrival: Arrival, refusal: Refusal) -> None:
        self.turned_away.append((arrival, refusal))

    def drop(self, arrival: Arrival) -> None:
        self.dropped.append(arrival)

    def waiting(self, job: Job, reason: str, since: float) -> None:
        self.told.append((job, reason))

    def is_cancelled(self, arrival: Arrival) -> bool:
        return arrival.place in self.cancelled

    def has_room(self) -> bool:
        return self.room

    def withdraw(self, place: Place) -> bool:
        if place not in self.unstarted:
            return False
        del self.running[place]
        return True


class Desk:
    """Copies on fakes; ends are written as delivery would write them."""

    def __init__(self) -> None:
        self.doors, self.archive = Doors(), Archive()
        self.lost: set[Ticket] = set()
        self.counts: Counter[str] = Counter()
        self.copies = Copies(
            Settings(), self.doors, lambda ticket: ticket not in self.lost, lambda what: self.counts.update([what])
        )
        self.copies._archive = self.archive  # type: ignore[assignment]
        self.ends = 0

    def end(self, leader: Arrival, kind: str = "completed", *, keep: bool = True) -> Spot:
        """The leader's terminal and status record are acknowledged; `keep`: they can still be read."""
        del self.doors.running[leader.place]
        head, self.ends = leader.head, self.ends + 1
        spot = Spot(head.partition, self.ends)
        terminal = {"topic": "r", "partition": 0, "offset": self.ends}
        if keep:
            event = {"type": kind, "tenant": head.tenant, "job_id": head.job_id, "run": head.run}
            self.archive.held[Place("r", 0, self.ends)] = orjson.dumps({**event, "attempt": ATTEMPT, "seq": 2})
        self.archive.held[Place("inference.default.status", *spot)] = records.status(
            head,
            kind=kind,
            attempt=ATTEMPT,
            usage=None,
            code=None,
            terminal=terminal if kind in ("completed", "failed", "cancelled", "expired") else None,
            output=None,
            at=time.time(),
        )
        self.copies.ended(
            Ended(
                stream=1,
                topic=head.topic,
                partition=head.partition,
                offset=head.offset,
                epoch=head.epoch,
                kind=kind,
                status_offset=self.ends,
            )
        )
        return spot

    def ended(self) -> None:
        """A job that was here and has ended."""
        first = arrival(1)
        self.copies.admit(first)
        self.end(first)

    def depart(self, leader: Arrival) -> None:
        """It is being published elsewhere."""
        self.copies.departs(leader.ticket)
        del self.doors.running[leader.place]

    def moved(self, leader: Arrival) -> None:
        """That is acknowledged."""
        self.lost.add(leader.ticket)
        self.copies.gone(leader.ticket)

    async def settle(self) -> None:
        while self.copies._tasks:
            await asyncio.gather(*self.copies._tasks)
        await asyncio.sleep(0)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    await desk.copies.stop()


async def test_a_copy_waits_on_the_running_one_and_gets_its_end(desk: Desk) -> None:
    first, second = arrival(1), arrival(2)
    for one in (first, second):
        desk.copies.admit(one)
    await desk.settle()
    assert list(desk.doors.running.values()) == [first] and not desk.doors.answered
    desk.end(first)
    await desk.settle()
    ((answered, kind, answer),) = desk.doors.answered
    assert (answered, kind, answer.attempt, answer.seq) == (second, "completed", ATTEMPT, 2)
    assert orjson.loads(answer.event)["duplicate"] is True
    assert not desk.doors.running


async def test_a_copy_of_an_ended_job_is_answered_and_does_not_run(desk: Desk) -> None:
    first = arrival(1)
    desk.copies.admit(first)
    desk.end(first, "failed")
    desk.copies.admit(arrival(2))
    await desk.settle()
    assert [(a.place.offset, kind) for a, kind, _ in desk.doors.answered] == [(2, "failed")]
    assert not desk.doors.running and desk.counts == {"answered": 1}


async def test_another_run_is_another_job(desk: Desk) -> None:
    first, second = arrival(1), arrival(2)
    second.head.run = 1
    desk.copies.admit(first)
    desk.copies.admit(second)
    assert len(desk.doors.running) == 2


async def test_other_content_is_a_conflict_while_the_first_runs_and_after(desk: Desk) -> None:
    first = arrival(1)
    desk.copies.admit(first)
    desk.copies.admit(arrival(2, digest="1", reply="elsewhere"))
    assert [(a.place.offset, r.code) for a, r in desk.doors.turned_away] == [(2, ErrorCode.ID_CONFLICT)]
    desk.end(first)
    desk.copies.admit(arrival(3, digest="1"))
    await desk.settle()
    assert [a.place.offset for a, _ in desk.doors.turned_away] == [2, 3] and not desk.doors.running


async def test_a_conflict_with_the_same_reader_is_told_after_the_end_of_the_first(desk: Desk) -> None:
    """A reader takes the first terminal of an identity: a refusal told before would be taken for the job's end."""
    first = arrival(1)
    desk.copies.admit(first)
    desk.copies.admit(arrival(2, digest="1"))
    await desk.settle()
    assert not desk.doors.turned_away
    desk.archive.gate = asyncio.Event()  # nothing need be read for it
    desk.end(first)
    await asyncio.sleep(0.01)
    assert [(a.place.offset, r.code) for a, r in desk.doors.turned_away] == [(2, ErrorCode.ID_CONFLICT)]


async def test_the_same_record_once_more_is_complete_without_a_word(desk: Desk) -> None:
    first = arrival(1)
    desk.copies.admit(first)
    desk.copies.admit(arrival(5, origin=first.head.origin))
    assert [a.place.offset for a in desk.doors.dropped] == [5]
    desk.end(first)
    desk.copies.admit(arrival(6, origin=first.head.origin))
    await desk.settle()
    assert [a.place.offset for a in desk.doors.dropped] == [5, 6]
    assert not desk.doors.running and not desk.doors.answered


async def test_a_job_whose_terminal_is_gone_runs_again_once(desk: Desk) -> None:
    first = arrival(1)
    desk.copies.admit(first)
    desk.end(first, keep=False)
    for offset in (2, 3):
        desk.copies.admit(arrival(offset))
    await desk.settle()
    (again,) = desk.doors.running.values()
    assert again.place.offset in (2, 3) and desk.counts["run_again"] == 2
    desk.end(again)
    await desk.settle()
    assert len(desk.doors.answered) == 1


async def test_a_copy_waits_for_a_broker_that_is_away_instead_of_running_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LOOK_AGAIN_S", 0.0)
    second = arrival(2)
    desk.ended()
    desk.archive.away = True
    desk.copies.admit(second)
    while desk.archive.asked < 5:
        await asyncio.sleep(0)
    assert not desk.doors.running and not desk.doors.answered
    desk.archive.away = False
    await desk.settle()
    assert [a for a, _, _ in desk.doors.answered] == [second] and not desk.doors.running


async def test_a_copy_does_not_wait_for_ever_for_what_cannot_be_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LOOK_BACK_S", 0.0)
    second = arrival(2)
    desk.ended()
    desk.archive.away = True
    desk.copies.admit(second)
    await desk.settle()
    assert list(desk.doors.running.values()) == [second] and desk.counts["run_again"] == 1


async def test_copies_of_a_job_that_nobody_was_told_of_run(desk: Desk) -> None:
    first, second = arrival(1), arrival(2, reply="there")
    desk.copies.admit(first)
    desk.copies.admit(second)
    desk.end(first, "undeliverable")
    assert list(desk.doors.running.values()) == [second]


async def test_a_lost_partition_takes_its_copies_along(desk: Desk) -> None:
    first, second = arrival(1), arrival(2)
    desk.copies.admit(first)
    desk.copies.admit(second)
    desk.lost |= {first.ticket, second.ticket}
    desk.doors.running.clear()
    desk.copies.abandon({(JOBS, 0)})
    desk.copies.run_once(time.time())
    assert not desk.doors.running and not len(desk.copies._identities)


async def test_a_copy_on_another_partition_runs_when_the_first_is_lost(desk: Desk) -> None:
    first, other = arrival(1), arrival(2, partition=1)
    desk.copies.admit(first)
    desk.copies.admit(other)
    desk.lost.add(first.ticket)
    del desk.doors.running[first.place]
    desk.copies.abandon({(JOBS, 0)})
    assert list(desk.doors.running.values()) == [other]


async def test_a_copy_whose_first_went_elsewhere_without_an_end_goes_on(desk: Desk) -> None:
    """As when the first is published on another topic of the service; nobody has to say so."""
    first, second, third = arrival(1), arrival(2), arrival(9, origin=str(Place(JOBS, 0, 1)))
    desk.copies.admit(first)
    desk.copies.admit(second)
    desk.lost.add(first.ticket)
    del desk.doors.running[first.place]
    desk.copies.run_once(time.time())
    assert list(desk.doors.running.values()) == [second]
    desk.lost.add(second.ticket)
    del desk.doors.running[second.place]
    desk.copies.admit(third)  # not taken for a copy of what is not here any more
    assert list(desk.doors.running.values()) == [third]


async def test_a_copy_that_is_read_before_its_first_is_known_to_be_moved_runs(desk: Desk) -> None:
    """A broker may hand a record out before its publisher has the acknowledgement. Dropped, the job were lost."""
    first = arrival(1)
    copy, once_more = (arrival(n, origin=first.head.origin) for n in (5, 6))
    desk.copies.admit(first)
    desk.depart(first)
    desk.copies.admit(copy)
    desk.copies.admit(once_more)
    assert not desk.doors.running and desk.doors.dropped == [once_more]
    desk.moved(first)
    assert list(desk.doors.running.values()) == [copy]
    desk.end(copy)
    assert desk.doors.dropped == [once_more] and not len(desk.copies._identities)


async def test_a_copy_of_one_that_stays_after_all_is_the_same_record_once_more(desk: Desk) -> None:
    """Nobody knew whether it was written: the first goes on where it was, and what was written is complete."""
    first, second = arrival(1), arrival(2)
    copy = arrival(5, origin=first.head.origin)
    desk.copies.admit(first)
    desk.copies.departs(first.ticket)
    desk.copies.admit(second)
    desk.copies.admit(copy)
    assert not desk.doors.dropped
    desk.copies.stays(first.ticket)
    assert desk.doors.dropped == [copy]
    late = arrival(7, origin=first.head.origin)
    desk.copies.admit(late)
    assert desk.doors.dropped == [copy, late]
    desk.end(first)
    await desk.settle()
    assert [a for a, _, _ in desk.doors.answered] == [second]


async def test_of_those_that_waited_the_copy_of_who_moved_leads_and_not_who_came_before_it(desk: Desk) -> None:
    first, other = arrival(1), arrival(2, digest="1")
    copy = arrival(5, origin=first.head.origin)
    desk.copies.admit(first)
    desk.copies.admit(other)  # waits for its `id_conflict`
    desk.depart(first)
    desk.copies.admit(copy)
    desk.moved(first)
    assert list(desk.doors.running.values()) == [copy]
    desk.end(copy)
    assert [(one, refusal.code) for one, refusal in desk.doors.turned_away] == [(other, ErrorCode.ID_CONFLICT)]


async def test_a_copy_does_not_expire_while_its_first_is_on_its_way_to_it(desk: Desk) -> None:
    first = arrival(1, deadline=time.time() - GRACE_S - 1)
    copy = arrival(5, origin=first.head.origin, deadline=time.time() - GRACE_S - 1)
    desk.copies.admit(first)
    desk.copies.departs(first.ticket)
    desk.copies.admit(copy)
    desk.copies.run_once(time.time())
    assert not desk.doors.turned_away
    desk.copies.stays(first.ticket)
    assert desk.doors.dropped == [copy]


async def test_a_copy_whose_terminal_alone_cannot_be_read_runs_again_soon(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker answers, so it is the reply topic that is gone."""
    monkeypatch.setattr(room, "LOOK_AGAIN_S", 0.0)
    second = arrival(2)
    desk.ended()
    desk.archive.missing = "r"
    desk.copies.admit(second)
    await desk.settle()
    assert list(desk.doors.running.values()) == [second] and desk.archive.asked == 2 * room.TERMINAL_TRIES


async def test_a_copy_that_waits_for_the_broker_expires_in_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOOK_AGAIN_S", 0.0)
    second = arrival(2, deadline=time.time() - GRACE_S - 1)
    desk.ended()
    desk.archive.away = True
    desk.copies.admit(second)
    await desk.settle()
    assert [(one, type(refusal)) for one, refusal in desk.doors.turned_away] == [(second, Expired)]


async def test_an_answer_that_comes_after_the_partition_went_is_not_given(desk: Desk) -> None:
    first, second = arrival(1), arrival(2)
    desk.copies.admit(first)
    desk.end(first)
    desk.archive.gate = asyncio.Event()
    desk.copies.admit(second)
    await asyncio.sleep(0)
    desk.lost.add(second.ticket)
    desk.archive.gate.set()
    await desk.settle()
    assert not desk.doors.answered and not desk.doors.running


async def test_no_answer_is_read_while_output_piles_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.identity.copies.ROOM_POLL_S", 0.001)
    first = arrival(1)
    desk.copies.admit(first)
    desk.end(first)
    desk.doors.room = False
    desk.copies.admit(arrival(2))
    await asyncio.sleep(0.02)
    assert not desk.doors.answered
    desk.doors.room = True
    await desk.settle()
    assert len(desk.doors.answered) == 1


async def test_a_waiting_copy_expires_when_its_first_does_not(desk: Desk) -> None:
    now = time.time()
    first, second = arrival(1, deadline=now + 5), arrival(2, deadline=now + 5)
    desk.copies.admit(first)
    desk.copies.admit(second)
    desk.copies.run_once(now + 5 + GRACE_S - 0.1)
    assert not desk.doors.turned_away
    desk.copies.run_once(now + 5 + GRACE_S + 0.1)
    ((late, refusal),) = desk.doors.turned_away
    assert late is second and isinstance(refusal, Expired)
    desk.end(first, "expired")
    await desk.settle()
    assert not desk.doors.answered


async def test_a_waiting_copy_that_asked_is_told(desk: Desk) -> None:
    first, second = arrival(1), arrival(2, progress=True)
    desk.copies.admit(first)
    desk.copies.admit(second)
    now = time.time()
    for later in (1, WAITING_FIRST_S + 1, WAITING_FIRST_S + 2):
        desk.copies.run_once(now + later)
    assert desk.doors.told == [(second.job, "order")]


async def test_a_cancel_ends_the_first_and_its_copies_get_that_end(desk: Desk) -> None:
    first, second = arrival(1), arrival(2)
    desk.copies.admit(first)
    desk.copies.admit(second)
    desk.doors.cancelled |= {first.place, second.place}
    assert desk.copies.cancel("acme", "a", None) == [first]
    assert not desk.doors.turned_away  # what had been generated is in the first one's event
    desk.end(first, "cancelled")
    await desk.settle()
    assert [(a, kind) for a, kind, _ in desk.doors.answered] == [(second, "cancelled")]


async def test_a_cancel_that_misses_the_first_hits_an_older_copy_alone(desk: Desk) -> None:
    first, second, third = arrival(1), arrival(2), arrival(3)
    desk.copies.admit(first)
    desk.copies.admit(second)
    desk.doors.cancelled |= {second.place, third.place}
    assert desk.copies.cancel("acme", None, None) == []
    desk.copies.admit(third)
    assert [a for a, r in desk.doors.turned_away if isinstance(r, Cancelled)] == [second, third]
    desk.end(first)
    await desk.settle()
    assert not desk.doors.answered


async def test_a_cancel_finds_by_job_and_run_and_tenant(desk: Desk) -> None:
    found = {}
    for n, (id, run, tenant) in enumerate([("a", 0, "acme"), ("a", 1, "acme"), ("b", 0, "acme"), ("a", 0, "globex")]):
        one = arrival(n, id, tenant=tenant)
        one.head.run = run
        desk.copies.admit(one)
        desk.doors.cancelled.add(one.place)
        found[n] = one
    assert desk.copies.cancel("acme", "a", None) == [found[0], found[1]]
    assert desk.copies.cancel("acme", "a", 1) == [found[1]]
    assert desk.copies.cancel("acme", None, None) == [found[0], found[1], found[2]]
    assert desk.copies.cancel("initech", None, None) == []


async def test_a_job_read_before_the_window_knew_is_answered_unless_it_has_begun(desk: Desk) -> None:
    former = arrival(1)
    desk.copies.admit(former)
    spot = desk.end(former)
    for begun in (False, True):
        fresh = Desk()
        fresh.archive.held = desk.archive.held
        copy, waiting = arrival(7), arrival(8)
        fresh.copies.admit(copy)
        fresh.copies.admit(waiting)
        if not begun:
            fresh.doors.unstarted.add(copy.place)
        fresh.copies._learn(copy.identity, spot, time.time())
        await fresh.settle()
        assert [a for a, _, _ in fresh.doors.answered] == ([] if begun else [copy, waiting])
        assert list(fresh.doors.running.values()) == ([copy] if begun else [])


async def test_a_refused_record_takes_part_as_a_job_does(desk: Desk) -> None:
    first = arrival(1)
    desk.copies.admit(first)
    desk.end(first)
    late = arrival(2)
    late.job, late.refusal = None, Expired()
    desk.copies.admit(late)
    await desk.settle()
    assert [a for a, _, _ in desk.doors.answered] == [late]  # the result, not that it came too late for another one


async def test_records_without_a_tenant_are_nobodys_copies(desk: Desk) -> None:
    for offset in (1, 2):
        one = arrival(offset)
        one.head.tenant = ""
        one.job, one.refusal = None, Refusal(ErrorCode.UNKNOWN_TENANT, "x")
        desk.doors.running.clear()
        desk.copies.admit(one)
        assert list(desk.doors.running.values()) == [one]


# -- any order of events


steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("end"), st.integers(0, 5), st.sampled_from(["completed", "failed", "undeliverable"])),
        st.tuples(st.just("lose"), st.integers(0, 2)),
        st.tuples(st.just("move"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("depart"), st.integers(0, 5)),
        st.tuples(st.just("arrive"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("cancel"), st.sampled_from("ab")),
        st.tuples(st.just("tick")),
        st.tuples(st.just("settle")),
    ),
    max_size=30,
)


@given(steps)
@settings(max_examples=300)
def test_whatever_happens_one_copy_runs_at_a_time_and_each_record_leaves_once(plan: list[Any]) -> None:
    asyncio.run(_play(plan))


async def _play(plan: list[Any]) -> None:
    desk, offset = Desk(), 0
    doors = desk.doors
    seen: dict[Place, Arrival] = {}
    gone: set[Place] = set()  # lost, or moved: not ours to end
    ended: Counter[Place] = Counter()
    away: list[Arrival] = []  # being published elsewhere
    landed: list[Arrival] = []  # their copies there
    moved: set[Place] = set()  # for certain

    def resolve(leader: Arrival, partition: int, early: bool) -> None:
        """Acknowledged, and its copy read: in this order or, `early`, in the other."""
        nonlocal offset
        offset += 1
        copy = arrival(offset, leader.head.job_id, partition=partition, digest=leader.head.digest[0])
        copy.head.origin = leader.head.origin
        seen[copy.place] = copy
        landed.append(copy)
        if early:
            desk.copies.admit(copy)
        if leader.ticket not in desk.lost:
            moved.add(leader.place)
            gone.add(leader.place)
            desk.lost.add(leader.ticket)
            desk.copies.gone(leader.ticket)
        if not early:
            desk.copies.admit(copy)

    try:
        for step in plan:
            match step:
                case ("admit", id, digest, partition, again):
                    offset += 1
                    origin = next(iter(seen.values())).head.origin if again and seen else ""
                    if again and seen:
                        first = next(iter(seen.values()))
                        id, digest = first.head.job_id, int(first.head.digest[0])
                    one = arrival(offset, id, partition=partition, digest=str(digest), origin=origin)
                    seen[one.place] = one
                    desk.copies.admit(one)
                case ("end", which, kind) if doors.running:
                    leader = list(doors.running.values())[which % len(doors.running)]
                    ended[leader.place] += 1
                    desk.end(leader, kind)
                case ("lose", partition):
                    for one in seen.values():
                        if one.place.partition == partition:
                            gone.add(one.place)
                            desk.lost.add(one.ticket)
                            doors.running.pop(one.place, None)
                    desk.copies.abandon({(JOBS, partition)})
                case ("move", which, told) if doors.running:
                    leader = list(doors.running.values())[which % len(doors.running)]
                    del doors.running[leader.place]
                    gone.add(leader.place)
                    desk.lost.add(leader.ticket)
                    if told:
                        desk.copies.gone(leader.ticket)
                case ("depart", which) if doors.running:
                    leader = list(doors.running.values())[which % len(doors.running)]
                    del doors.running[leader.place]
                    away.append(leader)
                    desk.copies.departs(leader.ticket)
                case ("arrive", partition, early) if away:
                    resolve(away.pop(0), partition, early)
                case ("cancel", id):
                    doors.cancelled |= {a.place for a in seen.values() if a.head.job_id == id}
                    for leader in desk.copies.cancel("acme", id, None):
                        if leader.place in doors.running:
                            ended[leader.place] += 1
                            desk.end(leader, "cancelled")
                case ("tick",):
                    desk.copies.run_once(time.time())
                case ("settle",):
                    await desk.settle()
        for leader in away:  # not acknowledged in time
            if leader.ticket not in desk.lost:
                desk.copies.stays(leader.ticket)
                doors.running[leader.place] = leader
        # Everything that runs ends, until nothing is left.
        for _ in range(len(seen) + 2):
            await desk.settle()
            desk.copies.run_once(time.time())
            for leader in list(doors.running.values()):
                ended[leader.place] += 1
                desk.end(leader)
        await desk.settle()
        ways = Counter(ended)
        ways.update(a.place for a, _, _ in doors.answered)
        ways.update(a.place for a, _ in doors.turned_away)
        ways.update(a.place for a in doors.dropped)
        for place in seen:
            assert ways[place] == 1 or (place in gone and ways[place] <= 1), (place, ways[place])
        dropped = {a.place for a in doors.dropped}
        for copy in landed:
            same = {a.place for a in seen.values() if a.head.origin == copy.head.origin} - moved
            assert same - dropped, "a lost job"
        assert not desk.copies._identities.followers()
        for one, refusal in doors.turned_away:
            if refusal.code == ErrorCode.ID_CONFLICT:
                same = [a for a in seen.values() if a.identity == one.identity and a.head.digest != one.head.digest]
                assert same, "a conflict with nobody"
    finally:
        await desk.copies.stop()
