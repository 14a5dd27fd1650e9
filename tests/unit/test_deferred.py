"""Jobs whose time has not come: how they travel, when they are due, and what happens when something fails."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiokafka.errors import KafkaConnectionError
from hypothesis import given
from hypothesis import strategies as st

from consumers.status import ended_at
from schemas.names import H_DUE, H_JOB, H_ORIGIN, H_PUBLISHED, H_STARTS, deferred_topic, jobs_topic, overflow_topic
from schemas.records import StatusRecord
from service.cancels import Wish
from service.deferred.deferral import LEAD_S, Deferral
from service.deferred.relay import Unwanted
from service.deferred.timetable import Timetable, job_print, tenant_print
from service.deferred.transfer import Mark, Transfer, first_time
from service.delivery import records
from service.identity.archive import Unread
from service.intake.headers import read_headers
from service.intake.verdict import Early, Lookup, Refused
from service.job import Job, Place, Record, Ticket
from service.ledger import Book
from service.settings import Settings
from tests.unit.jobs import job
from tests.unit.test_intake import INPUT, Door, when
from tests.unit.test_intake import job as intake_job

POOL = "default"
JOBS, DEFERRED = (jobs_topic(POOL, "standard"), 0), (deferred_topic(POOL), 0)
HOUR = 3600.0


# How a record travels


def test_a_record_travels_whole_and_its_new_place_tells_all_that_is_known() -> None:
    one = job(7)
    headers: tuple[tuple[str, bytes | None], ...] = (("mine", b"\xff"), ("null", None), (H_ORIGIN, b"forged/0/1"))
    record = Record(one.place, b"acme|3", b"value", headers, 1_700_000_000_123)
    made = Transfer.of(record, one.head, DEFERRED[0], starts=2, due=1_700_000_500.25)
    assert (made.topic, made.partition, made.key, made.value) == (DEFERRED[0], 0, b"acme|3", b"value")
    assert made.headers[:2] == headers[:2]
    moved = Record(Place(*DEFERRED, 5), made.key, made.value, made.headers, 1_700_000_009_999)
    assert Mark.of(moved) == Mark(1_700_000_500.25, "acme", "job-7", 0)
    assert first_time(moved).timestamp_ms == 1_700_000_000_123
    found = read_headers(moved, service_topic=True)
    assert (found.origin, found.starts) == (one.place, 2), "intake reads something else"


def test_a_spilled_record_has_no_time() -> None:
    one = job(7)
    made = Transfer.of(one.record, one.head, overflow_topic(POOL), starts=0)
    names = [name for name, _ in made.headers]
    assert H_DUE not in names and H_JOB not in names and H_STARTS not in names
    assert Mark.of(Record(Place(overflow_topic(POOL), 0, 1), None, b"", made.headers, 1)) is None


def test_a_record_that_moves_twice_keeps_its_first_place_and_time() -> None:
    one = job(7)
    first = Transfer.of(one.record, one.head, overflow_topic(POOL), starts=0)
    lying = first_time(Record(Place(overflow_topic(POOL), 0, 3), first.key, first.value, first.headers, 999))
    again = Transfer.of(lying, one.head, DEFERRED[0], starts=0, due=1.0)
    headers = [name for name, _ in again.headers]
    assert headers.count(H_ORIGIN) == headers.count(H_PUBLISHED) == 1
    assert dict(again.headers)[H_PUBLISHED] == str(one.record.timestamp_ms).encode()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([H_DUE, H_JOB, H_PUBLISHED, "x"]),
            st.none()
            | st.binary(max_size=20)
            | st.sampled_from([b"1", b"a|b|0", b"a|b|c", b"-1", b"9" * 30, b"\xc2\xb2"]),
        )
    )
)
def test_headers_that_are_not_ours_are_not_believed(headers: list[Any]) -> None:
    record = Record(Place(*DEFERRED, 0), None, b"", tuple(headers), 5)
    mark = Mark.of(record)
    if mark is not None:
        assert mark.due >= 0 and mark.run >= 0
    assert first_time(record).timestamp_ms >= 0


# When records are due


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 2**40 - 1)), unique_by=lambda e: e[1]),
    st.integers(0, 10**6),
    st.integers(0, 20),
)
def test_the_earliest_are_due_first_and_no_others(entries: list[tuple[int, int]], now_ms: int, most: int) -> None:
    table = Timetable()
    for due_ms, offset in entries:
        table.add(offset, due_ms / 1000, "t", str(offset))
    due = sorted((due_ms, offset) for due_ms, offset in entries if due_ms <= now_ms)
    assert table.take(now_ms / 1000, most) == [offset for _, offset in due[:most]]
    left = sorted(set(entries) - set(due[:most]))
    assert sorted(table) == sorted(offset for _, offset in left)
    assert table.next_due == (left[0][0] / 1000 if left else None)


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from("ab"), st.sampled_from("xyz")), max_size=20))
def test_a_cancel_hastens_the_jobs_it_names(entries: list[tuple[int, str, str]]) -> None:
    table = Timetable()
    for offset, (due, tenant, id) in enumerate(entries):
        table.add(offset, due, tenant, id)
    named = [o for o, (_, tenant, id) in enumerate(entries) if (tenant, id) == ("a", "x") or tenant == "b"]
    assert table.hasten({job_print("a", "x")}, {tenant_print("b")}) == len(named)
    assert sorted(table.take(0.0, 99)) == named
    assert len(table) == len(entries) - len(named)


def test_a_hundred_thousand_records_cost_little() -> None:
    table = Timetable()
    since = time.perf_counter()
    for offset in range(100_000):
        table.add(offset, 1e9 + offset * 7919 % 100_000, "t", str(offset))
    table.hasten({1}, set())
    assert time.perf_counter() - since < 2.0
    assert table.take(1e9 - 1, 10) == []


# What is made of it


class Surroundings:
    """Relay, library, admission and cancels of one deferral."""

    def __init__(self, high: int = 4) -> None:
        self.book = Book(high=high, max_span=100, timed=[DEFERRED[0]])
        for key in (JOBS, DEFERRED):
            self.book.take(key, None, 0, 1_000)
        self.book.settled(0, 0)
        self.log: dict[Place, Any] = {}
        self.sent: list[Transfer] = []
        self.failures: list[Exception] = []
        self.admitted: list[Place] = []
        self.records: list[Record] = []
        self.cancelled: set[str] = set()
        self.moved = 0
        self.unread = 0
        self.deferral = Deferral(
            Settings(pool=POOL),
            self.book,
            self,
            self,
            self.admit,
            self.hit,
            self.count,  # type: ignore[arg-type]
        )

    async def stop(self) -> None: ...

    async def publish(self, transfer: Transfer) -> None:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        self.sent.append(transfer)

    async def record(self, place: Place) -> Any:
        await asyncio.sleep(0)
        if self.unread:
            self.unread -= 1
            raise Unread
        return self.log.get(place)

    def admit(self, record: Record, ticket: Ticket) -> None:
        assert record.place == ticket.place
        if not self.deferral.keeps(record, ticket):
            self.admitted.append(record.place)
            self.records.append(record)

    def hit(self, tenant: str, job_id: str, run: int, broker_ms: int) -> bool:
        return job_id in self.cancelled

    def count(self) -> None:
        self.moved += 1

    # helpers

    def arrives(self, number: int = 0, due: float = HOUR) -> tuple[Any, Ticket]:
        """A job on its jobs topic, due in so many seconds."""
        one = job(number, not_before=time.time() + due)
        ticket = self.book.register(one.place)
        assert ticket is not None
        one.ticket = ticket
        return one, ticket

    def put(self, one: Any) -> bool:
        return self.deferral.put(one.head, one.record, one.ticket, one.not_before, one.starts)

    def lies(self, offset: int, due: float = HOUR) -> tuple[Record, Ticket]:
        """A record of the deferred topic, as it was moved there, read now."""
        one = job(offset)
        made = Transfer.of(one.record, one.head, DEFERRED[0], starts=0, due=time.time() + due)
        place = Place(*DEFERRED, offset)
        self.log[place] = SimpleNamespace(key=made.key, value=made.value, headers=made.headers, timestamp=1)
        ticket = self.book.register(place)
        assert ticket is not None
        return self.deferral.original(Record(place, made.key, made.value, made.headers, 1)), ticket

    def live(self, key: tuple[str, int]) -> int:
        return self.book.standings()[key].live


@pytest.fixture
def here() -> Surroundings:
    return Surroundings()


async def settle(here: Surroundings) -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_job_far_ahead_is_moved_and_complete_once_that_is_acknowledged(here: Surroundings) -> None:
    one, ticket = here.arrives()
    assert here.put(one)
    assert here.book.owns(ticket), "complete before the copy was acknowledged"
    await settle(here)
    (moved,) = here.sent
    assert (moved.topic, moved.partition) == DEFERRED
    assert not here.book.owns(ticket) and here.moved == 1
    assert here.book.commits()[JOBS].offset == 1, "it holds back the commit of the jobs topic"


async def test_a_job_due_in_seconds_is_not_moved(here: Surroundings) -> None:
    assert not here.put(here.arrives(0, due=3.0)[0])
    one, ticket = here.arrives(1)
    assert not here.deferral.put(one.head, one.record, ticket, None, 0)


async def test_a_job_that_was_started_is_never_published_again(here: Surroundings) -> None:
    one, ticket = here.arrives()
    here.book.start(ticket)
    here.book.crashed(ticket)
    assert not here.put(one)
    await settle(here)
    assert not here.sent


async def test_a_job_that_a_cancel_names_is_not_moved(here: Surroundings) -> None:
    here.cancelled.add("job-0")
    assert not here.put(here.arrives()[0])


async def test_a_failed_move_is_tried_again_and_the_job_stays_meanwhile(
    here: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.deferred.relay.RETRY_FIRST_S", 0.01)
    here.failures = [KafkaConnectionError("away"), TimeoutError()]
    one, ticket = here.arrives()
    here.put(one)
    await settle(here)
    assert here.book.owns(ticket) and not here.sent
    await asyncio.sleep(0.1)
    assert len(here.sent) == 1 and not here.book.owns(ticket)


async def test_a_job_that_cannot_be_moved_is_admitted_from_where_it_is(
    here: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.deferred.deferral.NEAR_S", 0.0)
    here.failures = [Unwanted("too large")]
    one, ticket = here.arrives(due=0.15)
    assert here.put(one)
    await settle(here)
    assert not here.admitted and here.book.owns(ticket)
    await asyncio.sleep(0.3)
    assert here.admitted == [one.place] and not here.sent and here.book.owns(ticket)


async def test_records_on_deferred_wait_unread_and_outside_of_high(here: Surroundings) -> None:
    for offset in range(50):
        here.admit(*here.lies(offset))
    assert here.book.readable(DEFERRED) and here.deferral.timed == 50 and not here.admitted
    assert here.live(DEFERRED) == 50
    assert here.book.commits()[DEFERRED].offset == 0


async def test_what_is_due_is_read_again_and_admitted_with_its_first_time(here: Surroundings) -> None:
    record, ticket = here.lies(0)
    here.admit(record, ticket)
    here.admit(*here.lies(1, due=2 * HOUR))
    here.deferral.run_once(time.time() + HOUR - LEAD_S - 1)
    await settle(here)
    assert not here.admitted
    here.deferral.run_once(time.time() + HOUR - LEAD_S + 1)
    # By its own clock the record is an hour early, so admission would put it aside again: as if the hour had passed.
    here.deferral.keeps = lambda record, ticket: False  # type: ignore[method-assign]
    await settle(here)
    assert here.admitted == [record.place] and here.records[0].timestamp_ms == record.timestamp_ms != 1
    assert here.book.owns(ticket) and here.deferral.timed == 1


async def test_a_crowd_that_falls_due_at_once_is_read_as_far_as_there_is_room(here: Surroundings) -> None:
    tickets = []
    for offset in range(10):
        record, ticket = here.lies(offset)
        here.admit(record, ticket)
        tickets.append(ticket)
    here.deferral.keeps = lambda record, ticket: False  # type: ignore[method-assign]
    for _ in range(3):
        here.deferral.run_once(time.time() + 2 * HOUR)
        await settle(here)
    assert len(here.admitted) == 4, "more than HIGH at once"
    assert not here.book.readable(DEFERRED), "more is read while the partition is full"
    for ticket in tickets[:3]:
        assert here.book.complete(ticket)
    here.deferral.run_once(time.time() + 2 * HOUR)
    await settle(here)
    assert Counter(here.admitted) == Counter(Place(*DEFERRED, offset) for offset in range(7))


async def test_nothing_that_is_due_is_read_while_too_much_waits(here: Surroundings) -> None:
    here.admit(*here.lies(0))
    here.deferral.keeps = lambda record, ticket: False  # type: ignore[method-assign]
    for held in (True, False):
        here.deferral.held = held
        here.deferral.run_once(time.time() + 2 * HOUR)
        await settle(here)
        assert len(here.admitted) == (not held)


async def test_a_cancel_reads_the_timed_job_at_once(here: Surroundings) -> None:
    for offset in range(3):
        here.admit(*here.lies(offset))
    here.cancelled.add("job-1")
    here.deferral.cancel([Wish("acme", "job-1", None, 0)])
    here.deferral.run_once(time.time())
    await settle(here)
    assert here.admitted == [Place(*DEFERRED, 1)]
    here.cancelled |= {"job-0", "job-2"}
    here.deferral.cancel([Wish("acme", None, None, 0)])
    here.deferral.run_once(time.time())
    await settle(here)
    assert len(here.admitted) == 3 and here.deferral.timed == 0


async def test_whoever_is_read_by_mistake_waits_again(here: Surroundings) -> None:
    here.admit(*here.lies(0))
    here.deferral.cancel([Wish("acme", "job-0", 7, 0)])  # another run of it
    here.deferral.run_once(time.time())
    await settle(here)
    assert not here.admitted and here.deferral.timed == 1


async def test_a_cancel_that_came_before_the_record_is_not_missed(here: Surroundings) -> None:
    here.cancelled.add("job-0")
    here.admit(*here.lies(0))
    assert here.admitted == [Place(*DEFERRED, 0)]


async def test_a_record_without_our_headers_waits_by_what_intake_reads(here: Surroundings) -> None:
    one = job(0, not_before=time.time() + HOUR)
    place = Place(*DEFERRED, 0)
    ticket = here.book.register(place)
    assert ticket is not None
    record = Record(place, None, b"{}", (), 1)
    assert not here.deferral.keeps(record, ticket), "nothing is known of it yet"
    assert here.deferral.put(one.head, record, ticket, one.not_before, 0)
    assert here.deferral.timed == 1 and not here.sent


async def test_a_due_record_that_cannot_be_read_is_looked_for_again(
    here: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.deferred.deferral.AGAIN_S", 0.01)
    here.admit(*here.lies(0))
    here.deferral.keeps = lambda record, ticket: False  # type: ignore[method-assign]
    here.unread = 2
    here.deferral.run_once(time.time() + 2 * HOUR)
    await asyncio.sleep(0.3)
    assert here.admitted == [Place(*DEFERRED, 0)]


async def test_a_record_that_retention_took_does_not_hold_the_commit_for_ever(here: Surroundings) -> None:
    here.admit(*here.lies(0))
    here.log.clear()
    here.deferral.run_once(time.time() + 2 * HOUR)
    await settle(here)
    assert not here.admitted and here.book.commits()[DEFERRED].offset == 1


async def test_a_lost_partition_is_forgotten(here: Surroundings) -> None:
    one, _ = here.arrives()
    here.failures = [KafkaConnectionError("away")]
    here.put(one)
    for offset in range(3):
        here.admit(*here.lies(offset))
    await settle(here)
    lost = {JOBS, DEFERRED}
    here.book.drop(lost)
    here.deferral.abandon(lost)
    here.deferral.run_once(time.time() + 2 * HOUR)
    await asyncio.sleep(0.7)
    assert here.deferral.timed == 0 and not here.admitted and not here.sent


async def test_a_partition_that_came_back_is_timed_anew(here: Surroundings) -> None:
    here.admit(*here.lies(0))
    here.book.take(DEFERRED, None, 0, 1_000)
    here.book.settled(0, 0)
    here.admit(*here.lies(0))
    assert here.deferral.timed == 1, "one record, twice in the timetable"


async def test_stopping_leaves_jobs_where_they_are(here: Surroundings) -> None:
    here.failures = [KafkaConnectionError("away")]
    one, ticket = here.arrives()
    here.put(one)
    await settle(here)
    await here.deferral.stop()
    assert here.book.owns(ticket) and not here.sent


# What intake and the status topic say of them


def test_an_early_job_is_checked_before_its_input_is_fetched() -> None:
    door = Door()
    claimed = intake_job(body=..., input=INPUT, not_before=when(HOUR))
    early = door.read(claimed)
    assert isinstance(early, Early) and early.head.job_id and early.not_before > time.time() + HOUR - 60
    assert isinstance(door.read({**claimed, "not_before": when(1)}), Lookup)
    assert isinstance(door.read({**claimed, "no_such_field": 1}), Refused), "refused when it is published, not when due"
    whole = door.read(intake_job(not_before=when(HOUR)))
    assert isinstance(whole, Job) and whole.not_before is not None
    wrong = door.read(intake_job(not_before=when(HOUR), body={"model": "another"}))
    assert isinstance(wrong, Refused), "a wrong body is refused when it is published too"


def test_the_end_of_a_moved_job_settles_the_place_it_was_moved_to() -> None:
    one = job(7)
    one.head.topic, one.head.partition, one.head.offset = DEFERRED[0], 0, 3
    told = records.status(
        one.head, kind="completed", attempt="A", usage=None, code=None, terminal=None, output=None, at=1.0
    )
    assert ended_at(told) == Place(*DEFERRED, 3)
    assert orjson.loads(told)["origin"] == str(one.place)
    StatusRecord.model_validate_json(orjson.dumps(orjson.loads(told) | {"attempt": None}))
    one.head.topic, one.head.offset = one.place.topic, one.place.offset
    told = records.status(
        one.head, kind="completed", attempt="A", usage=None, code=None, terminal=None, output=None, at=1.0
    )
    assert ended_at(told) == one.place and "place" not in orjson.loads(told)
    dead = one.record.dead(Ticket(Place(*DEFERRED, 3), 1), one.place, "internal", "why")
    dead.topic, dead.offset = DEFERRED[0], 3
    assert ended_at(records.status_of_dead(dead, 1.0)[1]) == Place(*DEFERRED, 3)
