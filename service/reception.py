"""What happens to a record between consumer and scheduler, and to a job once all it sent is acknowledged.

The consumer calls `admit` and goes on; nothing here waits. Every record leaves by one door: a job for the scheduler,
one refusal event, or a dead letter; its offset is complete when delivery reports that door's records as acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence

from schemas.errors import Cancelled, ErrorCode, Refusal
from schemas.events import TERMINAL
from service.cancels import Cancels, Wish
from service.credentials import Doubt
from service.deferred import Deferral, Relay
from service.delivery.link import Link
from service.frames import Answer, Dead, Ended, Head, Timing, Unanswered, Usage
from service.identity.archive import Archive
from service.identity.copies import Copies
from service.identity.identities import Arrival
from service.intake.intake import Intake
from service.intake.verdict import Early, Elsewhere, Lookup, Refused, Undeliverable, Unverified, Verdict
from service.job import Job, Place, Record, Ticket
from service.ledger.book import Book
from service.overflow import Census, Homes, Hops, Spill
from service.runner import Runner, error_of
from service.scheduler.order import Upstream
from service.scheduler.scheduler import Entry, Scheduler
from service.settings import Settings
from service.telemetry.metrics import Metrics
from service.telemetry.propagation import extract
from service.tenants import Tenants

log = logging.getLogger(__name__)

ENDED = TERMINAL | {"dead", "undeliverable"}  # what completes a record; `abandoned` does not


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
        tenants: Tenants,
    ) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._runner = runner
        self._link = link
        self._book = book
        self._metrics = metrics
        self._closed = False  # what still comes is left to the partition's next owner
        self._lookups: set[asyncio.Task[None]] = set()
        self._upstream = Upstream()
        scheduler.order_ready(lambda job: not self._upstream.before(job))
        self._cancels = Cancels()
        self._most_unacknowledged = settings.delivery.max_unacknowledged_bytes
        self.copies = Copies(settings, self, book.owns, metrics.duplicate)
        relay = Relay(settings)  # started and stopped by `deferral`
        self.deferral = Deferral(
            settings, book, relay, Archive(settings.kafka), self.admit, self._cancels.hit, metrics.deferred
        )

        self.spill = Spill(settings, book, relay, tenants, self)
        self.hops = Hops(settings, book, relay, self._unreachable, lambda: metrics.spilled("model"))
        self._census = Census(settings)
        self.homes = Homes(
            settings,
            book,
            relay,
            tenants,
            self._census,
            self.copies.recall_elsewhere,
            self._stays,
            lambda: metrics.spilled("spread"),
        )

    # -- records in

    def admit(self, record: Record, ticket: Ticket) -> None:
        if self._closed:
            return
        record = self.deferral.original(record)
        if not self.deferral.keeps(record, ticket) and not self.spill.takes(record, ticket):
            self._settle(self._intake.read(record, ticket))

    def poison(self, record: Record, ticket: Ticket, message: str) -> None:
        """A record on which our own code raised: kept whole, so that nothing is lost."""
        if self._closed:
            return
        self._dead(record.dead(ticket, record.place, ErrorCode.INTERNAL, message))

    def _dead(self, dead: Dead) -> None:
        self._link.dead(dead)
        self._metrics.dead_letter(dead.code)

    def _settle(self, verdict: Verdict | Early | Lookup) -> None:
        if self._closed:
            return
        if isinstance(verdict, Job):
            if not self.homes.sends(verdict):
                self._stays(verdict)
        elif isinstance(verdict, Early):
            lookup, head = verdict.lookup, verdict.head
            if self.homes.concerns(head.tenant) or not self._defer(
                head, lookup.record, lookup.ticket, verdict.not_before, verdict.starts
            ):
                self._settle(lookup)
        elif isinstance(verdict, Refused):
            refused = verdict
            if isinstance(refused.refusal, Doubt):
                self._metrics.unverified("job", refused.refusal.reason)
            self.copies.admit(
                Arrival(refused.head, refused.record, refused.ticket, refused.received, refusal=refused.refusal)
            )
        elif isinstance(verdict, Elsewhere):
            self.hops.send(verdict)
        elif isinstance(verdict, Unverified):
            self._unverified(verdict)
        elif isinstance(verdict, Undeliverable):
            self._dead(verdict.dead)
        else:
            self._upstream.add(verdict.ticket, verdict.record.key)
            task = asyncio.create_task(self._look_up(verdict))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)

    def _unverified(self, verdict: Unverified) -> None:
        """Past `copies`: the identity that it claims may be somebody's, who must not find his job answered by it."""
        self._metrics.unverified("job", verdict.doubt.reason)
        self._metrics.dead_letter(verdict.dead.code)
        self._end_unstarted(
            verdict.head, verdict.doubt, verdict.received, verdict.record, repeat=True, dead=verdict.dead
        )

    def _unreachable(self, elsewhere: Elsewhere, refusal: Refusal) -> None:
        arrival = Arrival(elsewhere.head, elsewhere.record, elsewhere.ticket, elsewhere.received, refusal=refusal)
        self.copies.admit(arrival)

    def _stays(self, job: Job) -> None:
        if not self._defer(job.head, job.record, job.ticket, job.not_before, job.starts):
            self.copies.admit(Arrival.of(job))

    def _defer(self, head: Head, record: Record, ticket: Ticket, not_before: float | None, starts: int) -> bool:
        """Whether the job's time is so far ahead that it waits on `deferred` (R12)."""
        if not self.deferral.put(head, record, ticket, not_before, starts):
            return False
        if head.progress:
            self._link.waiting(head, "not_before", time.time())
        return True

    async def _look_up(self, lookup: Lookup) -> None:
        try:
            try:
                verdict = await lookup.finish()
            finally:
                self._upstream.remove(lookup.ticket, lookup.record.key)
            if self._book.owns(lookup.ticket):  # else its partition went to another worker in the meantime
                self._settle(verdict)
        except Exception as problem:
            if not self._book.owns(lookup.ticket):
                return
            log.exception("intake failed place=%s", lookup.record.place)
            self.poison(lookup.record, lookup.ticket, f"intake failed on this record: {type(problem).__name__}")
        finally:
            self._scheduler.order_moved()  # a job of an ordered tenant may have waited for this record

    # -- the doors of `copies`

    def go_on(self, arrival: Arrival, *, returning: bool = False) -> None:
        job = arrival.job
        if job is None:
            assert arrival.refusal is not None
            self._end_unstarted(arrival.head, arrival.refusal, arrival.received, arrival.record)
        elif self.is_cancelled(arrival):
            self._metrics.cancel("admission")
            self._end_unstarted(arrival.head, Cancelled(), arrival.received, arrival.record)
        else:
            self.spill.note(job)
            self._scheduler.put(job, company=self._runner.company(job), returning=returning)

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
        taken = bool(self._scheduler.take({place}))
        if taken:
            self.spill.forget(place)
        return taken

    # -- the doors of `spill`

    def take_out(self, places: Collection[Place]) -> list[Job]:
        taken = self._scheduler.take(frozenset(places))
        for job in taken:
            self.copies.departs(job.ticket)
        return taken

    def put_back(self, job: Job) -> None:
        self.copies.stays(job.ticket)
        if not self._closed:
            self.go_on(Arrival.of(job), returning=True)

    def is_held(self) -> bool:
        return bool(self._scheduler.holds)

    def take_in(self, record: Record, ticket: Ticket) -> None:
        if self._closed:
            return
        try:
            self._settle(self._intake.read(record, ticket))
        except Exception as problem:
            log.exception("intake failed place=%s", record.place)
            self.poison(record, ticket, f"the service could not take this record in ({type(problem).__name__})")

    def may_go_unread(self, tenant: str) -> bool:
        return not self._intake.credentials.marks and not self.homes.concerns(tenant)

    def moved(self, ticket: Ticket) -> None:
        self._metrics.spilled("full")
        self.copies.gone(ticket)

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

    def disbelieve(self, record: Record, wish: Wish, doubt: Doubt) -> None:
        """A cancel that is not heeded: its sender may not stop this tenant's jobs."""
        self._metrics.unverified("cancel", doubt.reason)
        self._link.unanswered(
            Unanswered(
                topic=record.place.topic,
                partition=record.place.partition,
                offset=record.place.offset,
                tenant=wish.tenant,
                job_id=wish.job_id or "",
                code=doubt.code,
                trace=extract(record.headers),
                broker_time=record.timestamp_ms / 1000,
                at=time.time(),
            )
        )

    # -- the scheduler's exits

    async def run(self, entry: Entry) -> None:
        await self._runner.run(entry)

    def refuse(self, job: Job, refusal: Refusal) -> None:
        self._end_unstarted(job.head, refusal, job.received, job.record)

    def waiting(self, job: Job, reason: str, since: float) -> None:
        self._link.waiting(job.head, reason, since)

    def _end_unstarted(
        self,
        head: Head,
        refusal: Refusal,
        received: float,
        record: Record,
        *,
        repeat: bool = False,
        dead: Dead | None = None,
    ) -> None:
        """One event and nothing else: the attempt exists only to number it."""
        timing = Timing(received=received, ended=time.time())
        error = error_of(refusal)
        stream = self._link.open(head, announce=False, prompt_tokens=0, record=record)
        stream.end(refusal.terminal, Usage(), timing, error, dead, repeat=repeat)
        self._metrics.attempt(head, refusal.terminal, Usage(), timing, error)

    # -- completion

    def ended(self, ended: Ended) -> None:
        """Delivery's word that all records of an end are acknowledged (R6)."""
        if ended.kind not in ENDED:
            return
        place = Place(ended.topic, ended.partition, ended.offset)
        ticket = Ticket(place, ended.epoch)
        self._book.complete(ticket, ended.status_offset)
        self._scheduler.release(ticket, stop=ended.kind == "undeliverable")
        self._metrics.ended(ended)
        self.spill.forget(place)
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
        self.spill.abandon(lost)

    async def stop(self) -> None:
        """Nothing is taken in from here on: it would be answered after the last commit, and by the next owner again."""
        self._closed = True
        await self.spill.stop()
        await self.homes.stop()
        await self.hops.stop()
        await self._census.stop()
        self._intake.credentials.close()
        await self.deferral.stop()
        await self.copies.stop()
        for task in list(self._lookups):
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
