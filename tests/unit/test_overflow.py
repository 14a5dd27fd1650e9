"""Who gives way on a partition that one tenant fills, and what becomes of jobs that cannot be moved."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError
from hypothesis import given
from hypothesis import strategies as st

from schemas.keys import partition_of
from schemas.names import H_ORIGIN, H_PUBLISHED, deferred_topic, jobs_topic, overflow_topic
from schemas.tenants import Tenant, TenantLimits
from service.deferred.relay import Unwanted
from service.deferred.transfer import Transfer
from service.job import Job, Place, Record, Ticket
from service.ledger import Book, Key
from service.overflow import outbox as outbox_room
from service.overflow import spill as room
from service.overflow.homes import Homes
from service.overflow.neighbours import Neighbours
from service.overflow.outbox import Going
from service.overflow.shares import surplus
from service.overflow.spill import Spill
from service.settings import Settings
from tests.unit.jobs import job

# Shares


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.integers(1, 900)),
    st.integers(0, 2000),
    st.integers(1, 100),
)
def test_those_who_hold_most_give_until_it_is_enough(held: dict[str, int], excess: int, least: int) -> None:
    goes = surplus(held, excess, least)
    kept = {tenant: count - goes.get(tenant, 0) for tenant, count in held.items()}
    possible = sum(max(0, count - least) for count in held.values())
    assert sum(goes.values()) == min(excess, possible), "exactly what must go, if there is so much"
    assert all(n > 0 for n in goes.values()) and all(kept[t] >= min(held[t], least) for t in held)
    if goes:
        level = min(kept[t] for t in goes)
        assert all(kept[t] <= level + 1 for t in held), "nobody keeps more than those who gave"


# Neighbours


def test_only_tenants_whose_keys_meet_are_neighbours() -> None:
    near = Neighbours(6)
    near.refresh([Tenant(id="acme"), Tenant(id="globex"), Tenant(id="initech"), Tenant(id="off", enabled=False)])
    assert partition_of("acme", 6) == partition_of("initech", 6) == 0
    assert near.beside("acme", 0) and near.beside("initech", 0) and not near.beside("globex", 1)
    near.refresh([Tenant(id="acme"), Tenant(id="globex", spread=64)])
    assert near.beside("acme", 0), "one that is spread lies everywhere"


# Moving

POOL = "default"
KEY: Key = (jobs_topic(POOL, "standard"), 0)
HIGH = 16


class Tenants(dict[str, Tenant]):
    version = 1

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.values()))


class Yard:
    """A spill on a real book; the queue is a dict, the topic a list."""

    def __init__(self, *tenants: Tenant) -> None:
        self.book = Book(high=HIGH, max_span=1_000_000)
        self.book.take(KEY, None, 0, 1_000_000)
        self.book.settled(0, 0)
        self.queue: dict[Place, Job] = {}
        self.log: list[Transfer] = []
        self.gone: list[Ticket] = []
        self.backs: list[Job] = []
        self.writes: list[int] = []  # records of each write of several
        self.fails: BaseException | None = None
        self.unwanted: bytes | None = b"?"  # the value of a record that the topic does not take
        self.held = False
        self.believes = True
        self.judged: list[Place] = []  # records that were to go unread and stayed
        self.hold = asyncio.Event()
        self.hold.set()
        registry = Tenants({t.id: t for t in tenants or (Tenant(id="acme"), Tenant(id="initech"))})
        self.spill = Spill(Settings(partitions=6), self.book, self, registry, self)
        self.spill._neighbours.refresh(registry)

    def read(self, count: int, tenant: str = "acme", *, start: int = 0, **more: Any) -> None:
        for number in range(start, start + count):
            one = job(number, tenant=tenant, **more)
            ticket = self.book.register(one.place)
            assert ticket is not None
            one.ticket = ticket
            self.queue[one.place] = one
            self.spill.note(one)

    async def turn(self, after: float = 0.0) -> bool:
        busy = self.spill.run_once(time.monotonic() + after)
        while self.moving() and self.hold.is_set():
            await asyncio.sleep(0)
        return busy

    def come(self, offset: int, key: bytes | None = b"acme") -> bool:
        """A record that was just read. Whether it goes unread."""
        place = Place(*KEY, offset)
        ticket = self.book.register(place)
        assert ticket is not None
        return self.spill.takes(Record(place, key, b"{}", (("own", b"x"), (H_ORIGIN, b"forged")), 1_234), ticket)

    async def gone_unread(self) -> None:
        while self.moving():
            await asyncio.sleep(room.LINGER_S / 5)

    def moving(self) -> int:
        return sum(len(partition.outbox) for partition in self.spill._partitions.values())

    # the relay

    async def publish(self, transfer: Transfer) -> None:
        await self.hold.wait()
        if self.fails is not None:
            raise self.fails
        if transfer.value == self.unwanted:
            raise Unwanted("MessageSizeTooLargeError")
        self.log.append(transfer)

    async def publish_together(self, transfers: Sequence[Transfer]) -> None:
        await self.hold.wait()
        if self.fails is not None:
            raise self.fails
        if self.unwanted in {t.value for t in transfers}:
            raise Unwanted("MessageSizeTooLargeError")
        self.writes.append(len(transfers))
        self.log += transfers

    # the doors

    def take_out(self, places: Collection[Place]) -> list[Job]:
        return [self.queue.pop(place) for place in list(places) if place in self.queue]

    def put_back(self, job: Job) -> None:
        self.backs.append(job)
        self.queue[job.place] = job
        self.spill.note(job)

    def is_held(self) -> bool:
        return self.held

    def may_go_unread(self, tenant: str) -> bool:
        return self.believes

    def take_in(self, record: Record, ticket: Ticket) -> None:
        self.judged.append(record.place)

    def moved(self, ticket: Ticket) -> None:
        self.gone.append(ticket)


async def test_the_newest_of_who_fills_a_partition_go_until_it_is_read_on() -> None:
    yard = Yard()
    yard.read(2, "initech")
    yard.read(HIGH - 2, "acme", start=2)
    assert not yard.book.readable(KEY)
    await yard.turn()
    assert not yard.log, "a partition that is full for a moment needs no help"
    await yard.turn(room.PATIENCE_S)
    assert yard.book.readable(KEY)
    moved = [int(transfer.headers[0][1].rpartition(b"/")[2]) for transfer in yard.log]  # type: ignore[union-attr]
    assert sorted(moved) == list(range(HIGH // 2, HIGH)), "the newest, and no more than must go"
    assert {ticket.place.offset for ticket in yard.gone} == set(moved)
    (first, *_) = yard.log
    headers = dict(first.headers)
    assert (first.topic, first.partition) == (overflow_topic(POOL), 0)
    assert headers[H_ORIGIN] and headers[H_PUBLISHED] and first.value == b"x" * 200 and first.key == b"acme"


async def test_once_it_has_begun_it_goes_on_without_waiting() -> None:
    yard = Yard()
    yard.read(HIGH)
    await yard.turn()
    assert await yard.turn(room.PATIENCE_S)
    moved = len(yard.log)
    yard.read(HIGH // 2, start=HIGH)
    assert not yard.book.readable(KEY)
    await yard.turn()
    assert len(yard.log) == moved + HIGH // 2 and yard.book.readable(KEY)


async def test_while_it_goes_on_jobs_go_before_the_partition_is_full_again() -> None:
    yard = Yard()
    yard.read(HIGH)
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    for number in range(5):
        yard.read(2, start=HIGH + 2 * number)
        assert yard.book.readable(KEY), "never paused: what was fetched ahead would be fetched again"
        await yard.turn(room.PATIENCE_S + number * (room.ACTIVE_S - 1.0))
    assert len(yard.log) == HIGH // 2 + 10


async def test_while_it_goes_on_a_crowd_goes_without_waiting_for_the_next_turn(monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "CROWD", 4)
    yard = Yard()
    yard.read(HIGH)
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    moved = len(yard.log)
    for number in range(4):
        yard.read(1, start=HIGH + number)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(yard.log) == moved + 4


async def test_jobs_on_their_way_are_not_counted_as_jobs_that_may_go() -> None:
    yard = Yard()
    yard.read(HIGH)
    await yard.turn()
    yard.hold.clear()
    await yard.turn(room.PATIENCE_S)
    yard.hold.set()
    await yard.turn(room.PATIENCE_S)
    assert len(yard.log) == HIGH // 2


async def test_after_a_while_its_case_is_looked_at_anew() -> None:
    yard = Yard()
    yard.read(HIGH)
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    moved = len(yard.log)
    await yard.turn(room.PATIENCE_S + 0.1)
    yard.read(HIGH // 2, start=HIGH)
    later = room.PATIENCE_S + room.ACTIVE_S + 0.1
    await yard.turn(later)
    assert len(yard.log) == moved, "full for a moment again"
    await yard.turn(later + room.PATIENCE_S)
    assert len(yard.log) > moved


async def test_nothing_moves_while_the_engine_is_away() -> None:
    yard = Yard()
    yard.read(HIGH)
    yard.held = True
    await yard.turn()
    await yard.turn(10 * room.PATIENCE_S)
    assert not yard.log
    yard.held = False
    await yard.turn(20 * room.PATIENCE_S)
    assert not yard.log, "its patience begins when jobs start again"
    await yard.turn(21 * room.PATIENCE_S)
    assert yard.log


async def test_whoever_has_a_partition_to_himself_stays() -> None:
    yard = Yard(Tenant(id="acme"), Tenant(id="globex"))
    yard.read(HIGH)
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    assert not yard.log


async def test_jobs_in_order_started_jobs_and_timed_ones_stay() -> None:
    yard = Yard(Tenant(id="acme", order="conversation"), Tenant(id="initech"), Tenant(id="late"))
    yard.read(4, "acme")
    yard.read(4, "late", start=4, not_before=time.time() + 100)
    yard.read(8, "initech", start=8)
    for number in range(12, 16):
        yard.book.crashed(yard.queue[Place(*KEY, number)].ticket)
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    assert {t.key for t in yard.log} == {b"initech"}
    assert {ticket.place.offset for ticket in yard.gone} <= set(range(8, 12))


async def test_what_lies_on_overflow_is_not_moved_again() -> None:
    yard = Yard()
    key = (overflow_topic(POOL), 0)
    yard.book.take(key, None, 0, 1000)
    yard.book.settled(0, 0)
    for number in range(HIGH):
        one = job(number)
        place = Place(*key, number)
        ticket = yard.book.register(place)
        assert ticket is not None
        one.ticket = ticket
        one.record = Record(place, b"acme", b"x", (), 1)
        yard.spill.note(one)
    assert not yard.book.readable(key), "it pauses by itself"
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    assert not yard.log and not yard.spill._partitions


@pytest.mark.parametrize("problem", [OSError("the broker is away"), asyncio.CancelledError()])
async def test_a_job_that_cannot_be_moved_waits_where_it_was_and_is_tried_again_later(problem: BaseException) -> None:
    yard = Yard()
    yard.read(HIGH)
    yard.fails = problem
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    assert len(yard.backs) == HIGH // 2 and len(yard.queue) == HIGH and not yard.gone
    assert all(yard.book.owns(one.ticket) for one in yard.queue.values())
    yard.fails = None
    await yard.turn(room.PATIENCE_S + 0.1)
    assert not yard.log, "not at once"
    await yard.turn(room.PATIENCE_S + outbox_room.PAUSE_S + 1)
    assert len(yard.log) == HIGH // 2


async def test_a_record_that_overflow_does_not_take_is_not_asked_again() -> None:
    yard = Yard()
    yard.read(HIGH)
    yard.fails = Unwanted("too large")
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    assert len(yard.backs) == HIGH // 2
    await yard.turn(room.PATIENCE_S + outbox_room.PAUSE_S + 1)
    assert Counter(one.place.offset for one in yard.backs).most_common(1)[0][1] == 1


async def test_jobs_go_together_and_one_that_overflow_does_not_take_holds_up_none_of_them() -> None:
    yard = Yard()
    yard.read(HIGH)
    yard.queue[Place(*KEY, HIGH - 2)].record = Record(Place(*KEY, HIGH - 2), b"acme", b"too large", (), 1)
    yard.unwanted = b"too large"
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    assert not yard.writes and [one.place.offset for one in yard.backs] == [HIGH - 2]
    assert len(yard.log) == len(yard.gone) == HIGH // 2 - 1
    partition = yard.spill._partitions[KEY]
    assert not yard.moving() and partition.held == Counter(job.tenant for job in partition.jobs.values())
    yard.read(HIGH // 2, start=HIGH)
    await yard.turn(room.PATIENCE_S + 1)
    assert yard.writes == [yard.writes[0]] and yard.writes[0] > 1


async def relieved(*tenants: Tenant) -> Yard:
    """Somebody's jobs are being moved; the window is as full as it stays."""
    yard = Yard(*tenants)
    yard.read(HIGH)
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    yard.log.clear()
    yard.gone.clear()
    yard.writes.clear()
    assert yard.book.excess(KEY, early=True) == 0
    return yard


async def test_while_it_goes_on_records_of_who_fills_the_partition_go_as_they_come_unread() -> None:
    yard = await relieved()
    assert [yard.come(offset) for offset in range(HIGH, HIGH + 100)] == [True] * 100
    assert yard.moving() == 100
    await yard.gone_unread()
    assert yard.writes == [outbox_room.GROUP, 100 - outbox_room.GROUP]
    first = yard.log[0]
    assert (first.topic, first.partition, first.key, first.value) == (overflow_topic(POOL), 0, b"acme", b"{}")
    assert first.headers == (("own", b"x"), (H_ORIGIN, str(Place(*KEY, HIGH)).encode()), (H_PUBLISHED, b"1234"))
    assert [t.place.offset for t in yard.gone] == list(range(HIGH, HIGH + 100)) and not yard.judged
    assert yard.book.excess(KEY, early=True) == 0 and yard.moving() == 0


async def test_what_goes_unread_is_of_no_other_than_who_fills_the_partition() -> None:
    ordered = Tenant(id="globex", order="tenant")
    yard = await relieved(Tenant(id="acme"), Tenant(id="initech"), ordered)
    for offset, key in enumerate((b"initech", b"nobody", None, b"globex", b"\xff|1"), HIGH):
        assert not yard.come(offset, key)
    assert yard.come(HIGH + 5, b"acme|3")
    await yard.gone_unread()


@pytest.mark.parametrize(
    "tenant", [Tenant(id="acme", enabled=False), Tenant(id="acme", limits=TenantLimits(queued_jobs=1000))]
)
async def test_whoever_is_refused_at_once_or_counted_does_not_go_unread(tenant: Tenant) -> None:
    yard = await relieved()
    yard.spill._tenants["acme"] = tenant  # type: ignore[index]
    assert not yard.come(HIGH)


async def test_what_comes_while_a_write_is_on_its_way_goes_in_the_next() -> None:
    yard = await relieved()
    yard.hold.clear()
    assert yard.come(HIGH) and yard.come(HIGH + 1)
    await asyncio.sleep(2 * room.LINGER_S)
    assert all(yard.come(HIGH + n) for n in range(2, 10))
    await asyncio.sleep(2 * room.LINGER_S)
    yard.hold.set()
    await yard.gone_unread()
    assert yard.writes == [2, 8]


async def test_one_that_breaks_our_own_code_holds_up_none_that_went_with_it() -> None:
    yard = await relieved()
    moved = yard.moved

    def breaks(ticket: Ticket) -> None:
        if ticket.place.offset == HIGH:
            raise ValueError("broken")
        moved(ticket)

    yard.moved = breaks  # type: ignore[method-assign]
    assert all(yard.come(HIGH + n) for n in range(4))
    await yard.gone_unread()
    assert [t.place.offset for t in yard.gone] == [HIGH + 1, HIGH + 2, HIGH + 3]
    assert yard.moving() == 0


async def test_what_a_tenant_holds_is_right_though_a_job_is_noted_twice() -> None:
    yard = Yard()
    yard.read(3)
    first = next(iter(yard.queue.values()))
    yard.spill.note(first)
    assert yard.spill._partitions[KEY].held == {"acme": 3}
    for place in yard.queue:
        yard.spill.forget(place)
    assert not yard.spill._partitions[KEY].held


async def test_records_are_judged_first_where_they_must_be() -> None:
    yard = await relieved()
    yard.believes = False  # a copy needs the service's mark, or its tenant's spread has changed
    assert not yard.come(HIGH)
    yard.believes, yard.held = True, True
    assert not yard.come(HIGH + 1)
    yard.held = False
    yard.spill._partitions[KEY].outbox.paused_until = time.monotonic() + 60
    assert not yard.come(HIGH + 2)
    yard.spill._partitions[KEY].outbox.paused_until = 0.0
    yard.spill._partitions[KEY].active_until = time.monotonic()
    assert not yard.come(HIGH + 3)

    yard = await relieved()
    for one in list(yard.queue.values())[:2]:  # room for two more
        yard.book.complete(one.ticket)
    assert [yard.come(HIGH + n) for n in range(3)] == [False, False, True]
    await yard.gone_unread()


async def test_a_record_that_was_started_before_is_never_published_again() -> None:
    yard = await relieved()
    yard.book.starts = lambda ticket: 1  # type: ignore[method-assign]
    assert not yard.come(HIGH)


@pytest.mark.parametrize("problem", [KafkaConnectionError(), Unwanted("no")])
async def test_records_that_were_to_go_unread_and_cannot_are_judged_where_they_are(problem: Exception) -> None:
    yard = await relieved()
    yard.fails = problem
    assert yard.come(HIGH) and yard.come(HIGH + 1)
    await yard.gone_unread()
    assert [place.offset for place in yard.judged] == [HIGH, HIGH + 1] and not yard.gone
    assert yard.moving() == 0


async def test_records_about_to_go_unread_are_left_to_a_partitions_next_owner() -> None:
    yard = await relieved()
    yard.fails = KafkaConnectionError()
    assert yard.come(HIGH)
    yard.book.drop([KEY])
    yard.spill.abandon({KEY})
    await asyncio.sleep(2 * room.LINGER_S)
    assert not yard.spill._stops and not yard.judged


@given(st.lists(st.integers(0, 300_000), max_size=80))
def test_what_goes_together_is_bounded_and_nothing_is_left_out(sizes: list[int]) -> None:
    jobs = [job(n) for n in range(len(sizes))]
    for one, size in zip(jobs, sizes, strict=True):
        one.record = Record(one.place, b"acme", bytes(size), (), 1)
    outbox = deque(Going(one.record, one.ticket, one) for one in jobs)
    groups = []
    while outbox:
        groups.append(outbox_room.together(outbox))
    assert [one.job for group in groups for one in group] == jobs
    for group in groups:
        assert 1 <= len(group) <= outbox_room.GROUP
        assert len(group) == 1 or sum(len(one.record.value or b"") for one in group) <= outbox_room.GROUP_BYTES


async def test_a_partition_that_went_elsewhere_takes_its_moves_with_it() -> None:
    yard = Yard()
    yard.read(HIGH)
    yard.hold.clear()
    await yard.turn()
    await yard.turn(room.PATIENCE_S)
    assert yard.moving() == HIGH // 2
    yard.book.drop([KEY])
    yard.spill.abandon({KEY})
    while yard.spill._stops:
        await asyncio.sleep(0)
    assert not yard.gone and not yard.backs


async def test_what_is_complete_is_forgotten() -> None:
    yard = Yard()
    yard.read(HIGH)
    for place, one in yard.queue.items():
        yard.book.complete(one.ticket)
        yard.spill.forget(place)
    assert not yard.spill._partitions[KEY].jobs


# Homes: spread


class Far:
    """What the group's commits tell of other partitions: `done` = everything up to there."""

    def __init__(self) -> None:
        self.done: dict[Key, int] = {}
        self.end: dict[Key, int] = {}
        self.asked: list[tuple[str, list[Key]]] = []

    async def until(self, keys: Any, at_ms: int) -> dict[Key, int]:
        self.asked.append(("until", list(keys)))
        return {key: self.end.get(key, 0) for key in keys}

    async def ends(self, keys: Any) -> dict[Key, int]:
        self.asked.append(("ends", list(keys)))
        return {key: self.end.get(key, 0) for key in keys}

    async def passed(self, targets: dict[Key, int]) -> bool:
        return all(self.done.get(key, 0) >= end for key, end in targets.items())


SPREAD = Tenant(id="acme", spread=4, former_spread=1, spread_since=datetime.fromtimestamp(time.time() - 1000, UTC))
HOME = partition_of("acme", 6)  # 0: where all of the tenant's jobs were published
HERE = 1


class Town:
    """Homes on a real book, with another partition of the pool here."""

    def __init__(self, tenant: Tenant = SPREAD) -> None:
        self.book = Book(high=100, max_span=1_000_000)
        for number in (HOME, HERE):
            self.book.take((KEY[0], number), None, 0, 1_000_000)
            self.book.settled(number, 0)
        self.log: list[Transfer] = []
        self.far = Far()
        self.recalled: list[frozenset[int]] = []
        self.stayed: list[Job] = []
        self.fails: BaseException | None = None
        registry = Tenants({tenant.id: tenant})
        self.homes = Homes(
            Settings(partitions=6), self.book, self, registry, self.far, self._recall, self.stayed.append
        )
        self.count = 0

    async def _recall(self, numbers: frozenset[int]) -> None:
        self.recalled.append(numbers)

    async def publish(self, transfer: Transfer) -> None:
        if self.fails is not None:
            raise self.fails
        self.log.append(transfer)

    def job(self, id: str = "", *, number: int = HERE, **more: Any) -> Job:
        self.count += 1
        one = job(self.count, partition=number, **more)
        one.head.job_id = id or f"job-{self.count}"
        ticket = self.book.register(one.place)
        assert ticket is not None
        one.ticket = ticket
        return one

    async def calm(self) -> None:
        """Until nothing but a wait goes on."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def opened(self, *, timed: bool = False) -> None:
        self.homes.sends(self.job(**({"not_before": time.time() + 1000} if timed else {})))
        await self.calm()
        assert any(gate.open for key, gate in self.homes._gates.items() if key[3] is timed)


@pytest.fixture
async def town(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Town]:
    monkeypatch.setattr("service.overflow.homes.LOOK_FIRST_S", 0.0)
    monkeypatch.setattr("service.overflow.homes.LOOK_MOST_S", 0.0)
    town = Town()
    yield town
    await town.homes.stop()


async def test_while_jobs_of_the_former_spread_are_left_all_go_home_and_meet_there(town: Town) -> None:
    town.far.end[KEY[0], HOME] = 7
    one = town.job("a")
    assert town.homes.sends(one)
    await town.calm()
    (transfer,) = town.log
    assert (transfer.topic, transfer.partition) == (overflow_topic(POOL), HOME)
    assert dict(transfer.headers)[H_ORIGIN] == str(one.place).encode()
    assert not town.book.owns(one.ticket), "complete here once it is acknowledged"
    town.far.done[KEY[0], HOME] = 6
    await town.calm()
    assert town.homes.sends(town.job("b")) and not town.recalled
    town.far.done[KEY[0], HOME] = 7
    await town.calm()
    assert town.recalled and set(town.recalled) == {frozenset({HOME})}
    assert not town.homes.sends(town.job("c")), "all have ended, and their ends are known here"


async def test_what_lies_on_overflow_must_have_ended_too_and_who_was_sent_meanwhile_is_sent_again(town: Town) -> None:
    spilled = (overflow_topic(POOL), HOME)
    town.far.end[spilled] = 3
    assert town.homes.sends(town.job("a"))
    await town.calm()
    assert town.homes.sends(town.job("b"))
    town.far.end[spilled] = 5  # the two that went home lie there now
    town.far.done[spilled] = 3
    await town.calm()
    (gate,) = town.homes._gates.values()
    assert gate.open and town.homes.sends(town.job("b")), "its first copy may still wait at home"
    assert not town.homes.sends(town.job("c"))
    town.far.end[spilled] = town.far.done[spilled] = 6
    await town.calm()
    assert not town.homes.sends(town.job("b"))


async def test_a_copy_of_a_timed_job_goes_home_until_deferred_is_through(town: Town) -> None:
    kept = (deferred_topic(POOL), HOME)
    town.far.end[kept] = 9
    await town.opened()
    assert town.homes.sends(town.job(not_before=time.time() + 1000))
    await town.calm()
    assert town.homes.sends(town.job(not_before=time.time() + 1000))
    assert not town.homes.sends(town.job()), "one without a time has no copy on `deferred`"
    town.far.done[kept] = 9
    await town.calm()
    assert not town.homes.sends(town.job(not_before=time.time() + 1000))


async def test_publishers_may_follow_the_former_spread_for_a_moment_after_the_change() -> None:
    now = datetime.now(UTC)
    town = Town(SPREAD.model_copy(update={"spread_since": now}))
    assert town.homes.sends(town.job())
    await town.calm()
    assert not town.far.asked
    await town.homes.stop()


async def test_whoever_is_at_home_or_on_the_services_topics_or_in_order_stays(town: Town) -> None:
    town.far.end[KEY[0], HOME] = 7
    assert not town.homes.sends(town.job(number=HOME))
    spilled = town.job()
    spilled.ticket = Ticket(Place(overflow_topic(POOL), HERE, 1), 1)
    assert not town.homes.sends(spilled)
    started = town.job()
    town.book.crashed(started.ticket)
    assert not town.homes.sends(started), "what was started is never published again"
    assert not Town(SPREAD.model_copy(update={"order": "conversation"})).homes.sends(town.job())
    assert not Town(Tenant(id="acme", spread=4)).homes.sends(town.job())
    long_ago = datetime.fromtimestamp(time.time() - 30 * 86_400, UTC)
    assert not Town(SPREAD.model_copy(update={"spread_since": long_ago})).homes.sends(town.job())
    assert not town.log


async def test_a_job_that_cannot_go_home_runs_where_it_is(town: Town) -> None:
    town.far.end[KEY[0], HOME] = 7
    town.fails = Unwanted("too large")
    one = town.job()
    assert town.homes.sends(one)
    await town.calm()
    assert town.stayed == [one] and town.book.owns(one.ticket)


async def test_a_broker_that_cannot_tell_leaves_the_gate_closed(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(keys: Any, at_ms: int) -> dict[Key, int]:
        raise TimeoutError

    ask = town.far.until
    monkeypatch.setattr(town.far, "until", away)
    assert town.homes.sends(town.job())
    await town.calm()
    assert town.homes.sends(town.job())
    monkeypatch.setattr(town.far, "until", ask)
    await town.calm()
    assert not town.homes.sends(town.job())
