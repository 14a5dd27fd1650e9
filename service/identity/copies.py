"""What becomes of each record that intake has judged, by what is known of its job (R7). Runs nothing, sends nothing.

    admit ──▶ nothing known          ──▶ go_on: it runs, or is refused
          ├─▶ a copy is here         ──▶ follows it, or is refused after its end
          └─▶ ended within the window ─▶ status record ──▶ its terminal event ──▶ answer
                                                       ├─▶ gone by now ──▶ go_on: it runs again
                                                       └─▶ not readable now ──▶ it waits

Followers wait without a place at the engine; their deadlines and notices are kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Protocol

from schemas.errors import Cancelled, ErrorCode, Expired, Refusal
from schemas.events import TERMINAL
from schemas.names import status_topic
from service.frames import Answer, Ended
from service.identity.archive import Archive, Unread
from service.identity.history import History
from service.identity.identities import Arrival, Identities, Key, Standing
from service.identity.retelling import Known, judge, read_status, retell
from service.identity.window import Identity, Spot, Window
from service.job import Job, Place, Ticket
from service.settings import Settings

log = logging.getLogger(__name__)

TICK_S = 0.5
# A follower's deadline is its leader's too, whose end it waits for so much longer (within R14's tolerance of 2 s).
GRACE_S = 1.0
# `waiting` events: the first after, then every (seconds; contract.md).
WAITING_FIRST_S, WAITING_EVERY_S = 5.0, 30.0
# While the broker does not say how the first copy ended, the next waits, and runs again only after this, seconds.
LOOK_BACK_S = 180.0
LOOK_AGAIN_S = 1.0
# So often in a row: its status record can be read and its terminal cannot. Then the reply topic is gone.
TERMINAL_TRIES = 2
# Terminal events read at a time for copies; each has at most 1 MiB.
READING = 16
ROOM_POLL_S = 0.1
# Events over so many bytes are read and written in a thread, as intake does with records.
LARGE = 64 * 1024
# How long the taking over of partitions waits for the last hour's ends, if those are few.
HEAD_START_S = 3.0


class Doors(Protocol):
    """Where a record leaves this room. All of them return at once."""

    def go_on(self, arrival: Arrival) -> None:
        """The first of its job: it runs, or is refused."""

    def answer(self, arrival: Arrival, kind: str, answer: Answer) -> None:
        """Gets the end of the first one."""

    def turn_away(self, arrival: Arrival, refusal: Refusal) -> None:
        """A further record of its job ends by itself: in conflict, cancelled, expired."""

    def drop(self, arrival: Arrival) -> None:
        """The same record once more: complete without a word."""

    def waiting(self, job: Job, reason: str, since: float) -> None: ...

    def is_cancelled(self, arrival: Arrival) -> bool:
        """Whether a cancel that is known hits it."""

    def has_room(self) -> bool:
        """Whether output that is not acknowledged leaves room for an answer (R10)."""

    def withdraw(self, place: Place) -> bool:
        """Takes a job out of the queue that turned out to have ended; False: it has begun, or is not there."""


class _NoTerminal(Unread):
    """The status record was read just now, its terminal event could not be."""


class Copies:
    """`owns(ticket)`: whether the record is still this worker's to end. `count(outcome)`: for the metrics."""

    def __init__(
        self, settings: Settings, doors: Doors, owns: Callable[[Ticket], bool], count: Callable[[str], None]
    ) -> None:
        self._doors = doors
        self._owns = owns
        self._count = count
        self._identities = Identities()
        span_s, most = settings.duplicates.window_s, settings.duplicates.window_jobs
        self._window = Window(span_s, most)
        self._status_topic = status_topic(settings.pool)
        self._archive = Archive(settings.kafka)
        self._history = History(settings.kafka, self._status_topic, self._learn, span_s=span_s, most=most)
        self._reading = asyncio.Semaphore(READING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None

    # life

    def start(self) -> None:
        self._archive.start()
        self._ticking = asyncio.create_task(self._tick(), name="copies")

    async def stop(self) -> None:
        tasks = [*self._tasks, *([self._ticking] if self._ticking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._history.stop()
        await self._archive.stop()

    # records in

    def admit(self, arrival: Arrival) -> None:
        """Each record once; leaves by one of the doors, now or later."""
        identity = arrival.identity
        if not identity[0]:  # nobody's: nothing to be found under it
            self._doors.go_on(arrival)
        elif self._identities.group(identity) is None and (spot := self._window.find(identity, time.time())):
            self._spawn(self._look_back(arrival, spot))
        else:
            self._enter(arrival)

    def _enter(self, arrival: Arrival) -> None:
        group = self._identities.group(arrival.identity)
        if group is not None and not self._owns(group.leader.ticket):
            self.gone(group.leader.ticket)  # or this one would wait for an end that is not ours to see
        match self._identities.enter(arrival):
            case Standing.LEADER:
                self._doors.go_on(arrival)
            case Standing.SAME_RECORD:
                self._drop(arrival)
            case Standing.CONFLICT:
                self._conflict(arrival)
            case Standing.FOLLOWER:
                self._follow(arrival)

    def _follow(self, arrival: Arrival) -> None:
        group = self._identities.group(arrival.identity)
        assert group is not None
        arrival.since = time.time()
        if arrival.head.progress:
            arrival.notice = arrival.since + WAITING_FIRST_S
        if self._doors.is_cancelled(arrival) and not self._doors.is_cancelled(group.leader):
            self._turn_away(arrival, Cancelled())

    # records out

    def ended(self, ended: Ended) -> None:
        """A record's end is acknowledged. What waited on it follows."""
        ticket = Ticket(Place(ended.topic, ended.partition, ended.offset), ended.epoch)
        group = self._identities.ended(ticket)
        if group is None:
            return
        spot = None
        if ended.kind in TERMINAL and ended.status_offset is not None:
            spot = Spot(ended.partition, ended.status_offset)
            self._window.add(group.leader.identity, spot, time.time())
        for follower in group.followers:
            if follower.head.digest != group.leader.head.digest and spot is not None:
                self._conflict(follower)
            elif spot is not None:
                self._spawn(self._look_back(follower, spot))
            else:  # nobody was told how it ended
                self._enter(follower)

    def departs(self, ticket: Ticket) -> None:
        """This record is being published on another topic of the service; `gone` or `stays` follows.

        Its copy there may be read before the acknowledgement: dropped as the same record, with this one then gone, the
        job would be lost.
        """
        self._identities.depart(ticket)

    def gone(self, ticket: Ticket) -> None:
        """This record went elsewhere without an end: it was published on another topic of the service."""
        group = self._identities.ended(ticket)
        if group is not None:
            for follower in sorted(group.followers, key=group.is_its_copy, reverse=True):  # its own copy leads now
                self.admit(follower)

    def stays(self, ticket: Ticket) -> None:
        """It was not published, or nobody knows whether it was."""
        for copy in self._identities.stay(ticket):
            self._drop(copy)

    def abandon(self, lost: set[Key]) -> None:
        """Partitions went to another worker, and with them their leaders and followers."""
        for orphan in self._identities.lose(lost):
            self._enter(orphan)

    def cancel(self, tenant: str, job_id: str | None, run: int | None) -> list[Arrival]:
        """The leaders that a cancel names. Followers whose leader it does not hit end here, the others with it."""
        leaders = []
        for group in list(self._identities.hit(tenant, job_id, run)):
            if self._doors.is_cancelled(group.leader):
                leaders.append(group.leader)
                continue
            for follower in [f for f in group.followers if self._doors.is_cancelled(f)]:
                self._turn_away(follower, Cancelled())
        return leaders

    # what ended before

    async def recall(self, numbers: Collection[int]) -> None:
        """These partition numbers came here. Returns when their last hour is known, or is too long to wait for."""
        self._history.recall(numbers)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_START_S):
                await self._history.ready.wait()

    async def recall_elsewhere(self, numbers: Collection[int]) -> None:
        """Other workers' partition numbers, whose ends so far must be known here too (spread)."""
        await self._history.known(numbers)

    def _learn(self, identity: Identity, spot: Spot, at: float) -> None:
        self._window.add(identity, spot, at)
        group = self._identities.group(identity)
        if group is not None and self._doors.withdraw(group.leader.place):  # read before the window knew
            self._identities.ended(group.leader.ticket)
            for arrival in (group.leader, *group.followers):
                self._spawn(self._look_back(arrival, spot))

    async def _look_back(self, arrival: Arrival, spot: Spot) -> None:
        """Answers a copy of an ended job. A broker that is away is no reason to run it again."""
        found: Known | tuple[str, Answer] | None = None
        until, tries = time.monotonic() + LOOK_BACK_S, 0
        while self._owns(arrival.ticket):
            try:
                async with self._reading:
                    while not self._doors.has_room():  # noqa: ASYNC110 (R10)
                        await asyncio.sleep(ROOM_POLL_S)
                    found = await self._found(arrival, spot)
            except Unread as problem:
                tries = tries + 1 if isinstance(problem, _NoTerminal) else 0
                if arrival.job is not None and _late(arrival.job, time.time()):
                    self._doors.turn_away(arrival, Expired())
                    return
                if time.monotonic() < until and tries < TERMINAL_TRIES:
                    await asyncio.sleep(LOOK_AGAIN_S)
                    continue
                log.warning("the end of the first copy cannot be read, it runs again job=%s", arrival.head.job_id)
            except Exception:
                log.exception("looking back failed job=%s tenant=%s", arrival.head.job_id, arrival.head.tenant)
            break
        if not self._owns(arrival.ticket):
            return
        if found is None:
            self._count("run_again")
            self._enter(arrival)
        elif found is Known.SAME_RECORD:
            self._drop(arrival)
        elif found is Known.OTHER_CONTENT:
            self._conflict(arrival)
        else:
            self._count("answered")
            self._doors.answer(arrival, *found)

    async def _found(self, arrival: Arrival, spot: Spot) -> Known | tuple[str, Answer] | None:
        head = arrival.head
        status = await self._archive.read(Place(self._status_topic, spot.number, spot.offset))
        end = judge(read_status(status), head)
        if end is None or isinstance(end, Known):
            return end
        try:
            event = await self._archive.read(end.terminal)
        except Unread:
            raise _NoTerminal from None
        if event is not None and len(event) > LARGE:
            answer = await asyncio.to_thread(retell, event, end, head)
        else:
            answer = retell(event, end, head)
        return None if answer is None else (end.kind, answer)

    # how a copy ends

    def _drop(self, arrival: Arrival) -> None:
        self._count("dropped")
        self._doors.drop(arrival)

    def _conflict(self, arrival: Arrival) -> None:
        self._count("conflict")
        self._doors.turn_away(
            arrival,
            Refusal(
                ErrorCode.ID_CONFLICT,
                "another job with this id and run came before and has other content; choose another id, or run + 1",
            ),
        )

    def _turn_away(self, follower: Arrival, refusal: Refusal) -> None:
        if self._identities.leave(follower):
            self._doors.turn_away(follower, refusal)

    # time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.run_once(time.time())
            except Exception:
                log.exception("a turn over waiting copies failed")

    def run_once(self, now: float) -> None:
        """Followers whose leader is gone go on by themselves, late ones expire, waiting ones are told."""
        for follower in self._identities.forsaken(self._owns):
            self._enter(follower)
        for follower in self._identities.followers():
            if follower.job is not None and _late(follower.job, now):
                self._turn_away(follower, Expired())
            elif follower.job is not None and 0 < follower.notice <= now:
                follower.notice = now + WAITING_EVERY_S
                self._doors.waiting(follower.job, "order", follower.since)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _late(job: Job, now: float) -> bool:
    return job.deadline is not None and now > job.deadline + GRACE_S
