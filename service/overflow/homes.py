"""Jobs of a tenant whose spread has changed: where their earlier copies may be, so that none runs twice.

A job's home is the partition number that the former spread gave it. While copies of that time may be unfinished there
the job goes there too, by `overflow`: what waits, runs or has ended there is then found by the rules of one partition
(R7). Once they have all ended, the home's status records are read into the window, and jobs stay where they lie.

    home is elsewhere ──gate closed──▶ overflow of the home, acknowledged ──▶ complete here
                      └─gate open────▶ stays

A gate opens when everything from before the change, and everything that lay on `overflow` afterwards, has ended by the
group's commits. Whoever was sent home in the meantime is sent there again: an early copy of it may still be waiting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from schemas.keys import job_key, partition_of
from schemas.names import deferred_topic, jobs_topics, overflow_topic, parse_jobs_topic
from schemas.tenants import Tenant
from service.deferred import Transfer, carry
from service.deferred.relay import Publisher
from service.job import Job, Ticket
from service.ledger import Key
from service.overflow.spill import Registry
from service.settings import Settings
from service.topics import JOBS_RETENTION_MS

log = logging.getLogger(__name__)

# Publishers' clocks and the news of the change: so long after it a record may still follow the former spread, seconds.
GRACE_S = 15.0
# Between two looks at how far the home is, seconds: doubling.
LOOK_FIRST_S, LOOK_MOST_S = 0.5, 10.0

Identity = tuple[str, str, int]


class Census(Protocol):
    async def until(self, keys: Iterable[Key], at_ms: int) -> Mapping[Key, int]: ...

    async def ends(self, keys: Iterable[Key]) -> Mapping[Key, int]: ...

    async def passed(self, targets: Mapping[Key, int]) -> bool: ...


class Window(Protocol):
    """The ledger, as far as it is needed here."""

    def owns(self, ticket: Ticket) -> bool: ...

    def starts(self, ticket: Ticket) -> int: ...

    def complete(self, ticket: Ticket) -> bool: ...


class Gate:
    """One home of one tenant, for jobs with a time or for those without: only the former may wait on `deferred`."""

    def __init__(self) -> None:
        self.open = False
        self.looking = False  # jobs of that time have ended; what was sent home since is looked after
        self.sent: set[Identity] = set()  # home before the look that goes on; they may be waiting there
        self.fresh: set[Identity] = set()  # home since that look began
        self.moving: set[asyncio.Task[None]] = set()
        self.task: asyncio.Task[None] | None = None


class Homes:
    """`recall(numbers)`: reads the ends of these status partitions into the window. `stays(job)`: it could not go."""

    def __init__(
        self,
        settings: Settings,
        window: Window,
        relay: Publisher,
        tenants: Registry,
        census: Census,
        recall: Callable[[frozenset[int]], Awaitable[None]],
        stays: Callable[[Job], None],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = settings.pool
        self._partitions = settings.partitions
        self._horizon_s = JOBS_RETENTION_MS / 1000 + settings.duplicates.window_s
        self._window = window
        self._relay = relay
        self._tenants = tenants
        self._census = census
        self._recall = recall
        self._stays = stays
        self._moved = moved
        # Where jobs are published; with tenants' own topics set by the app.
        self.topics: Callable[[], Iterable[str]] = lambda: jobs_topics(settings.pool)
        self._gates: dict[tuple[str, float, int, bool], Gate] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """What has not been moved stays where it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def concerns(self, tenant_id: str) -> bool:
        """Whether jobs of this tenant may have copies on another partition: they must be read whole first."""
        tenant = self._tenants.get(tenant_id)
        return tenant is not None and tenant.former_spread is not None and self._since(tenant) is not None

    def sends(self, job: Job) -> bool:
        """Takes a job that must go home. False: it stays."""
        tenant = self._tenants.get(job.tenant)
        if tenant is None or tenant.former_spread is None or (since := self._since(tenant)) is None:
            return False
        said = parse_jobs_topic(job.place.topic)
        if said is None or job.starts or self._window.starts(job.ticket):
            return False  # on a topic of the service it is at home already; what was started is never published again
        order = job.conversation or job.head.job_id
        home = partition_of(job_key(tenant.id, tenant.former_spread, order), self._partitions)
        if home == job.place.partition:
            return False
        gate = self._gate(tenant, since, home, said.tenant, timed=job.not_before is not None)
        # Jobs in order change only when none is left; they must not pass one another on the way.
        if tenant.order != "none" or (gate.open and job.identity not in gate.sent and job.identity not in gate.fresh):
            return False
        if gate.looking:
            gate.fresh.add(job.identity)
        task = self._spawn(self._move(job, home))
        gate.moving.add(task)
        task.add_done_callback(gate.moving.discard)
        return True

    def _since(self, tenant: Tenant) -> float | None:
        """When its spread changed; None: so long ago that nothing of that time is left."""
        since = tenant.spread_since
        return since.timestamp() if since is not None and time.time() < since.timestamp() + self._horizon_s else None

    async def _move(self, job: Job, home: int) -> None:
        transfer = Transfer.of(job.record, job.head, overflow_topic(self._pool), starts=0, partition=home)
        if await carry(self._relay, transfer, lambda: 1.0 if self._window.owns(job.ticket) else 0.0):
            if self._window.complete(job.ticket):
                self._moved()
        elif self._window.owns(job.ticket):
            self._stays(job)

    # gates

    def _gate(self, tenant: Tenant, since: float, home: int, own: str | None, *, timed: bool) -> Gate:
        key = (tenant.id, since, home, timed)
        gate = self._gates.get(key)
        if gate is None:
            for old in [k for k in self._gates if k[0] == tenant.id and k[1] != since]:  # of a change before this one
                if (task := self._gates.pop(old).task) is not None:
                    task.cancel()
            gate = self._gates[key] = Gate()
        if (gate.task is None or gate.task.done()) and (not gate.open or gate.fresh):
            gate.task = self._spawn(self._watch(gate, since, home, own, timed))
        return gate

    async def _watch(self, gate: Gate, since: float, home: int, own: str | None, timed: bool) -> None:
        """Opens the gate, and goes on until nobody is sent home any more. `own`: whose own topics the jobs lie on."""
        await asyncio.sleep(max(0.0, since + GRACE_S - time.time()))
        jobs = [(topic, home) for topic in self.topics() if (said := parse_jobs_topic(topic)) and said.tenant == own]
        chain = [[(overflow_topic(self._pool), home)], *([[(deferred_topic(self._pool), home)]] if timed else [])]
        await self._passed(lambda: self._census.until(jobs, round((since + GRACE_S) * 1000)))
        gate.looking = True
        while not gate.open or gate.fresh:
            gate.sent, gate.fresh = gate.fresh, set()
            if gate.moving:
                await asyncio.wait(set(gate.moving))
            for keys in chain:  # a job goes from the jobs topics to `overflow`, from there to `deferred`
                await self._passed(lambda keys=keys: self._census.ends(keys))  # type: ignore[misc]
            await self._recall(frozenset({home}))
            gate.sent = set()
            if not gate.open:
                log.info("jobs of the former spread have ended home=%d timed=%s", home, timed)
                gate.open = True

    async def _passed(self, ask: Callable[[], Awaitable[Mapping[Key, int]]]) -> None:
        """Returns when everything is finished before the offsets that `ask` gives, which is asked once."""
        targets: Mapping[Key, int] | None = None
        delay = LOOK_FIRST_S
        while True:
            try:
                if targets is None:
                    targets = await ask()
                if await self._census.passed(targets):
                    return
            except Exception as problem:
                log.warning("how far a former partition is cannot be read yet: %r", problem)
            await asyncio.sleep(delay)
            delay = min(delay * 2, LOOK_MOST_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
