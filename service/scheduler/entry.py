"""A job on its way through the scheduler: where it is, and what it holds there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from service.engine.protocol import Prepared
from service.frames import Usage
from service.job import Job
from service.scheduler.admission import Claim
from service.scheduler.demand import Demand
from service.scheduler.fair_queue import Flow
from service.scheduler.order import Key
from service.scheduler.quota import Account


class Stage(Enum):
    TIMED = auto()  # its not_before lies ahead
    BEHIND = auto()  # another job of its order key must end first
    QUEUED = auto()
    PICKED = auto()  # being rendered, or rendered and waiting for its place
    RUNNING = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class Entry:
    job: Job
    queued: float  # wall clock
    prepared: Prepared | None = None
    priority: int = 0  # at the engine; the lower goes first
    claim: Claim | None = None
    admitted: float | None = None  # wall clock
    attempt: int = 0  # attempts made by this worker
    faults: int = 0  # those that the engine failed
    deaths: int = 0  # of an engine of this worker's, with this job in it
    company: float = 1.0  # part of the slots that suspects may fill while it is one of them; 0 = it runs alone (R11)
    task: asyncio.Task[None] | None = None
    interrupted: bool = False  # stopped for want of memory: it goes back to the queue
    cancelled: bool = False  # stopped because somebody asked for it: it ends (R13)
    gone: bool = False  # ended, refused or abandoned: alarms that still name it are void
    usage: Usage | None = None  # of the attempt under way, counted by the runner as tokens come
    on_first: Callable[[Entry], None] | None = None

    # the turns' own
    stage: Stage = Stage.TIMED
    number: int = 0  # in order of arrival
    tier: str = ""
    demand: Demand = Demand()  # noqa: RUF009 (a tuple)
    account: Account | None = None
    order: Key | None = None  # the key it holds, or waits for
    flow: Flow[Entry] | None = None
    seat: tuple[int, float, int] | None = None  # its place in the window
    start: float = 0.0  # start tag in its tier
    root: float = 0.0  # its tier's tag when it was admitted
    cost: float = 0.0  # cost tokens it was charged
    output: int = 0  # of them so much output, tokens
    expected: int = 0  # tokens it is expected to claim; while it is picked
    metered: int = 0  # tokens taken from the tenant's rate
    begun: bool = False  # the engine works on it, or did
    parked: bool = False  # picked, and kept back by a limit of its tenant
    aged: bool = False  # it went out of turn, because its tenant had waited too long

    @property
    def suspect(self) -> bool:
        """An engine or a worker may die of it (R11)."""
        return self.company < 1

    @property
    def alone(self) -> bool:
        """Nothing else may run beside it."""
        return not self.company

    def crowded(self, running: Iterable[Entry], slots: int) -> bool:
        """Whether this suspect must wait until there are fewer of them in the engine."""
        return self.suspect and sum(other.suspect for other in running) >= max(1, int(self.company * slots))

    def first_output(self) -> None:
        """The engine has begun with it."""
        if not self.begun:
            self.begun = True
            if self.on_first is not None:
                self.on_first(self)
