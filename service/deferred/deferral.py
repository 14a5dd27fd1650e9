"""Holds back jobs whose time has not come: moves them to `deferred`, keeps that topic's timetables, reads what is due.

    put(job far ahead)       ──▶ published on `deferred`, acknowledged ──▶ complete where it lay
    keeps(record of deferred) ──▶ timetable ──due, and room──▶ read again by its place ──▶ admit

A job that cannot be moved stays where it is and is admitted from there when its time comes. What is due is read only as
far as the partition may take more records up, so a crowd that falls due at once waits here, unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from aiokafka.structs import ConsumerRecord

from schemas.names import deferred_topic, overflow_topic
from service.cancels import Wish
from service.deferred.relay import Relay, carry
from service.deferred.timetable import Timetable, job_print, tenant_print
from service.deferred.transfer import Mark, Transfer, first_time
from service.frames import Head
from service.identity.archive import Unread
from service.intake.verdict import NEAR_S
from service.job import Place, Record, Ticket
from service.ledger import Book, Key
from service.settings import Settings

log = logging.getLogger(__name__)

# Read so long before their time; the scheduler holds them to the moment.
LEAD_S = 0.5
TICK_S = 0.25
# Records of one partition on their way at a time: each may have 1 MiB.
READING = 64
# A due record that could not be read is looked for again so much later, seconds.
AGAIN_S = 2.0


class Library(Protocol):
    """Reads records by their place."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def record(self, place: Place) -> ConsumerRecord | None:
        """None: there is none any more. Raises Unread."""


class Deferral:
    """`admit(record, ticket)` takes what is due. `hit(tenant, job id, run, broker's ms)`: whether a known cancel does.

    `moved()`: a job was moved to `deferred`, for the metrics.
    """

    def __init__(
        self,
        settings: Settings,
        book: Book,
        relay: Relay,
        library: Library,
        admit: Callable[[Record, Ticket], None],
        hit: Callable[[str, str, int, int], bool],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.held = False  # nothing that is due is read meanwhile: too much waits in memory
        self._topic = deferred_topic(settings.pool)
        self._copied = frozenset({self._topic, overflow_topic(settings.pool)})
        self._book = book
        self._relay = relay
        self._library = library
        self._admit = admit
        self._hit = hit
        self._moved = moved
        self._tables: dict[Key, Timetable] = {}
        self._epochs: dict[Key, int] = {}
        self._tasks: dict[asyncio.Task[None], Key] = {}
        self._reading: Counter[Key] = Counter()
        self._wake = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None

    # life

    async def start(self) -> None:
        """Raises KafkaError, TimeoutError if no broker answers."""
        await self._relay.start()
        self._library.start()
        self._ticking = asyncio.create_task(self._tick(), name="deferral")

    async def stop(self) -> None:
        """What has not been moved stays where it is; what waits here is read again by the partition's next owner."""
        tasks = [*self._tasks, *([self._ticking] if self._ticking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._relay.stop()
        await self._library.stop()

    @property
    def timed(self) -> int:
        """Records that wait for their time."""
        return sum(map(len, self._tables.values()))

    # records in

    def original(self, record: Record) -> Record:
        """The record with its first place's time, if it lies on a topic to which only the service writes."""
        return first_time(record) if record.place.topic in self._copied else record

    def keeps(self, record: Record, ticket: Ticket) -> bool:
        """Whether this record's time has not come, by its headers alone: then it waits here."""
        if record.place.topic != self._topic:
            return False
        mark = Mark.of(record)
        if mark is None or mark.due <= time.time() + NEAR_S:
            return False
        if self._hit(mark.tenant, mark.job_id, mark.run, record.timestamp_ms) or not self._book.time(ticket):
            return False
        self._note(ticket, mark.due, mark.tenant, mark.job_id)
        return True

    def put(self, head: Head, record: Record, ticket: Ticket, not_before: float | None, starts: int) -> bool:
        """Takes a job whose time has not come. False: it has, nearly; or it must not be moved."""
        if not_before is None or not_before <= time.time() + NEAR_S:
            return False
        if self._hit(head.tenant, head.job_id, head.run, record.timestamp_ms):
            return False
        if self._book.time(ticket):  # on `deferred` already, without headers of ours
            self._note(ticket, not_before, head.tenant, head.job_id)
            return True
        if record.place.topic == self._topic or self._book.starts(ticket):
            return False  # a started job is never published again
        transfer = Transfer.of(record, head, self._topic, starts=starts, due=not_before)
        self._spawn(self._move(transfer, record, ticket, not_before), ticket.place[:2])
        return True

    def cancel(self, wishes: Sequence[Wish]) -> None:
        """Whom a cancel may name is read now; admission ends it."""
        jobs = {job_print(wish.tenant, wish.job_id) for wish in wishes if wish.job_id is not None}
        tenants = {tenant_print(wish.tenant) for wish in wishes if wish.job_id is None}
        for table in self._tables.values():
            table.hasten(jobs, tenants)

    def abandon(self, lost: set[Key]) -> None:
        """These partitions belong to another worker now."""
        for key in lost:
            self._tables.pop(key, None)
            self._epochs.pop(key, None)
        for task, key in list(self._tasks.items()):
            if key in lost:
                task.cancel()

    # moving

    async def _move(self, transfer: Transfer, record: Record, ticket: Ticket, due: float) -> None:
        def left() -> float:
            return due - NEAR_S - time.time() if self._book.owns(ticket) else 0.0

        if await carry(self._relay, transfer, left):
            if self._book.complete(ticket):
                self._moved()
            return
        await asyncio.sleep(max(0.0, left()))
        if self._book.owns(ticket):
            self._admit(record, ticket)

    # waiting

    def _note(self, ticket: Ticket, due: float, tenant: str, job_id: str) -> None:
        key = ticket.place[:2]
        if self._epochs.get(key) != ticket.epoch:  # the partition was given up and came back
            self._tables[key] = Timetable()
            self._epochs[key] = ticket.epoch
        self._tables[key].add(ticket.place.offset, due, tenant, job_id)

    async def _tick(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                self.run_once(time.time())
            except Exception:
                log.exception("a turn over the timetables failed")

    def run_once(self, now: float) -> None:
        """Everything that is due, as far as there is room, is read."""
        if self.held:
            return
        for key, table in self._tables.items():
            room = min(self._book.room(key), READING - self._reading[key])
            for offset in table.take(now + LEAD_S, room) if room > 0 else ():
                ticket = Ticket(Place(*key, offset), self._epochs[key])
                if self._book.due(ticket):
                    self._reading[key] += 1
                    self._spawn(self._take_up(ticket), key)

    async def _take_up(self, ticket: Ticket) -> None:
        key = ticket.place[:2]
        try:
            record = await self._read(ticket)
        finally:
            self._reading[key] -= 1
            self._wake.set()
        if record is not None and self._book.owns(ticket):
            self._admit(record, ticket)

    async def _read(self, ticket: Ticket) -> Record | None:
        while self._book.owns(ticket):
            try:
                found = await self._library.record(ticket.place)
            except Unread:
                log.warning("a due record cannot be read yet, tried again place=%s", ticket.place)
                await asyncio.sleep(AGAIN_S)
                continue
            if found is not None:
                record = Record(ticket.place, found.key, found.value, tuple(found.headers), found.timestamp)
                return self.original(record)
            if self._book.complete(ticket):
                log.error("a deferred record is gone from its topic, its job is lost place=%s", ticket.place)
            break
        return None

    def _spawn(self, work: Coroutine[Any, Any, None], key: Key) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = key
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
