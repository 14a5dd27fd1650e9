"""The worker: wires the rooms together, starts them in order, takes them down in order (R19). Holds no rules itself.

Start: topics checked → delivery process → registry read → engine → cancels read → group joined. The group is joined
last, so that no other member waits for an engine that is still loading. Stop: no new jobs → running ones drain → clean
final commit → all closed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from consumers.cancels import CancelReader
from consumers.follower import Follower
from consumers.jobs import JobsConsumer
from consumers.namesakes import Namesakes
from consumers.tenant_topics import TenantTopics
from schemas import names
from service import cards, topics
from service.delivery.link import Link
from service.engine import bounds
from service.engine import build as build_engine
from service.engine.protocol import EngineState
from service.engine.supervisor import Supervisor
from service.frames import Ended, Pressure
from service.health import Condition, HealthServer
from service.intake.bounds import Bounds
from service.intake.intake import Intake
from service.intake.topics import KafkaReplyTopics
from service.ledger.book import Book
from service.models import Models
from service.reception import Reception
from service.runner import Runner
from service.scheduler.scheduler import Scheduler
from service.settings import Settings
from service.store import Store
from service.telemetry.metrics import Metrics, Readings
from service.tenants import Tenants

log = logging.getLogger(__name__)

# Longest wait when the worker stops, after the drain, seconds: for any one part, and for all of them together. What is
# left when that time is over gets only the last one. Shutdown never hangs (R19).
PART_STOP_S, PARTS_STOP_S, LATE_PART_S = 15.0, 35.0, 0.2


class EngineGone(Exception):
    """The engine could not be rebuilt; the process must be replaced."""


class Superseded(Exception):
    """Another process has taken over this one's static member id."""


class Worker:
    """One worker process. `run` returns after a drain; `start` and `stop` are for tests and benchmarks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings)
        self.tenants = Tenants(settings)
        self.registry = Follower(
            settings.kafka, names.TENANTS, lambda records: self.tenants.take((r.key, r.value) for r in records)
        )
        self.store = Store(settings.store)
        self.link = Link(settings, on_ended=self._ended, on_pressure=self._pressure)
        self.engine = Supervisor(
            lambda: build_engine(settings, self.tenants.salt), settings.engine, self._engine_changed
        )
        self.book = Book.of(settings)
        self.reply_topics = KafkaReplyTopics(settings.kafka)
        self.models = Models()
        self.model_registry = Follower(
            settings.kafka, names.MODELS, lambda records: self.models.take((r.key, r.value) for r in records)
        )
        self.intake = Intake(settings, self.tenants, self.reply_topics, self.store, registry=self.models)
        self.scheduler = Scheduler(
            Bounds(self.engine, self.tenants),
            self.tenants.get,
            settings.scheduler,
            lambda: self.engine.stats().kv_usage,
        )
        self.runner = Runner(
            self.engine, self.link, self.scheduler, self.book, self.metrics, lambda: self.consumer.committer.flush()
        )
        self.reception = Reception(
            self.intake, self.scheduler, self.runner, self.link, self.book, self.metrics, settings, self.tenants
        )
        self.scheduler.exits = self.reception
        self.scheduler.on_load = self._loaded
        self.consumer = JobsConsumer(
            settings, self.book, self.reception, self.link, topics=names.consumed_topics(settings.pool)
        )
        self.own_topics = TenantTopics(settings, lambda: (t.id for t in self.tenants), self.consumer.extend)
        self.reception.homes.topics = lambda: (*names.jobs_topics(settings.pool), *self.own_topics.jobs)
        self.cancels = CancelReader(
            settings.kafka,
            self.reception.cancel,
            credentials=self.intake.credentials,
            doubted=self.reception.disbelieve,
            more=lambda: self.own_topics.cancels,
        )
        self.namesakes = Namesakes(settings, self._superseded) if settings.kafka.instance else None
        self.consumer.recall = self.reception.copies.recall
        self.health = HealthServer(settings, self, self.metrics)
        self.draining = False
        self._serving = False
        self._stop = asyncio.Event()
        self._stop_by = 0.0  # monotonic; when all parts must have closed
        self._following: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._on_stopping: Callable[[], None] | None = None

    # -- life cycle

    async def start(self) -> None:
        """Raises what a part refuses (topics, engine, broker, address); nothing is left running then."""
        self._warn_of_defaults()
        try:
            await self.health.start()
            log.info("listening url=%s", self.health.url)
            self._show_card()
            retention_s = await self._topics_at_once()
            await self.link.start()
            self.intake.jobs_retention_s = retention_s or await topics.require(self.settings)
            if self.tenants.follows_topic:
                await self.registry.start()
                self.tenants.opened()
            await self.model_registry.start()
            await self.reply_topics.start()
            if self.settings.identity == "topic":
                await self.own_topics.start()
                await self.consumer.extend(self.own_topics.jobs)
            capacity = await self.engine.start()
            engine = self.settings.engine
            self.scheduler.start(capacity, bounds.reserved(engine), engine.reserve)
            self._following = asyncio.create_task(self.tenants.follow(), name="tenants")
            self.reception.copies.start()
            await self.reception.deferral.start()
            self.reception.spill.start()
            await self.cancels.start()  # a job that was cancelled must not run in the meantime (R13)
            if self.namesakes is not None:
                await self.namesakes.start()
            gc.collect()
            gc.freeze()  # what is loaded now stays: collections that walk it cost a tenth of the worker's time
            await self.consumer.start()
            if self.settings.identity == "topic":
                self.own_topics.follow()
        except BaseException:
            await self.stop(drain_s=0.0)
            raise
        log.info(
            "ready model=%s kv_tokens=%d max_num_seqs=%d", capacity.model, capacity.kv_tokens, capacity.max_num_seqs
        )

    async def _topics_at_once(self) -> float | None:
        """Missing topics are told before the delivery process waits for them. None: the broker is not there yet, which
        the delivery process waits for too. Raises TopicsRefused.
        """
        try:
            return await topics.require(self.settings)
        except topics.BrokerUnreachable:
            return None

    def _show_card(self) -> None:
        try:
            cards.write(self.settings.state_dir, cards.Card.of(self.settings, self.health.url))
        except OSError as problem:
            log.warning("`headrace status` will not show this worker error=%s", problem)

    def _warn_of_defaults(self) -> None:
        """What suits a developer's machine and nobody else's."""
        settings = self.settings
        if settings.kafka.bootstrap.startswith(("127.", "localhost", "[::1]")):
            return
        if settings.cache_secret == Settings.model_fields["cache_secret"].default:
            log.warning("HEADRACE_CACHE_SECRET is the development default: set a secret of your own")

    async def run(
        self, on_ready: Callable[[Worker], None] | None = None, on_stopping: Callable[[], None] | None = None
    ) -> None:
        """Serves until SIGTERM or SIGINT, then drains. Raises EngineGone (the engine is beyond repair), Superseded."""
        self._on_stopping = on_stopping
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        starting = asyncio.create_task(self.start())
        asked = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():  # a signal while the engine loads: starting is undone
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
            else:
                await starting
                self._serving = True
                if on_ready is not None:
                    on_ready(self)
                await asked
                # Who is superseded has no right to its partitions any more: nothing is waited for.
                await self.stop(0.0 if isinstance(self._failure, Superseded) else self.settings.drain_s)
        finally:
            asked.cancel()
        if self._failure is not None:
            raise self._failure

    async def stop(self, drain_s: float) -> None:
        """Drains for up to `drain_s` seconds, gives the rest back to the group, closes every part within a bound."""
        began = time.monotonic()
        self.draining = True
        if self._serving:
            log.info("draining running=%d seconds=%g", self.scheduler.running, drain_s)
        self.scheduler.hold("draining")
        self.consumer.pause_all("draining")
        left = await self.scheduler.drain(drain_s)
        self._stop_by = time.monotonic() + PARTS_STOP_S
        if left:
            log.warning("drain time is over running=%d: they are given back and run elsewhere", left)
        await self._part("scheduler", self.scheduler.stop())
        await self._part("own topics", self.own_topics.stop())
        await self._part("cancels", self.cancels.stop())
        if self.namesakes is not None:
            await self._part("namesakes", self.namesakes.stop())
        await self._part("registry", self.registry.stop())
        await self._part("model registry", self.model_registry.stop())
        await self._part("intake", self.reception.stop())
        await self._part("link", self.link.flush(PART_STOP_S / 3))
        await self._part("consumer", self.consumer.stop(clean=True))
        await self._part("delivery", self.link.stop(PART_STOP_S / 3))
        await self._part("reply topics", self.reply_topics.stop())
        await self._part("engine", self.engine.close())
        await self._part("health", self.health.stop())
        self.store.close()
        cards.remove(self.settings.state_dir, self.settings.worker, os.getpid())
        if self._following is not None:
            self._following.cancel()
        log.info("stopped given_back=%d seconds=%.1f", left, time.monotonic() - began)

    async def _part(self, name: str, stopping: Awaitable[Any]) -> None:
        """Each part in a task of its own: with the broker away a stop may hang or raise CancelledError (R19)."""
        task = asyncio.ensure_future(stopping)
        seconds = max(LATE_PART_S, min(PART_STOP_S, self._stop_by - time.monotonic()))
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            task.cancel()
            log.error("part did not stop in time part=%s seconds=%.1f", name, seconds)
        elif not task.cancelled() and (problem := task.exception()):
            log.error("part failed to stop part=%s error=%s", name, problem)

    def _asked_to_stop(self) -> None:
        if self._on_stopping is not None and not self._stop.is_set():
            self._on_stopping()
        self.draining = True
        self._stop.set()

    # -- what the rooms report

    def _ended(self, ended: Ended) -> None:
        self.reception.ended(ended)

    def _pressure(self, pressure: Pressure) -> None:
        self.metrics.pressure(pressure)
        limit = self.settings.delivery.max_unacknowledged_bytes
        if self.link.unacknowledged > limit:
            self.scheduler.hold("memory")
        else:
            self.scheduler.unhold("memory")
        self._store_away(pressure.store)
        if self.link.unacknowledged > 2 * limit:  # R10: the reply side does not drain; the work is given back
            self.scheduler.interrupt()

    def _store_away(self, cause: str | None) -> None:
        """Outputs that wait for the store keep their place and their bytes; what has not begun waits with them."""
        held = "store" in self.scheduler.holds
        if cause is not None and not held:
            log.warning("the object store is away, nothing new is started until it is back: %s", cause)
            self.scheduler.hold("store")
        elif cause is None and held:
            log.info("the object store is back")
            self.scheduler.unhold("store")

    def _loaded(self, heavy: bool) -> None:
        """The bodies that wait have passed their bound, or are half below it again: reading follows."""
        self.reception.deferral.held = heavy
        if heavy:
            self.consumer.pause_all("memory")
        else:
            self.consumer.resume_all("memory")

    def _engine_changed(self, state: EngineState) -> None:
        if state is EngineState.READY:
            engine = self.settings.engine
            self.scheduler.resize(self.engine.capacity, bounds.reserved(engine), engine.reserve)
            self.scheduler.unhold("engine")
            return
        self.scheduler.hold("engine")
        if state is EngineState.CLOSED and self._serving and not self.draining:  # a failed start tells by itself
            self._failure = EngineGone(f"the engine could not be rebuilt: {self.engine.reason}")
            self._asked_to_stop()

    def _superseded(self, worker: str) -> None:
        self._failure = Superseded(
            f"worker {worker} has taken over the static member id {self.settings.kafka.instance}, so this one has "
            "ended; give each process an id of its own in HEADRACE_KAFKA__INSTANCE, or none"
        )
        self._asked_to_stop()

    # -- Vitals, asked by the HTTP side

    def condition(self) -> Condition:
        stats = self.engine.stats()
        return Condition(
            engine=self.engine.state,
            running=stats.running,
            last_step=stats.last_step,
            joined=self.consumer.joined,
            partitions=len(self.consumer.assignment),
            delivery=self.link.up,
            draining=self.draining,
            polled=self.consumer.last_poll,
            held=self.scheduler.holds,
            paused=self.consumer.paused_for,
            missing=self.consumer.missing.intersection(names.consumed_topics(self.settings.pool)),
        )

    def readings(self) -> Readings:
        stats = self.engine.stats()
        committer = self.consumer.committer if self.consumer.joined else None
        return Readings(
            running=self.scheduler.running,
            waiting=self.scheduler.queued,
            oldest=self.scheduler.census.oldest(),
            waits=self.scheduler.census.waits(self.scheduler.holds),
            standings=self.scheduler.census.standings(),
            scheduler_seconds=self.scheduler.seconds,
            holds=self.scheduler.holds,
            engine_running=stats.running,
            engine_waiting=stats.waiting,
            kv_usage=stats.kv_usage,
            preemptions=stats.preemptions,
            capacity=self.engine.reported,
            step_age=time.monotonic() - stats.last_step if stats.last_step else 0.0,
            rebuilds=self.engine.rebuilds,
            received=self.consumer.received,
            timed=self.reception.deferral.timed,
            tenants_refused=self.tenants.refused + self.models.refused,
            partitions={key: (s.next - s.watermark, s.live) for key, s in self.book.standings().items()},
            commits=committer.commits if committer else 0,
            commit_failures=committer.failures if committer else 0,
            rebalances=self.consumer.rebalances,
            lease_left=max(0.0, committer.lease_until - time.monotonic()) if committer else 0.0,
            delivery_up=self.link.up,
            delivery_restarts=self.link.restarts,
        )
