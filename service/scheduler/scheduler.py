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
from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from schemas.errors import ErrorCode, Expired, Refusal
from service.engine.protocol import Capacity, EngineLost, Prepared
from service.job import Job, Place, Ticket
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
# Records that wait or run here, bytes; above it no more is read, until half of it has gone. A backlog of large jobs
# stays on the log, not in memory.
MAX_BYTES = 512 * 1024 * 1024
# Deadlines are kept to this tolerance (R14), seconds.
TICK_S = 0.25
DEADLINE_AGAIN_S = 0.5  # a deadline that passed while the job ran is looked at again so often


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
    faults: int = 0  # those that the engine failed
    alone: bool = False  # nothing else may run beside it: an engine may die of it (R11)
    task: asyncio.Task[None] | None = None
    interrupted: bool = False  # stopped for want of memory: it goes back to the queue
    cancelled: bool = False  # stopped because somebody asked for it: it ends (R13)
    gone: bool = False  # ended, refused or abandoned: alarms that still name it are void


class Scheduler:
    def __init__(self, engine: Rendering, weight: Callable[[str], float]) -> None:
        self.exits: Exits  # set by the app before the start: exits and scheduler know each other
        self._engine = engine
        self._weight = weight
        self._queue: FairQueue[Entry] = FairQueue()
        self._timed: dict[Place, Entry] = {}  # jobs whose not_before lies ahead
        self._alarms: list[tuple[float, int, Alarm, Ticket]] = []  # (due, tie-break, what, whose)
        self._entries: dict[Ticket, Entry] = {}  # every job that is here
        self._bytes = 0  # of their records
        self._heavy = False
        self.on_load: Callable[[bool], None] = lambda heavy: None  # the bytes here passed their bound, or fell below
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
                async with asyncio.timeout(deadline_s):
                    await self._idle.wait()
        return len(self._running)

    def hold(self, reason: str) -> None:
        """No new admissions while any hold is set. Reasons: engine, memory, draining."""
        self._holds.add(reason)

    def unhold(self, reason: str) -> None:
        self._holds.discard(reason)
        self._wake.set()

    # -- jobs in

    def put(self, job: Job, *, alone: bool = False) -> None:
        """`alone`: nothing may run beside it (R11)."""
        now = time.time()
        entry = Entry(job, now, alone=alone)
        self._keep(entry)
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
        self.release(entry.job.ticket)
        entry.prepared = None
        entry.task = None
        entry.gone = entry.interrupted = False
        self._keep(entry)
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

    def release(self, ticket: Ticket, *, stop: bool = False) -> None:
        """The job's last event is acknowledged: its place at the engine is free. `stop`: nobody reads it any more."""
        entry = self._running.get(ticket.place)
        if entry is None or entry.job.ticket != ticket:
            return
        del self._running[ticket.place]
        if stop and entry.task:
            entry.task.cancel()
        self._forget(entry)
        if entry.claim and self._admission:
            self._admission.release(entry.claim)
            entry.claim = None
        if not self._running:
            self._idle.set()
        self._wake.set()

    def _keep(self, entry: Entry) -> None:
        self._entries[entry.job.ticket] = entry
        self._bytes += entry.job.size
        if not self._heavy and self._bytes > MAX_BYTES:
            self._heavy = True
            self.on_load(True)

    def _forget(self, entry: Entry) -> None:
        entry.gone = True
        if self._entries.pop(entry.job.ticket, None) is None:
            return
        self._bytes -= entry.job.size
        if self._heavy and self._bytes < MAX_BYTES // 2:
            self._heavy = False
            self.on_load(False)

    def learn(self, job: Job, completion_tokens: int, n: int) -> None:
        self._prediction(job.tenant).learn_output(completion_tokens // max(1, n))

    def abandon(self, lost: Callable[[Job], bool]) -> list[Entry]:
        """Forgets jobs whose partition went to another worker; returns those that were running, tasks cancelled."""
        self._take(lambda e: lost(e.job))
        stopped = [e for e in self._running.values() if lost(e.job)]
        for entry in stopped:
            if entry.task:
                entry.task.cancel()
            self.release(entry.job.ticket)
        return stopped

    def take(self, places: Set[Place]) -> list[Job]:
        """Takes out those of these jobs that have not begun: they end elsewhere."""
        return [entry.job for entry in self._take(lambda e: e.job.place in places)]

    def begun(self, place: Place) -> Entry | None:
        """The job there, if it holds a place at the engine."""
        return self._running.get(place)

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
            self._forget(entry)
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
            self._forget(entry)
            self.exits.refuse(job, refusal)
        except (EngineLost, asyncio.CancelledError) as lost:
            # A rendering dies with its engine: EngineLost, or the engine's own cancellation; ours goes on.
            task = asyncio.current_task()
            if isinstance(lost, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            await asyncio.sleep(0.2)  # `hold("engine")` follows; rendering is tried again when the engine is back
            self._render(entry)
            return
        except Exception:
            log.exception("rendering failed job=%s tenant=%s", job.head.job_id, job.tenant)
            self._window.pop(job.place, None)
            self._forget(entry)
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
            if self._running and (entry.alone or next(iter(self._running.values())).alone):
                return  # one that runs alone is the first and the only one
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
        task.add_done_callback(lambda task: self._died(entry, task))

    def _died(self, entry: Entry, task: asyncio.Task[None]) -> None:
        """The net: a task that raised would leave its job here for ever."""
        if task.cancelled() or (problem := task.exception()) is None or entry.gone or entry.task is not task:
            return
        log.error("job's task failed job=%s tenant=%s", entry.job.head.job_id, entry.job.tenant, exc_info=problem)
        self._window.pop(entry.job.place, None)
        self.release(entry.job.ticket)
        self._forget(entry)
        self.exits.refuse(entry.job, UNPREPARED)

    # -- time

    def _alarm(self, due: float, what: Alarm, entry: Entry) -> None:
        self._serial += 1
        heapq.heappush(self._alarms, (due, self._serial, what, entry.job.ticket))
        if len(self._alarms) > 1024 and len(self._alarms) > 4 * len(self._entries):  # of jobs that ended long before
            self._alarms = [alarm for alarm in self._alarms if alarm[3] in self._entries]
            heapq.heapify(self._alarms)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.run_alarms(time.time())
            self._wake.set()

    def run_alarms(self, now: float) -> None:
        """Everything that is due: timed jobs enter the queue, late ones expire, waiting ones are told."""
        expired: set[Place] = set()
        while self._alarms and self._alarms[0][0] <= now:
            _, _, what, ticket = heapq.heappop(self._alarms)
            entry = self._entries.get(ticket)
            if entry is None:
                continue
            place = ticket.place
            if place in self._running:  # a running job's deadline is the runner's, unless it comes back from there
                if what is Alarm.DEADLINE:
                    self._alarm(now + DEADLINE_AGAIN_S, what, entry)
                continue
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
