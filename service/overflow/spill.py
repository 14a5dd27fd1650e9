"""Moves the newest waiting jobs of a tenant that fills a partition to `overflow`, so that its neighbours go on.

    full for a moment, and somebody may lie behind ──▶ the newest of those who hold most ──▶ published, acknowledged
    ──▶ complete where they lay ──▶ the partition is read on
    while that goes on ──▶ the next records of whoever holds most go as they come, unread

Without it one tenant's burst keeps the jobs of all others on its partition unread until the burst has run. Only jobs of
jobs topics go, and only once: what lies on `overflow` stays there, and its partitions pause by themselves (R3, R12).
Jobs in order never go, nor what was started before. What cannot be moved goes back to where it waited. What goes unread
is judged on `overflow` only: whose it is, its key says. Whoever publishes under another's key, against the contract,
has his job wait there, whatever his own order mode or spread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from schemas.keys import tenant_of
from schemas.names import overflow_topic, parse_jobs_topic
from schemas.tenants import Tenant
from service.deferred.relay import Publisher
from service.job import Job, Place, Record, Ticket
from service.ledger import Key
from service.overflow.neighbours import Neighbours
from service.overflow.outbox import Going, Outbox
from service.overflow.shares import surplus
from service.settings import Settings

log = logging.getLogger(__name__)

# A partition that fills up and empties within this, seconds, needs no help: moving a job costs two records.
PATIENCE_S = 1.0
# For so long after the last one went, seconds, jobs go before it is full again: a pause costs what was fetched ahead,
# and with one at every window a neighbour waits behind 500 records a second, with none behind as many as can be read.
ACTIVE_S = 10.0
# Whoever holds less than this share of a window does not fill it.
LEAST_SHARE = 1 / 8
TICK_S, FAST_TICK_S = 0.25, 0.02
# While jobs go, a partition is looked at again after so many came, not only at the next tick: else it is full before.
CROWD = 16
# Jobs of one partition on their way at a time.
AT_ONCE = 256
# Records that go unread wait so long for others, seconds.
LINGER_S = 0.005
# After a turn that failed, seconds.
PAUSE_S = 5.0


class Window(Protocol):
    """The ledger, as far as it is needed here."""

    high: int

    def excess(self, key: Key, *, early: bool = False) -> int: ...

    def owns(self, ticket: Ticket) -> bool: ...

    def starts(self, ticket: Ticket) -> int: ...

    def complete(self, ticket: Ticket) -> bool: ...


class Registry(Protocol):
    version: int

    def get(self, tenant: str) -> Tenant | None: ...

    def __iter__(self) -> Iterator[Tenant]: ...


class Doors(Protocol):
    """What becomes of jobs that are to go."""

    def take_out(self, places: Collection[Place]) -> list[Job]:
        """Takes those out of the queue that have not begun."""

    def put_back(self, job: Job) -> None:
        """A job that could not be moved waits here again."""

    def is_held(self) -> bool:
        """Whether nothing is started at the moment: then a partition is full for another reason, and stays so."""

    def may_go_unread(self, tenant: str) -> bool:
        """Whether records with this tenant's key may be moved before anybody has judged them."""

    def take_in(self, record: Record, ticket: Ticket) -> None:
        """One that went unread and could not be moved is judged here."""

    def moved(self, ticket: Ticket) -> None:
        """It is on `overflow` now."""


@dataclass(slots=True)
class _Partition:
    outbox: Outbox
    jobs: dict[int, Job] = field(default_factory=dict)  # that wait or run here, by offset
    held: Counter[str] = field(default_factory=Counter)  # how many of each tenant
    full_since: float | None = None  # monotonic
    active_until: float = 0.0
    came: int = 0  # since it was looked at

    def add(self, job: Job) -> None:
        self.drop(job.place.offset)  # judged anew, or of a topic that was made again
        self.jobs[job.place.offset] = job
        self.held[job.tenant] += 1

    def drop(self, offset: int) -> None:
        job = self.jobs.pop(offset, None)
        if job is not None:
            self.held[job.tenant] -= 1
            if not self.held[job.tenant]:
                del self.held[job.tenant]


class Spill:
    def __init__(self, settings: Settings, window: Window, relay: Publisher, tenants: Registry, doors: Doors) -> None:
        self._topic = overflow_topic(settings.pool)
        self._window = window
        self._relay = relay
        self._tenants = tenants
        self._doors = doors
        self._least = max(1, int(window.high * LEAST_SHARE))
        self._neighbours = Neighbours(settings.partitions)
        self._version = -1  # of the registry, that the neighbours are of
        self._partitions: dict[Key, _Partition] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None

    # life

    def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick(), name="spill")

    async def stop(self) -> None:
        """What has not been moved stays where it is."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait({self._ticking})
        self.abandon(set(self._partitions))
        await asyncio.gather(*self._stops)

    # what comes

    def takes(self, record: Record, ticket: Ticket) -> bool:
        """Takes a record just read that would only be judged and queued here to be moved the next moment.

        That would cost three times as much of the loop's time, on which the neighbours wait.
        """
        key = record.place[:2]
        partition = self._partitions.get(key)
        if partition is None or not partition.held or self._doors.is_held():
            return False
        now, moving = time.monotonic(), len(partition.outbox)
        if now >= partition.active_until or now < partition.outbox.paused_until or moving >= AT_ONCE:
            return False
        name, held = tenant_of(record.key), partition.held
        tenant = self._tenants.get(name)
        if tenant is None or not tenant.enabled or tenant.order != "none" or tenant.limits.queued_jobs is not None:
            return False  # refused at once, kept in order, or counted: all of that is done here
        if held[name] < max(self._least, *held.values()):
            return False
        if self._window.excess(key, early=True) <= moving or self._window.starts(ticket):
            return False
        if not self._gives_way(held, name, key) or not self._doors.may_go_unread(name):
            return False
        partition.active_until = now + ACTIVE_S
        partition.outbox.put((Going(record, ticket),), linger_s=LINGER_S)
        return True

    # what waits

    def note(self, job: Job) -> None:
        """A job entered the queue."""
        said = parse_jobs_topic(job.place.topic)
        if said is None or said.tenant is not None or job.starts:  # a tenant's own topic has no neighbours
            return
        tenant = self._tenants.get(job.tenant)
        if tenant is not None and tenant.order == "none":
            key = job.place[:2]
            partition = self._partitions.get(key)
            if partition is None:
                outbox = Outbox(self._topic, self._relay, self._gone, self._back)
                partition = self._partitions[key] = _Partition(outbox)
            partition.add(job)
            partition.came += 1
            if partition.came == CROWD and partition.active_until:
                asyncio.get_running_loop().call_soon(self._look, key, partition)

    def forget(self, place: Place) -> None:
        """It is complete."""
        partition = self._partitions.get(place[:2])
        if partition is not None:
            partition.drop(place.offset)

    def abandon(self, lost: set[Key]) -> None:
        """These partitions belong to another worker now."""
        for key in lost & self._partitions.keys():
            stop = asyncio.create_task(self._partitions.pop(key).outbox.stop())
            self._stops.add(stop)
            stop.add_done_callback(self._stops.discard)

    # whose turn it is to go

    def run_once(self, now: float) -> bool:
        """Everything that must go, goes. `now`: monotonic. Whether a partition is being relieved at the moment."""
        for key, partition in self._partitions.items():
            self._turn(key, partition, now)
        return any(now < partition.active_until for partition in self._partitions.values())

    def _look(self, key: Key, partition: _Partition) -> None:
        if self._partitions.get(key) is partition:
            self._turn(key, partition, time.monotonic())

    def _turn(self, key: Key, partition: _Partition, now: float) -> None:
        partition.came = 0
        active = now < partition.active_until
        excess = 0 if self._doors.is_held() else self._window.excess(key, early=active)
        if excess <= 0:
            partition.full_since = None
            return
        if partition.full_since is None:
            partition.full_since = now
        patient = now - partition.full_since < PATIENCE_S and not active
        if not patient and now >= partition.outbox.paused_until:
            self._relieve(key, partition, excess - len(partition.outbox), now)

    def _relieve(self, key: Key, partition: _Partition, excess: int, now: float) -> None:
        held = partition.held
        goes = surplus(held, min(excess, AT_ONCE - len(partition.outbox)), self._least)
        goes = {tenant: count for tenant, count in goes.items() if self._gives_way(held, tenant, key)}
        if not goes:
            return
        left = sum(goes.values())
        places: set[Place] = set()
        for offset in sorted(partition.jobs, reverse=True):
            if not left:
                break
            job = partition.jobs[offset]
            if goes.get(job.tenant, 0) > 0 and job.not_before is None and not self._window.starts(job.ticket):
                goes[job.tenant] -= 1
                left -= 1
                places.add(job.place)
        taken = self._doors.take_out(places)
        if taken:
            partition.active_until = now + ACTIVE_S
        for job in taken:
            partition.drop(job.place.offset)  # noted again if it comes back
        partition.outbox.put([Going(job.record, job.ticket, job) for job in taken])

    def _gives_way(self, held: Mapping[str, int], tenant: str, key: Key) -> bool:
        """Whether somebody else may lie behind this tenant's jobs."""
        return len(held) > 1 or self._neighbours.beside(tenant, key[1])

    # what has gone, or could not

    def _gone(self, one: Going) -> None:
        if self._window.complete(one.ticket):
            self._doors.moved(one.ticket)

    def _back(self, one: Going, wanted: bool) -> None:
        if not self._window.owns(one.ticket):
            return
        if one.job is None:
            self._doors.take_in(one.record, one.ticket)
        else:
            self._doors.put_back(one.job)
            if not wanted:
                self.forget(one.ticket.place)  # not asked again

    async def _tick(self) -> None:
        busy = False
        while True:
            await asyncio.sleep(FAST_TICK_S if busy else TICK_S)
            try:
                if self._version != self._tenants.version:
                    self._version = self._tenants.version
                    await asyncio.to_thread(self._neighbours.refresh, list(self._tenants))
                busy = self.run_once(time.monotonic())
            except Exception:
                log.exception("a turn over the full partitions failed")
                await asyncio.sleep(PAUSE_S)
