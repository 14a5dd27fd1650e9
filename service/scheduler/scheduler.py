"""Which job runs next, and when. Owns the queues between intake and engine; never looks into a job's content.

A job goes queue → window (rendered off the loop, at most `WINDOW` at a time) → running (a task of the runner). It keeps
its claim on the engine until its last event is acknowledged (R10).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from schemas.errors import ErrorCode, Expired, Refusal
from service.engine.protocol import Capacity, EngineLost, Prepared
from service.job import Job, Place
from service.scheduler.admission import Admission, Claim, Prediction
from service.scheduler.fair_queue import FairQueue

log = logging.getLogger(__name__)

# Jobs rendered ahead of their turn: enough to keep the renderer busy, few enough that order stays fair.
WINDOW = 64
# Virtual-time weight of a tier; a standing backlog of all three is served in these proportions.
TIER_WEIGHT = {"interactive": 16.0, "standard": 4.0, "bulk": 1.0}
# Cost of a token, prompt : output (tenancy.md §3).
PROMPT_COST, OUTPUT_COST = 1.0, 8.0
# `waiting` events: the first after, then every (seconds; contract.md §2).
WAITING_FIRST_S, WAITING_EVERY_S = 5.0, 30.0
UNPREPARED = Refusal(ErrorCode.INTERNAL, "the request could not be prepared; the worker's log says why")
# Deadlines are kept to this tolerance (R14), seconds.
TICK_S = 0.25


class Rendering(Protocol):
    """The part of the engine that the scheduler needs."""

    async def prepare(self, job: Job) -> Prepared: ...


class Exits(Protocol):
    """Where a job goes from here."""

    async def run(self, entry: Entry) -> None:
        """Runs the job to its end. The claim is given back later, by `Scheduler.release`."""

    def refuse(self, job: Job, refusal: Refusal) -> None: ...

    def waiting(self, job: Job, reason: str, since: float) -> None: ...


class Alarm(Enum):
    DUE = auto()  # not_before has come
    DEADLINE = auto()
    NOTICE = auto()  # time for a `waiting` event


@dataclass(slots=True)
class Entry:
    """A job on its way through the scheduler."""

    job: Job
    queued: float  # wall clock
    prepared: Prepared | None = None
    priority: int = 0
    claim: Claim | None = None
    admitted: float | None = None
    attempt: int = 0  # attempts made by this worker
    task: asyncio.Task[None] | None = None
    interrupted: bool = False  # stopped for want of memory: it goes back to the queue
    gone: bool = False  # ended, refused or abandoned: alarms that still name it are void


class Scheduler:
    def __init__(self, engine: Rendering, weight: Callable[[str], float]) -> None:
        self.exits: Exits  # set by the app before the start: exits and scheduler know each other
        self._engine = engine
        self._weight = weight
        self._queue: FairQueue[Entry] = FairQueue()
        self._timed: dict[Place, Entry] = {}  # jobs whose not_before lies ahead
        self._alarms: list[tuple[float, int, Alarm, Entry]] = []  # (due, tie-break, what, entry)
        self._window: OrderedDict[Place, Entry] = OrderedDict()  # in turn order; being rendered, or ready
        self._running: dict[Place, Entry] = {}
        self._predictions: dict[str, Prediction] = {}
        self._admission: Admission | None = None
        self._holds: set[str] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._serial = 0

    # -- life cycle

    def start(self, capacity: Capacity, overfill: float, reserve: float) -> None:
        self.resize(capacity, overfill, reserve)
        self._loops = [asyncio.create_task(self._serve()), asyncio.create_task(self._tick())]

    def resize(self, capacity: Capacity, overfill: float, reserve: float) -> None:
        """A rebuilt engine may have another capacity; what runs keeps its claims."""
        fresh = Admission(capacity, overfill, reserve)
        for entry in self._running.values():
            if entry.claim:
                fresh.admit(entry.claim)
        self._admission = fresh

    async def stop(self) -> None:
        """Cancels what is queued or running. Nothing is completed by this: another worker takes it up."""
        tasks = [*self._loops, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, deadline_s: float) -> int:
        """Waits until nothing runs any more, at most `deadline_s` seconds; returns how many still run."""
        if self._running:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), deadline_s)
        return len(self._running)

    def hold(self, reason: str) -> None:
        """No new admissions while any hold is set. Reasons: engine, memory, draining, store."""
        self._holds.add(reason)

    def unhold(self, reason: str) -> None:
        self._holds.discard(reason)
        self._wake.set()

    # -- jobs in

    def put(self, job: Job) -> None:
        now = time.time()
        entry = Entry(job, now)
        if job.head.progress:
            self._alarm(now + WAITING_FIRST_S, Alarm.NOTICE, entry)
        if job.deadline is not None:
            self._alarm(job.deadline, Alarm.DEADLINE, entry)
        if job.not_before is not None and job.not_before > now:
            self._timed[job.place] = entry
            self._alarm(job.not_before, Alarm.DUE, entry)
            return
        self._enqueue(entry)

    def requeue(self, entry: Entry) -> None:
        """Back to the head of the window after the engine was lost: it had its turn already."""
        self.release(entry.job.place)
        entry.prepared = None
        entry.task = None
        entry.gone = entry.interrupted = False
        self._window[entry.job.place] = entry
        self._window.move_to_end(entry.job.place, last=False)
        self._render(entry)

    def _enqueue(self, entry: Entry) -> None:
        job = entry.job
        prediction = self._prediction(job.tenant)
        size = len(job.record.value or b"")
        cost = PROMPT_COST * prediction.expected_prompt(size) + OUTPUT_COST * prediction.expected_output()
        weight = TIER_WEIGHT[job.head.tier] * self._weight(job.tenant)
        self._queue.put((job.head.tier, job.tenant), entry, cost, weight)
        self._wake.set()

    # -- jobs out

    def release(self, place: Place, *, stop: bool = False) -> None:
        """The job's last event is acknowledged: its place at the engine is free. `stop`: nobody reads it any more."""
        entry = self._running.pop(place, None)
        if entry is None:
            return
        if stop and entry.task:
            entry.task.cancel()
        entry.gone = True
        if entry.claim and self._admission:
            self._admission.release(entry.claim)
            entry.claim = None
        if not self._running:
            self._idle.set()
        self._wake.set()

    def learn(self, job: Job, completion_tokens: int, n: int) -> None:
        self._prediction(job.tenant).learn_output(completion_tokens // max(1, n))

    def abandon(self, lost: Callable[[Job], bool]) -> list[Entry]:
        """Forgets jobs whose partition went to another worker; returns those that were running, tasks cancelled."""
        self._take(lambda e: lost(e.job))
        stopped = [e for e in self._running.values() if lost(e.job)]
        for entry in stopped:
            entry.gone = True
            if entry.task:
                entry.task.cancel()
            self.release(entry.job.place)
        return stopped

    def interrupt(self) -> None:
        """Stops every running job; their attempts are abandoned and they run again once holds are lifted (R10)."""
        for entry in list(self._running.values()):
            if entry.task and not entry.interrupted:
                entry.interrupted = True
                entry.task.cancel()

    def _take(self, doomed: Callable[[Entry], bool]) -> list[Entry]:
        """Removes jobs that have not started."""
        taken = self._queue.remove(doomed)
        for waiting in (self._window, self._timed):
            for place in [p for p, e in waiting.items() if doomed(e)]:
                entry = waiting.pop(place)
                if entry.task:
                    entry.task.cancel()
                taken.append(entry)
        for entry in taken:
            entry.gone = True
        return taken

    # -- what an operator sees

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue) + len(self._window) + len(self._timed)

    @property
    def holds(self) -> frozenset[str]:
        return frozenset(self._holds)

    def entries(self) -> Iterable[Entry]:
        yield from self._queue
        yield from self._window.values()
        yield from self._timed.values()
        yield from self._running.values()

    def oldest(self) -> dict[str, float]:
        """Seconds the oldest waiting job of each tier has waited."""
        now, oldest = time.time(), dict.fromkeys(TIER_WEIGHT, 0.0)
        for entry in (*self._queue.heads(), *self._window.values()):
            tier = entry.job.head.tier
            oldest[tier] = max(oldest[tier], now - entry.queued)
        return oldest

    # -- the loop

    async def _serve(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._fill_window()
            self._admit()

    def _fill_window(self) -> None:
        while len(self._window) < WINDOW and len(self._queue):
            popped = self._queue.pop()
            if popped is None:
                return
            entry, start = popped
            entry.priority = int(start)
            self._window[entry.job.place] = entry
            self._render(entry)

    def _render(self, entry: Entry) -> None:
        self._spawn(entry, self._prepare(entry))

    async def _prepare(self, entry: Entry) -> None:
        job = entry.job
        try:
            prepared = await self._engine.prepare(job)
        except Refusal as refusal:
            self._window.pop(job.place, None)
            entry.gone = True
            self.exits.refuse(job, refusal)
        except EngineLost:
            await asyncio.sleep(0.2)  # `hold("engine")` follows; rendering is tried again when the engine is back
            self._render(entry)
            return
        except Exception:
            log.exception("rendering failed job=%s tenant=%s", job.head.job_id, job.tenant)
            self._window.pop(job.place, None)
            entry.gone = True
            self.exits.refuse(job, UNPREPARED)
        else:
            entry.prepared = prepared
            entry.task = None
            self._prediction(job.tenant).learn_prompt(len(job.record.value or b""), prepared.prompt_tokens)
        self._wake.set()

    def _admit(self) -> None:
        if self._holds or self._admission is None:
            return
        for place, entry in list(self._window.items()):
            if entry.prepared is None:
                continue  # still being rendered: the next one goes on
            claim = self._admission.claim(entry.prepared, self._prediction(entry.job.tenant).expected_output())
            if not self._admission.fits(claim):
                return  # wait for this one, else small jobs would overtake a large one for ever
            del self._window[place]
            self._admission.admit(claim)
            entry.claim = claim
            entry.admitted = time.time()
            self._running[place] = entry
            self._spawn(entry, self.exits.run(entry))
        if len(self._queue) and len(self._window) < WINDOW:
            self._wake.set()

    def _spawn(self, entry: Entry, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        entry.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- time

    def _alarm(self, due: float, what: Alarm, entry: Entry) -> None:
        self._serial += 1
        heapq.heappush(self._alarms, (due, self._serial, what, entry))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.run_alarms(time.time())
            self._wake.set()

    def run_alarms(self, now: float) -> None:
        """Everything that is due: timed jobs enter the queue, late ones expire, waiting ones are told."""
        expired: set[Place] = set()
        while self._alarms and self._alarms[0][0] <= now:
            _, _, what, entry = heapq.heappop(self._alarms)
            place = entry.job.place
            if entry.gone or place in self._running:
                continue  # a running job's deadline is the runner's
            if what is Alarm.DEADLINE:
                expired.add(place)
            elif what is Alarm.DUE:
                self._timed.pop(place, None)
                self._enqueue(entry)
            else:
                reason = "not_before" if place in self._timed else "engine" if "engine" in self._holds else "capacity"
                self.exits.waiting(entry.job, reason, entry.queued)
                self._alarm(now + WAITING_EVERY_S, Alarm.NOTICE, entry)
        if expired:
            for entry in self._take(lambda e: e.job.place in expired):
                self.exits.refuse(entry.job, Expired())

    def _prediction(self, tenant: str) -> Prediction:
        prediction = self._predictions.get(tenant)
        if prediction is None:
            if len(self._predictions) > 10_000:  # tenants come and go; what is forgotten is learnt again
                self._predictions.clear()
            prediction = self._predictions[tenant] = Prediction()
        return prediction
