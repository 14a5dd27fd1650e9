"""What happens to a record between consumer and scheduler, and to a job once all it sent is acknowledged.

The consumer calls `admit` and goes on; nothing here waits. Every record leaves by one door: a job for the scheduler,
one refusal event, or a dead letter; its offset is complete when delivery reports that door's records as acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time

from schemas.errors import ErrorCode, Refusal
from service.delivery.link import Link
from service.frames import Dead, Ended, Head, Timing, Usage
from service.intake.intake import Intake
from service.intake.verdict import Lookup, Refused, Undeliverable, Verdict
from service.job import Job, Place, Record, Ticket
from service.ledger.book import Book
from service.runner import Runner, error_of
from service.scheduler.scheduler import Entry, Scheduler
from service.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired", "dead", "undeliverable"})


class Reception:
    """Admits records, refuses jobs, completes offsets."""

    def __init__(
        self, intake: Intake, scheduler: Scheduler, runner: Runner, link: Link, book: Book, metrics: Metrics
    ) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._runner = runner
        self._link = link
        self._book = book
        self._metrics = metrics
        self._lookups: set[asyncio.Task[None]] = set()

    # -- records in

    def admit(self, record: Record, ticket: Ticket) -> None:
        self._settle(self._intake.read(record, ticket))

    def poison(self, record: Record, ticket: Ticket, message: str) -> None:
        """A record on which our own code raised: kept whole, so that nothing is lost."""
        self._dead(record.dead(ticket, record.place, ErrorCode.INTERNAL, message))

    def _dead(self, dead: Dead) -> None:
        self._link.dead(dead)
        self._metrics.dead_letter(dead.code)

    def _settle(self, verdict: Verdict | Lookup) -> None:
        if isinstance(verdict, Job):
            self._scheduler.put(verdict)
        elif isinstance(verdict, Refused):
            self._end_unstarted(verdict.head, verdict.refusal, verdict.received, verdict.record)
        elif isinstance(verdict, Undeliverable):
            self._dead(verdict.dead)
        else:
            task = asyncio.create_task(self._look_up(verdict))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)

    async def _look_up(self, lookup: Lookup) -> None:
        try:
            self._settle(await lookup.finish())
        except Exception as problem:
            log.exception("intake failed place=%s", lookup.record.place)
            self.poison(lookup.record, lookup.ticket, f"intake failed on this record: {type(problem).__name__}")

    # -- the scheduler's exits

    async def run(self, entry: Entry) -> None:
        await self._runner.run(entry)

    def refuse(self, job: Job, refusal: Refusal) -> None:
        self._end_unstarted(job.head, refusal, job.received, job.record)

    def waiting(self, job: Job, reason: str, since: float) -> None:
        self._link.waiting(job.head, reason, since)

    def _end_unstarted(self, head: Head, refusal: Refusal, received: float, record: Record) -> None:
        """One event and nothing else: the attempt exists only to number it."""
        timing = Timing(received=received, ended=time.time())
        error = error_of(refusal)
        stream = self._link.open(head, announce=False, prompt_tokens=0, record=record)
        stream.end(refusal.terminal, Usage(), timing, error)
        self._metrics.attempt(head, refusal.terminal, Usage(), timing, error)

    # -- completion

    def ended(self, ended: Ended) -> None:
        """Delivery's word that all records of an end are acknowledged (R6)."""
        if ended.kind not in TERMINAL:
            return
        place = Place(ended.topic, ended.partition, ended.offset)
        if self._book.complete(Ticket(place, ended.epoch), ended.status_offset):
            self._scheduler.release(place, stop=ended.kind == "undeliverable")
        self._metrics.ended(ended)

    # -- partitions out

    def abandon(self, lost: set[tuple[str, int]]) -> None:
        """Jobs of these (topic, partition) belong to another worker now: forget them, stop those that run."""
        if not lost:
            return
        stopped = self._scheduler.abandon(lambda job: (job.place.topic, job.place.partition) in lost)
        if stopped:
            log.info("abandoned running=%d partitions=%d", len(stopped), len(lost))

    async def stop(self) -> None:
        for task in list(self._lookups):
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
