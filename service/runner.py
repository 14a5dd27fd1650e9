"""Runs one admitted job to its end: engine events in, stream frames out. Decides how an attempt ends, and what follows.

One task a job. The engine's loop does nothing here per output but pass a list of deltas on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, cast

from schemas.errors import Cancelled, ErrorCode, Expired, Refusal
from service.engine.protocol import (
    Engine,
    EngineAway,
    EngineFault,
    EngineLost,
    Finished,
    Output,
    Overloaded,
    Prepared,
)
from service.frames import Dead, Delta, Error, Head, Timing, Usage
from service.job import Job, Place, Record
from service.ledger.book import Book
from service.scheduler.scheduler import Entry, Scheduler
from service.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# Attempts after engine-transient errors, the first included.
MAX_ATTEMPTS = 4
# What a job was present at (R11). Two deaths of this worker's engine: it runs alone, so that the one that the engine
# dies of is found. The kill of a whole worker says less of each that ran there: by its unclean starts in all, a job
# runs among suspects that fill a part of the slots, so that hundreds of them take 4 rounds and not hundreds; then it
# runs alone; then not again, for it may be what kills its worker, which leaves nobody to say so.
ALONE_DEATHS = 2
COMPANY = {2: 1 / 4, 3: 1 / 16}
ALONE_STARTS, MAX_STARTS = 4, 5
# Back-off before attempt k + 1: 0.2 s x 4^(k-1), i.e. 0.2, 0.8, 3.2 s, each times 0.5 to 1.5 to spread jobs out.
BACKOFF_S, BACKOFF_FACTOR = 0.2, 4.0
# A cancelled attempt that has not ended by itself after this is taken from the engine (its place is free in 1 s: R13).
CANCEL_S = 0.5
# An attempt ends by itself at its deadline; what is between attempts is ended so much later (tolerance 2 s: R14).
LATE_S = 1.0


class Stream(Protocol):
    @property
    def attempt(self) -> str: ...

    def send(self, deltas: list[Delta]) -> None: ...

    def end(
        self, kind: str, usage: Usage, timing: Timing, error: Error | None = None, dead: Dead | None = None
    ) -> None: ...


class Delivery(Protocol):
    def open(
        self, head: Head, *, announce: bool, prompt_tokens: int, number: int = 1, record: Record | None = None
    ) -> Stream: ...


class Runner:
    """Given to the scheduler as its exit `run`."""

    def __init__(
        self,
        engine: Engine,
        delivery: Delivery,
        scheduler: Scheduler,
        book: Book,
        metrics: Metrics,
        commit: Callable[[], Awaitable[bool]],
    ) -> None:
        self._engine = engine
        self._delivery = delivery
        self._scheduler = scheduler
        self._book = book
        self._metrics = metrics
        self._commit = commit  # stores what the book was told so far
        self._attempts: dict[Place, _Attempt] = {}  # in the engine
        self._cancels: set[asyncio.Task[None]] = set()

    def starts(self, job: Job) -> int:
        """Unclean starts of this job so far, wherever it lay (R11)."""
        return job.starts + self._book.starts(job.ticket)

    def company(self, job: Job, deaths: int = 0) -> float:
        """The part of the slots that suspects may fill beside it; 0: it runs alone. `deaths`: of engines here (R11)."""
        if deaths >= ALONE_DEATHS:
            return 0.0
        starts = self.starts(job)
        return 0.0 if starts >= ALONE_STARTS else COMPANY.get(starts, 1.0)

    def cancel(self, entry: Entry) -> bool:
        """Ends a job that has begun `cancelled`, with what there is of it. False: how it ends is decided already."""
        task = entry.task
        if task is None or task.done() or entry.gone or entry.cancelled:
            return False
        entry.cancelled = True
        stopping = asyncio.create_task(self._stop(task, entry.job.place))
        self._cancels.add(stopping)
        stopping.add_done_callback(self._cancels.discard)
        return True

    async def _stop(self, task: asyncio.Task[None], place: Place) -> None:
        """The job's task has had its first turn when this gets one: cancelled before that, it would end in silence."""
        attempt = self._attempts.get(place)
        if attempt is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CANCEL_S):
                    await self._engine.cancel(attempt.request)
                    await asyncio.wait({task})
        if not task.done():
            task.cancel()

    async def run(self, entry: Entry) -> None:
        """Returns when the job's terminal event is handed to delivery, or when it was given back to the scheduler."""
        timer = asyncio.timeout(None if entry.job.deadline is None else entry.job.deadline - time.time() + LATE_S)
        try:
            async with timer:
                await self._run(entry)
        except TimeoutError:
            if not timer.expired():
                raise
            self._end_between(entry, Expired())
        except asyncio.CancelledError:  # an attempt that was under way has ended by now
            if entry.gone or not (entry.cancelled or entry.interrupted):
                raise
            if entry.cancelled:
                self._end_between(entry, Cancelled())
            else:
                self._scheduler.requeue(entry)

    def _end_between(self, entry: Entry, refusal: Refusal, dead: bool = False) -> None:
        """Ends a job that has its place at the engine and no attempt under way."""
        job, prepared = entry.job, entry.prepared
        assert prepared is not None
        stream = self._delivery.open(
            job.head, announce=False, prompt_tokens=0, number=entry.attempt + 1, record=job.record
        )
        _Attempt(job, entry, stream, prepared, self._metrics).fail(refusal, dead)

    async def _run(self, entry: Entry) -> None:
        job, prepared = entry.job, entry.prepared
        assert prepared is not None
        if (starts := self.starts(job)) >= MAX_STARTS:
            self._end_between(entry, Refusal(ErrorCode.POISON_JOB, _poison(starts)), dead=True)
            return
        self._book.start(job.ticket)
        if self._book.careful(job.ticket):  # it may be what killed its last worker: its start is counted first (R11)
            while not await self._commit():  # a rebalance or an outage is under way
                if not self._book.owns(job.ticket):
                    return
                await asyncio.sleep(BACKOFF_S)
            if not self._book.owns(job.ticket):
                return
        while True:
            entry.attempt += 1
            stream = self._delivery.open(
                job.head,
                announce=True,
                prompt_tokens=prepared.prompt_tokens,
                number=entry.attempt,
                record=job.record,
            )
            attempt = self._attempts[job.place] = _Attempt(job, entry, stream, prepared, self._metrics)
            try:
                if await attempt.run(self._engine):
                    self._scheduler.learn(job, attempt.usage.completion, prepared.n)
                return
            except (EngineFault, EngineLost, Overloaded) as fault:
                lost = isinstance(fault, EngineLost)
                present = lost and not isinstance(fault, EngineAway)
                if present:
                    self._book.crashed(job.ticket)
                    entry.deaths += 1
                if entry.cancelled:
                    attempt.end(Cancelled.terminal)
                    return
                starts = self.starts(job)
                if present and (entry.alone or starts >= MAX_STARTS):
                    attempt.fail(Refusal(ErrorCode.POISON_JOB, _poison(starts)), dead=True)
                    return
                entry.company = self.company(job, entry.deaths)
                entry.faults += not lost
                if entry.faults >= MAX_ATTEMPTS:
                    attempt.fail(Refusal(ErrorCode.ENGINE_FAILED, _engine_failed(entry.faults)), dead=True)
                    return
                attempt.end("abandoned")
                log.warning(
                    "attempt failed job=%s tenant=%s attempt=%s cause=%s",
                    job.head.job_id,
                    job.tenant,
                    entry.attempt,
                    fault,
                )
                if lost:  # rendered again by the rebuilt engine, at the head of the queue
                    self._scheduler.requeue(entry)
                    return
            except asyncio.CancelledError:
                if entry.cancelled and not entry.gone:
                    attempt.end(Cancelled.terminal)
                    return
                attempt.end("abandoned")
                raise
            except Exception:
                log.exception("attempt broke job=%s tenant=%s", job.head.job_id, job.tenant)
                attempt.fail(Refusal(ErrorCode.INTERNAL, "the worker failed on this job; its log says why"), dead=True)
                return
            finally:
                del self._attempts[job.place]
            await asyncio.sleep(BACKOFF_S * BACKOFF_FACTOR ** (entry.faults - 1) * random.uniform(0.5, 1.5))
            try:
                prepared = entry.prepared = await self._engine.prepare(job)  # an engine input is used once
            except Refusal as refusal:
                self._end_between(entry, refusal)
                return
            except EngineLost:
                self._scheduler.requeue(entry)
                return


class _Attempt:
    """One run of the engine for a job, and how it ends."""

    def __init__(self, job: Job, entry: Entry, stream: Stream, prepared: Prepared, metrics: Metrics) -> None:
        self._job = job
        self._entry = entry
        self._stream = stream
        self._prepared = prepared
        self._metrics = metrics
        self.request = stream.attempt  # its name in the engine; the stream's may change (R8)
        self._choices = prepared.n  # not ended
        self._submitted = time.time()
        self._first: float | None = None
        self._last: float | None = None
        self._scheduled: float | None = None
        self.usage = entry.usage = Usage(prompt=prepared.prompt_tokens)  # the scheduler looks at it now and then

    async def run(self, engine: Engine) -> bool:
        """True: it ended well."""
        job = self._job
        timer = asyncio.timeout(None if job.deadline is None else job.deadline - time.time())
        try:
            async with timer:
                await self._consume(engine)
        except TimeoutError:
            if not timer.expired():
                raise
            self.end(Expired.terminal)
        except Refusal as refusal:
            self.fail(refusal)
        else:
            stopped = self._entry.cancelled and self._choices > 0
            self.end(Cancelled.terminal if stopped else "completed")
            return not stopped
        return False

    async def _consume(self, engine: Engine) -> None:
        send, usage = self._stream.send, self.usage
        outputs = cast(
            AsyncGenerator[Output, None],
            engine.run(self._job, self._prepared, self._stream.attempt, self._entry.priority),
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if isinstance(output, Finished):
                    self.usage = self._entry.usage = output.usage
                    self._scheduled = output.scheduled
                    self._first = output.first_token or self._first
                    self._last = output.last_token or self._last
                    continue
                if self._first is None:
                    self._first = time.time()
                    self._entry.first_output()
                for delta in output:
                    usage.completion += delta.tokens
                    if delta.finish_reason is not None:
                        self._choices -= 1
                send(output)

    def fail(self, refusal: Refusal, dead: bool = False) -> None:
        job = self._job
        letter = None
        if dead:
            letter = job.record.dead(
                job.ticket, job.origin, refusal.code, refusal.message, attempts=self._entry.attempt + job.starts
            )
        self.end(refusal.terminal, error_of(refusal), letter)

    def end(self, kind: str, error: Error | None = None, dead: Dead | None = None) -> None:
        now = time.time()
        timing = Timing(
            received=self._job.received,
            admitted=self._entry.admitted,
            submitted=self._submitted,
            scheduled=self._scheduled,
            first_token=self._first,
            last_token=self._last or now,
            ended=now,
        )
        self._stream.end(kind, self.usage, timing, error, dead)
        self._metrics.attempt(self._job.head, kind, self.usage, timing, error)


def error_of(refusal: Refusal) -> Error | None:
    if refusal.terminal != Refusal.terminal:  # expired, cancelled
        return None
    return Error(refusal.code, refusal.message, refusal.retriable)


def _poison(starts: int) -> str:
    return (
        f"an engine or a worker died {starts} times while this job ran; look at the dead letter and the engine's log "
        "before it is replayed"
    )


def _engine_failed(attempts: int) -> str:
    return f"the engine failed this job {attempts} times; publish it again with run + 1, or look at the dead letter"
