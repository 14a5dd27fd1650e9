"""What happens to a record between consumer and scheduler, and to a job once all it sent is acknowledged.

The consumer calls `admit` and goes on; nothing here waits. Every record leaves by one door: a job for the scheduler,
one refusal event, or a dead letter; its offset is complete when delivery reports that door's records as acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from schemas.errors import Cancelled, ErrorCode, Refusal
from service.cancels import Cancels, Wish
from service.deferred import Deferral, Relay
from service.delivery.link import Link
from service.frames import Answer, Dead, Ended, Head, Timing, Usage
from service.identity.archive import Archive
from service.identity.copies import Copies
from service.identity.identities import Arrival
from service.intake.intake import Intake
from service.intake.verdict import Early, Lookup, Refused, Undeliverable, Verdict
from service.job import Job, Place, Record, Ticket
from service.ledger.book import Book
from service.runner import Runner, error_of
from service.scheduler.scheduler import Entry, Scheduler
from service.settings import Settings
from service.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired", "dead", "undeliverable"})


class Reception:
    """Admits records, refuses jobs, completes offsets. `copies` sees every judged record first and calls back (R7)."""

    def __init__(
        self,
        intake: Intake,
        scheduler: Scheduler,
        runner: Runner,
        link: Link,
        book: Book,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._runner = runner
        self._link = link
        self._book = book
        self._metrics = metrics
        self._lookups: set[asyncio.Task[None]] = set()
        self._cancels = Cancels()
        self._most_unacknowledged = settings.delivery.max_unacknowledged_bytes
        self.copies = Copies(settings, self, book.owns, metrics.duplicate)
        self.deferral = Deferral(
            settings, book, Relay(settings), Archive(settings.kafka), self.admit, self._cancels.hit, metrics.deferred
        )

    # -- records in

    def admit(self, record: Record, ticket: Ticket) -> None:
        record = self.deferral.original(record)
        if not self.deferral.keeps(record, ticket):
            self._settle(self._intake.read(record, ticket))

    def poison(self, record: Record, ticket: Ticket, message: str) -> None:
        """A record on which our own code raised: kept whole, so that nothing is lost."""
        self._dead(record.dead(ticket, record.place, ErrorCode.INTERNAL, message))

    def _dead(self, dead: Dead) -> None:
        self._link.dead(dead)
        self._metrics.dead_letter(dead.code)

    def _settle(self, verdict: Verdict | Early | Lookup) -> None:
        if isinstance(verdict, Job):
            job = verdict
            if not self._defer(job.head, job.record, job.ticket, job.not_before, job.starts):
                self.copies.admit(Arrival.of(job))
        elif isinstance(verdict, Early):
            lookup = verdict.lookup
            if not self._defer(verdict.head, lookup.record, lookup.ticket, verdict.not_before, verdict.starts):
                self._settle(lookup)
        elif isinstance(verdict, Refused):
            refused = verdict
            self.copies.admit(
                Arrival(refused.head, refused.record, refused.ticket, refused.received, refusal=refused.refusal)
            )
        elif isinstance(verdict, Undeliverable):
            self._dead(verdict.dead)
        else:
            task = asyncio.create_task(self._look_up(verdict))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)

    def _defer(self, head: Head, record: Record, ticket: Ticket, not_before: float | None, starts: int) -> bool:
        """Whether the job's time is so far ahead that it waits on `deferred` (R12)."""
        if not self.deferral.put(head, record, ticket, not_before, starts):
            return False
        if head.progress:
            self._link.waiting(head, "not_before", time.time())
        return True

    async def _look_up(self, lookup: Lookup) -> None:
        try:
            verdict = await lookup.finish()
            if self._book.owns(lookup.ticket):  # else its partition went to another worker in the meantime
                self._settle(verdict)
        except Exception as problem:
            if not self._book.owns(lookup.ticket):
                return
            log.exception("intake failed place=%s", lookup.record.place)
            self.poison(lookup.record, lookup.ticket, f"intake failed on this record: {type(problem).__name__}")

    # -- the doors of `copies`

    def go_on(self, arrival: Arrival) -> None:
        job = arrival.job
        if job is None:
            assert arrival.refusal is not None
            self._end_unstarted(arrival.head, arrival.refusal, arrival.received, arrival.record)
        elif self.is_cancelled(arrival):
            self._metrics.cancel("admission")
            self._end_unstarted(arrival.head, Cancelled(), arrival.received, arrival.record)
        else:
            self._scheduler.put(job, alone=self._runner.is_suspect(job))

    def answer(self, arrival: Arrival, kind: str, answer: Answer) -> None:
        stream = self._link.open(arrival.head, announce=False, prompt_tokens=0, record=arrival.record)
        stream.end(kind, Usage(), Timing(received=arrival.received, ended=time.time()), answer=answer, repeat=True)

    def turn_away(self, arrival: Arrival, refusal: Refusal) -> None:
        if isinstance(refusal, Cancelled):
            self._metrics.cancel("waiting")
        self._end_unstarted(arrival.head, refusal, arrival.received, arrival.record, repeat=True)

    def drop(self, arrival: Arrival) -> None:
        self._book.complete(arrival.ticket)

    def is_cancelled(self, arrival: Arrival) -> bool:
        head = arrival.head
        return self._cancels.hit(head.tenant, head.job_id, head.run, round(head.broker_time * 1000))

    def has_room(self) -> bool:
        return self._link.unacknowledged <= self._most_unacknowledged

    def withdraw(self, place: Place) -> bool:
        return bool(self._scheduler.take({place}))

    # -- cancels

    def cancel(self, wishes: Sequence[Wish]) -> None:
        """Cancels that were read (R13). Who ends by one is decided here and now, before anything goes to delivery."""
        for wish in wishes:
            self._cancels.add(wish)
        self.deferral.cancel(wishes)
        hit = {a.place: a for wish in wishes for a in self.copies.cancel(wish.tenant, wish.job_id, wish.run)}
        if not hit:
            return
        for job in self._scheduler.take(hit.keys()):
            self._metrics.cancel("waiting")
            self.refuse(job, Cancelled())
            del hit[job.place]
        for place in hit:
            entry = self._scheduler.begun(place)
            if entry is not None and self._runner.cancel(entry):
                self._metrics.cancel("running")

    # -- the scheduler's exits

    async def run(self, entry: Entry) -> None:
        await self._runner.run(entry)

    def refuse(self, job: Job, refusal: Refusal) -> None:
        self._end_unstarted(job.head, refusal, job.received, job.record)

    def waiting(self, job: Job, reason: str, since: float) -> None:
        self._link.waiting(job.head, reason, since)

    def _end_unstarted(
        self, head: Head, refusal: Refusal, received: float, record: Record, *, repeat: bool = False
    ) -> None:
        """One event and nothing else: the attempt exists only to number it."""
        timing = Timing(received=received, ended=time.time())
        error = error_of(refusal)
        stream = self._link.open(head, announce=False, prompt_tokens=0, record=record)
        stream.end(refusal.terminal, Usage(), timing, error, repeat=repeat)
        self._metrics.attempt(head, refusal.terminal, Usage(), timing, error)

    # -- completion

    def ended(self, ended: Ended) -> None:
        """Delivery's word that all records of an end are acknowledged (R6)."""
        if ended.kind not in TERMINAL:
            return
        place = Place(ended.topic, ended.partition, ended.offset)
        ticket = Ticket(place, ended.epoch)
        self._book.complete(ticket, ended.status_offset)
        self._scheduler.release(ticket, stop=ended.kind == "undeliverable")
        self._metrics.ended(ended)
        self.copies.ended(ended)

    # -- partitions out

    def abandon(self, lost: set[tuple[str, int]]) -> None:
        """Jobs of these (topic, partition) belong to another worker now: forget them, stop those that run."""
        if not lost:
            return
        stopped = self._scheduler.abandon(lambda job: (job.place.topic, job.place.partition) in lost)
        if stopped:
            log.info("abandoned running=%d partitions=%d", len(stopped), len(lost))
        self.copies.abandon(lost)
        self.deferral.abandon(lost)

    async def stop(self) -> None:
        await self.deferral.stop()
        await self.copies.stop()
        for task in list(self._lookups):
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
