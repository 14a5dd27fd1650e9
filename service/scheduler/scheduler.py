"""Which job runs next, and when. Owns the way between intake and engine; who comes first is decided in `turns.py`.

A job goes queue → window (rendered off the loop, some at a time) → running (a task of the runner). It keeps its claim
on the engine until its last event is acknowledged (R10).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Set
from typing import Any, Protocol

from schemas.cancellation import is_asked_for
from schemas.errors import ErrorCode, Expired, Refusal
from schemas.tenants import Tenant
from service.engine.protocol import Capacity, EngineLost, Prepared
from service.job import Job, Place, Ticket
from service.scheduler.admission import Admission
from service.scheduler.alarms import Alarm, Alarms
from service.scheduler.census import Census, reason
from service.scheduler.entry import Entry, Stage
from service.scheduler.quota import check_queue, check_room
from service.scheduler.roster import Roster
from service.scheduler.turns import WINDOW, Turns
from service.settings import SchedulerSettings

log = logging.getLogger(__name__)

# `waiting` events: the first after, then every (seconds; contract.md §2).
WAITING_FIRST_S, WAITING_EVERY_S = 5.0, 30.0
UNPREPARED = Refusal(ErrorCode.INTERNAL, "the request could not be prepared; the worker's log says why")
# Deadlines are kept to this tolerance (R14), rates and growth are looked at so often, seconds.
TICK_S = 0.25
DEADLINE_AGAIN_S = 0.5  # a deadline that passed while the job ran is looked at again so often
RENDER_AGAIN_S = 0.2  # rendering is tried again so often while the engine is away


class Rendering(Protocol):
    """The part of the engine that the scheduler needs."""

    async def prepare(self, job: Job) -> Prepared: ...


class Exits(Protocol):
    """Where a job goes from here."""

    async def run(self, entry: Entry) -> None:
        """Runs the job to its end. The claim is given back later, by `Scheduler.release`."""

    def refuse(self, job: Job, refusal: Refusal) -> None: ...

    def waiting(self, job: Job, reason: str, since: float) -> None: ...


class Scheduler:
    """`tenant(id)`: its entry in the registry, asked whenever a decision falls. `kv_usage()`: share of the KV cache in
    use, 0 to 1; without it, what running jobs share counts as often as they claim it."""

    def __init__(
        self,
        engine: Rendering,
        tenant: Callable[[str], Tenant | None] = lambda tenant: None,
        settings: SchedulerSettings | None = None,
        kv_usage: Callable[[], float] | None = None,
    ) -> None:
        self.exits: Exits  # set by the app before the start: exits and scheduler know each other
        self.on_load: Callable[[bool], None] = lambda heavy: None  # the bytes here passed their bound, or fell below
        self.seconds = 0.0  # spent here, of the event loop's time
        self._engine = engine
        self._tenant = tenant
        self._kv_usage = kv_usage
        self._turns = Turns(tenant, settings or SchedulerSettings())
        self._roster = Roster(lambda heavy: self.on_load(heavy))
        self._alarms = Alarms(self._roster.has)
        self.census = Census(self._roster, self._turns)
        self._holds: set[str] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []

    # -- life cycle

    def start(self, capacity: Capacity, reserved: int = 0, reserve: float = 0.0) -> None:
        """`reserved`: slots, `reserve`: share of the KV cache that only serve the urgent (service/engine/bounds.py)."""
        if not self._turns.fair:
            log.warning("HEADRACE_SCHEDULER__POLICY is fifo: no shares, no reserve, no rates; for measurements only")
        self.resize(capacity, reserved, reserve)
        self._loops = [asyncio.create_task(self._serve()), asyncio.create_task(self._tick())]

    def resize(self, capacity: Capacity, reserved: int = 0, reserve: float = 0.0) -> None:
        """A rebuilt engine may have another capacity; what runs keeps its claims."""
        self._turns.resize(Admission(capacity, reserved, reserve))

    async def stop(self) -> None:
        """Cancels what is queued or running. Nothing is completed by this: another worker takes it up."""
        tasks = [*self._loops, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, deadline_s: float) -> int:
        """Waits until nothing runs any more, at most `deadline_s` seconds; returns how many still run."""
        if self._turns.running:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._idle.wait()
        return len(self._turns.running)

    def hold(self, reason: str) -> None:
        """No new admissions while any hold is set. Reasons: engine, memory, store, draining."""
        self._holds.add(reason)
        self._turns.clock.hold(time.monotonic())

    def unhold(self, reason: str) -> None:
        self._holds.discard(reason)
        if not self._holds:
            self._turns.clock.unhold(time.monotonic())
        self._wake.set()

    # -- jobs in

    def put(self, job: Job, *, company: float = 1.0, returning: bool = False) -> None:
        """Refuses it at once if its tenant has too many waiting; not one that is `returning`, which waited here before.

        `company`: less than 1 for a suspect (R11), see Entry.
        """
        began = time.monotonic()
        entry = Entry(job, time.time(), company=company, on_first=self._turns.begin)
        try:
            found = self._tenant(job.tenant)
            if found is not None and not returning and not _spilled(job):
                check_queue(found.limits, self.queued_of(job.tenant))
        except Refusal as refusal:
            self.exits.refuse(job, refusal)
            return
        self._roster.add(entry)
        self._turns.arrive(entry, began)
        if job.head.progress:
            self._alarm(entry.queued + WAITING_FIRST_S, Alarm.NOTICE, entry)
        if job.deadline is not None:
            self._alarm(job.deadline, Alarm.DEADLINE, entry)
        if job.not_before is not None and job.not_before > entry.queued:
            self._alarm(job.not_before, Alarm.DUE, entry)
        else:
            self._turns.put(entry, began)
            self._wake.set()
        self.seconds += time.monotonic() - began

    def requeue(self, entry: Entry) -> None:
        """Back to the head of the window after the engine was lost: it had its turn already."""
        if entry.stage is not Stage.RUNNING:
            return
        self._turns.requeue(entry, time.monotonic())
        entry.prepared = None
        entry.task = None
        entry.interrupted = False
        self._render(entry)

    def order_ready(self, ready: Callable[[Job], bool]) -> None:
        """`ready(job)`: no earlier record of its key is still on its way through intake. For ordered tenants."""
        self._turns.order.ready = lambda entry: ready(entry.job)

    def order_moved(self) -> None:
        """Intake is done with a record that others of its key may have waited for."""
        self._turns.retry(time.monotonic())
        self._wake.set()

    # -- jobs out

    def release(self, ticket: Ticket, *, stop: bool = False) -> None:
        """The job's last event is acknowledged: its place at the engine is free. `stop`: nobody reads it any more."""
        entry = self._turns.running.get(ticket.place)
        if entry is None or entry.job.ticket != ticket:
            return
        began = time.monotonic()
        if stop and entry.task:
            entry.task.cancel()
        self._roster.drop(entry)
        self._turns.release(entry, began)
        if not self._turns.running:
            self._idle.set()
        self._wake.set()
        self.seconds += time.monotonic() - began

    def learn(self, job: Job, completion_tokens: int, n: int) -> None:
        self._turns.learn(job, completion_tokens, n, time.monotonic())

    def abandon(self, lost: Callable[[Job], bool]) -> list[Entry]:
        """Forgets jobs whose partition went to another worker; returns those that were running, tasks cancelled."""
        gone = [entry for entry in self._roster if lost(entry.job)]
        stopped = [entry for entry in gone if entry.stage is Stage.RUNNING]
        for entry in gone:
            if entry.stage is not Stage.RUNNING:
                self._remove(entry)
        for entry in stopped:
            if entry.task:
                entry.task.cancel()
            self.release(entry.job.ticket)
        self._wake.set()
        return stopped

    def take(self, places: Set[Place]) -> list[Job]:
        """Takes out those of these jobs that have not begun: they end elsewhere."""
        taken = []
        for place in places:
            entry = self._roster.at(place)
            if entry is not None and entry.stage is not Stage.RUNNING:
                self._remove(entry)
                taken.append(entry.job)
        if taken:
            self._wake.set()
        return taken

    def begun(self, place: Place) -> Entry | None:
        """The job there, if it holds a place at the engine."""
        return self._turns.running.get(place)

    def interrupt(self) -> None:
        """Stops every running job; their attempts are abandoned and they run again once holds are lifted (R10)."""
        for entry in list(self._turns.running.values()):
            if entry.task and not entry.interrupted:
                entry.interrupted = True
                # Not before the task's first turn: it would end in silence, and nobody would give its place back.
                asyncio.get_running_loop().call_soon(entry.task.cancel)

    # -- what an operator sees

    def queued_of(self, tenant: str) -> int:
        """Jobs of a tenant that wait here."""
        account = self._turns.accounts.find(tenant)
        return account.queued if account is not None else 0

    @property
    def running(self) -> int:
        return len(self._turns.running)

    @property
    def queued(self) -> int:
        return len(self._roster) - len(self._turns.running)

    @property
    def holds(self) -> frozenset[str]:
        return frozenset(self._holds)

    def entries(self) -> Iterable[Entry]:
        return iter(self._roster)

    # -- the loop

    async def _serve(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                self._turn(time.monotonic())
            except Exception:
                log.exception("a turn of the scheduler failed")

    def _turn(self, now: float) -> None:
        if not self._holds:
            for entry in self._turns.admit(now):
                entry.admitted = time.time()
                self._spawn(entry, self.exits.run(entry))
        for entry in self._turns.fill(now):
            self._render(entry)
        self.seconds += time.monotonic() - now

    def _render(self, entry: Entry) -> None:
        self._spawn(entry, self._prepare(entry))

    async def _prepare(self, entry: Entry) -> None:
        job = entry.job
        try:
            prepared = await self._engine.prepare(job)
            found = self._tenant(job.tenant)
            if found is not None:  # only now it is known how long the prompt is
                check_room(found.limits, prepared.prompt_tokens, prepared.n)
        except Refusal as refusal:
            entry.task = None
            self._refuse(entry, refusal)
        except (EngineLost, asyncio.CancelledError) as lost:
            # A rendering dies with its engine: EngineLost, or the engine's own cancellation; ours goes on.
            if isinstance(lost, asyncio.CancelledError) and is_asked_for():
                raise
            await asyncio.sleep(RENDER_AGAIN_S)  # `hold("engine")` follows; tried again when the engine is back
            if not entry.gone:
                self._render(entry)
            return
        except Exception:
            log.exception("rendering failed job=%s tenant=%s", job.head.job_id, job.tenant)
            entry.task = None
            self._refuse(entry, UNPREPARED)
        else:
            if entry.gone:
                return
            entry.prepared = prepared
            entry.task = None
            self._turns.meter.rendered(entry)
        self._wake.set()

    def _refuse(self, entry: Entry, refusal: Refusal) -> None:
        self._remove(entry)
        self.exits.refuse(entry.job, refusal)

    def _spawn(self, entry: Entry, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        entry.task = task
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._over(entry, task))

    def _over(self, entry: Entry, task: asyncio.Task[None]) -> None:
        """The net: a task that raised would leave its job here for ever."""
        self._tasks.discard(task)
        if task.cancelled() or (problem := task.exception()) is None or entry.gone or entry.task is not task:
            return
        log.error("job's task failed job=%s tenant=%s", entry.job.head.job_id, entry.job.tenant, exc_info=problem)
        if entry.stage is Stage.RUNNING:
            self.release(entry.job.ticket)
        else:
            self._remove(entry)
        self.exits.refuse(entry.job, UNPREPARED)

    def _remove(self, entry: Entry) -> None:
        """One that has not started goes away."""
        if entry.task is not None:
            entry.task.cancel()
        self._roster.drop(entry)
        self._turns.remove(entry, time.monotonic())

    # -- time

    def _alarm(self, due: float, what: Alarm, entry: Entry) -> None:
        self._alarms.set(due, what, entry.job.ticket, len(self._roster))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.run_alarms(time.time())
                began = time.monotonic()
                self._turns.survey(began, self._kv_usage() if self._kv_usage is not None else None)
                self.seconds += time.monotonic() - began
            except Exception:
                log.exception("a tick of the scheduler failed")
            self._wake.set()

    def run_alarms(self, now: float) -> None:
        """Everything that is due: timed jobs enter the queue, late ones expire, waiting ones are told."""
        for what, ticket in self._alarms.ring(now):
            entry = self._roster.at(ticket.place)
            assert entry is not None
            if entry.stage is Stage.RUNNING:  # its deadline is the runner's, unless it comes back from there
                if what is Alarm.DEADLINE:
                    self._alarm(now + DEADLINE_AGAIN_S, what, entry)
            elif what is Alarm.DEADLINE:
                self._refuse(entry, Expired())
            elif what is Alarm.DUE:
                self._turns.put(entry, time.monotonic())
            else:
                self.exits.waiting(entry.job, reason(entry, self.holds), entry.queued)
                self._alarm(now + WAITING_EVERY_S, Alarm.NOTICE, entry)
        self._wake.set()


def _spilled(job: Job) -> bool:
    """It was accepted before, and lay on `overflow` since."""
    return job.place.topic.rpartition(".")[2] == "overflow"


__all__ = ["WAITING_FIRST_S", "WINDOW", "Entry", "Exits", "Rendering", "Scheduler"]
