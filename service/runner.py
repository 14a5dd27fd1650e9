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

from schemas.errors import ErrorCode, Expired, Refusal
from service.engine.protocol import Engine, EngineFault, EngineLost, Finished, Output, Overloaded, Prepared
from service.frames import Dead, Delta, Error, Head, Timing, Usage
from service.job import Job, Record
from service.ledger.book import Book
from service.scheduler.scheduler import Entry, Scheduler
from service.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# Attempts after engine-transient errors, the first included.
MAX_ATTEMPTS = 4
# Back-off before attempt k + 1: 0.2 s x 4^(k-1), i.e. 0.2, 0.8, 3.2 s, each times 0.5 to 1.5 to spread jobs out.
BACKOFF_S, BACKOFF_FACTOR = 0.2, 4.0


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

    async def run(self, entry: Entry) -> None:
        """Returns when the job's terminal event is handed to delivery, or when it was given back to the scheduler."""
        job, prepared = entry.job, entry.prepared
        assert prepared is not None
        self._book.start(job.ticket)
        if self._book.careful(job.ticket):  # it may be what killed its last worker: its start is counted first (R11)
            await self._commit()
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
            attempt = _Attempt(job, entry, stream, prepared, self._metrics)
            try:
                await attempt.run(self._engine)
                self._scheduler.learn(job, attempt.usage.completion, prepared.n)
                return
            except (EngineFault, EngineLost, Overloaded) as fault:
                lost = isinstance(fault, EngineLost)
                if lost:
                    self._book.crashed(job.ticket)
                if entry.attempt >= MAX_ATTEMPTS:
                    attempt.fail(Refusal(ErrorCode.ENGINE_FAILED, _engine_failed(entry.attempt)), dead=True)
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
                attempt.end("abandoned")
                if not entry.interrupted:
                    raise
                self._scheduler.requeue(entry)
                return
            except Exception:
                log.exception("attempt broke job=%s tenant=%s", job.head.job_id, job.tenant)
                attempt.fail(Refusal(ErrorCode.INTERNAL, "the worker failed on this job; its log says why"), dead=True)
                return
            await asyncio.sleep(BACKOFF_S * BACKOFF_FACTOR ** (entry.attempt - 1) * random.uniform(0.5, 1.5))
            try:
                prepared = entry.prepared = await self._engine.prepare(job)  # an engine input is used once
            except Refusal as refusal:
                stream = self._delivery.open(
                    job.head, announce=False, prompt_tokens=0, number=entry.attempt + 1, record=job.record
                )
                _Attempt(job, entry, stream, prepared, self._metrics).fail(refusal)
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
        self._submitted = time.time()
        self._first: float | None = None
        self._last: float | None = None
        self._scheduled: float | None = None
        self.usage = Usage(prompt=prepared.prompt_tokens)

    async def run(self, engine: Engine) -> None:
        job = self._job
        left = None if job.deadline is None else job.deadline - time.time()
        try:
            async with asyncio.timeout(left):
                await self._consume(engine)
        except TimeoutError:
            self.end(Expired.terminal)
        except Refusal as refusal:
            self.fail(refusal)
        else:
            self.end("completed")

    async def _consume(self, engine: Engine) -> None:
        send, usage = self._stream.send, self.usage
        outputs = cast(
            AsyncGenerator[Output, None],
            engine.run(self._job, self._prepared, self._stream.attempt, self._entry.priority),
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if isinstance(output, Finished):
                    self.usage = output.usage
                    self._scheduled = output.scheduled
                    self._first = output.first_token or self._first
                    self._last = output.last_token or self._last
                    continue
                if self._first is None:
                    self._first = time.time()
                for delta in output:
                    usage.completion += delta.tokens
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
    if refusal.terminal == Expired.terminal:
        return None
    return Error(refusal.code, refusal.message, refusal.retriable)


def _engine_failed(attempts: int) -> str:
    return f"the engine failed this job {attempts} times; publish it again with run + 1, or look at the dead letter"
