"""One `up`: what is missing is made, what does not run is started, side by side; what fails is undone.

Owns the order of things; infra/stack.py owns the folder, its lock and what is remembered.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from infra import collector, kafka, model, ports, tenants, zipkin
from infra.cache import Artefact, Workshop
from infra.errors import BuildFailed, Cancelled, Missing, PartFailed
from infra.part import NotReady, Part
from infra.process import Process, end_strays
from infra.progress import Progress
from infra.secured import Secured
from infra.state import State
from infra.store import Store
from service import topics
from service.settings import KafkaSettings, Settings

KAFKA = kafka.Kafka()
STORE = Store()
ZIPKIN = zipkin.Zipkin()
COLLECTOR = collector.Collector()
ESSENTIAL: tuple[Part, ...] = (KAFKA, STORE)
TRACES: tuple[Part, ...] = (ZIPKIN, COLLECTOR)
PARTS = ESSENTIAL + TRACES

# A part that runs but does not answer for so long is ended and started again.
HUNG_S = 15.0
POLL_S = 0.1


def traces_ready() -> bool:
    """Whether both programs for traces have been made."""
    return collector.BINARY.ready and zipkin.JAR.ready


class Startup:
    def __init__(self, folder: Path, state: State, show: Progress, *, with_model: bool) -> None:
        self.notes: list[str] = []  # what the stack goes without, and what would install it
        self.changed: list[str] = []  # what was started, created or set
        self._folder = folder
        self._state = state  # ports, traces and model are filled in
        self._show = show
        self._with_model = with_model
        self._workshop = Workshop(folder / "logs", show)
        self._started: list[Part] = []
        self._guard = threading.Lock()  # the lists are filled by several threads

    def run(self) -> None:
        """Returns when everything is ready. If it raises, nothing runs that it started."""
        pool = ThreadPoolExecutor(8, thread_name_prefix="up")
        tasks: list[Future[Any]] = []
        try:
            self._end_strays()
            healthy = {part for part, well in zip(PARTS, pool.map(self._healthy, PARTS), strict=True) if well}
            due = self._give_ports(healthy)
            self._state.write(self._folder)
            broker = pool.submit(self._start_kafka, due)
            tasks = [broker, pool.submit(self._start_store, due), pool.submit(self._start_traces, due)]
            if self._with_model:
                tasks.append(pool.submit(self._prepare_model))
            tasks.append(pool.submit(self._apply_topics, broker))
            wait(tasks, return_when=FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            wait(tasks)
        except BaseException:
            self._workshop.cancelled.set()
            wait(tasks)
            self._undo()
            raise
        finally:
            pool.shutdown()

    # ── what runs already ───────────────────────────────────────────────────────────────────────────────────────────

    def _end_strays(self) -> None:
        """Processes of an `up` that was killed between starting them and writing down whom."""
        identities = [self._process(part).identity() for part in PARTS]
        known = {pid for identity in identities if identity is not None for pid in identity.members()}
        if ended := end_strays(self._folder, grace_s=5.0, spare=known):
            self._show.say("stack", f"ended processes that a killed run left: {ended}")

    def _healthy(self, part: Part) -> bool:
        """Whether it runs and answers; what is left of one that does not has ended afterwards."""
        process = self._process(part)
        identity = process.identity()
        if identity is None:
            return False
        if not identity.alive:
            self._show.say(part.name, f"had crashed (its log: {process.log}.1); starting it again")
        else:
            deadline = time.monotonic() + HUNG_S
            while True:
                try:
                    part.probe(self._state.ports, self._folder)
                    return True
                except (NotReady, OSError, KeyError) as error:
                    if time.monotonic() > deadline or not identity.alive:
                        self._show.say(part.name, f"runs but does not answer ({error}); starting it again")
                        break
                self._pause()
        process.stop(part.stop_s)
        return False

    def _give_ports(self, healthy: set[Part]) -> set[Part]:
        """Ports for all that are to start, the former ones where they are still free. Returns who is to start."""
        due = {part for part in PARTS if part not in healthy}
        moved: set[str] = set()
        for part in PARTS:
            if part not in due and moved.isdisjoint(part.peers):
                continue
            if part not in due:  # its configuration names a port that moved
                self._process(part).stop(part.stop_s)
                due.add(part)
            for name, companion in part.ports.items():
                old = self._state.ports.get(name)
                if old is not None and ports.free(old) and (not companion or ports.free(old + companion)):
                    continue
                taken = set(self._state.ports.values())
                self._state.ports[name] = ports.pick(taken, companion=companion)
                if old is not None:
                    moved.add(name)
        return due

    # ── the tasks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_kafka(self, due: set[Part]) -> None:
        if KAFKA in due:
            kafka.JARS.ensure(self._workshop)
            self._start(KAFKA)

    def _start_store(self, due: set[Part]) -> None:
        if STORE in due:
            self._start(STORE)

    def _start_traces(self, due: set[Part]) -> None:
        """Collector and Zipkin, or neither: one is of no use without the other. Without them the rest goes on."""
        wanted = [part for part in TRACES if part in due]
        if not wanted:
            self._state.traces = True
            return
        with ThreadPoolExecutor(2) as pair:
            made = list(pair.map(self._attempt, ("traces", "traces"), (collector.BINARY, zipkin.JAR)))
            self._state.traces = all(made)
            if not self._state.traces:
                for part in TRACES:  # one of them may still run from before the cache was emptied
                    self._process(part).stop(part.stop_s)
                return
            for start in [pair.submit(self._start, part) for part in wanted]:
                start.result()

    def _prepare_model(self) -> None:
        own = os.environ.get("HEADRACE_ENGINE__MODEL")
        folder = Path(own) if own else self._attempt("model", model.artefact())
        self._state.model = str(folder) if folder else ""

    def _apply_topics(self, broker: Future[None]) -> None:
        broker.result()
        settings = Settings(
            pool=self._state.pool,
            partitions=self._state.partitions,
            kafka=self._connection(),
        )
        done = asyncio.run(topics.apply(settings))
        if refused := [finding for finding in done.findings if not finding.warning]:
            raise topics.TopicsRefused(refused)
        if made := len(done.created):
            self._show.say("topics", f"{made} created, {self._state.partitions} partitions each for the pool's own")
        seeded = asyncio.run(tenants.seed(settings.kafka))
        if seeded:
            self._show.say("tenants", f"{', '.join(seeded)} put into the registry: headrace tenants list")
        with self._guard:
            self.changed += [*done.created, *done.changed, *(f"tenant {id}" for id in seeded)]

    def _connection(self) -> KafkaSettings:
        """An operator's, on either kind of broker."""
        bootstrap = KAFKA.address(self._state.ports)
        secured = Secured.read(self._folder)
        return KafkaSettings(bootstrap=bootstrap) if secured is None else secured.settings(bootstrap)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _attempt(self, what: str, artefact: Artefact) -> Path | None:
        """Its folder; None and a note if it cannot be had here."""
        try:
            return artefact.ensure(self._workshop)
        except (Missing, BuildFailed) as error:
            note = f"going on without {what}: {error}"
            self._show.say(artefact.name, note)
            with self._guard:
                self.notes.append(note)
            return None

    def _start(self, part: Part) -> None:
        process = self._process(part)
        with self._show.step(part.name, "starting"):
            command = part.command(self._state.ports, self._folder)
            with self._guard:  # before it starts, so that an interrupt in between still ends it
                self._started.append(part)
            try:
                identity = process.start(command)
            except OSError as error:
                raise PartFailed(
                    f"{part.name} cannot be run ({error})", remedy="headrace up", log=process.log
                ) from error
            self._await(part, process, lambda: identity.alive)
        with self._guard:
            self.changed.append(part.name)

    def _await(self, part: Part, process: Process, alive: Callable[[], bool]) -> None:
        deadline = time.monotonic() + part.start_s
        while True:
            try:
                return part.probe(self._state.ports, self._folder)
            except (NotReady, OSError) as error:
                reason = error
            if not alive():
                raise PartFailed(f"{part.name} ended while it started", remedy="headrace up", log=process.log)
            if time.monotonic() > deadline:
                raise PartFailed(
                    f"{part.name} was not ready after {part.start_s:.0f} s ({reason})",
                    remedy="headrace up",
                    log=process.log,
                )
            self._pause()

    def _pause(self) -> None:
        if self._workshop.cancelled.wait(POLL_S):
            raise Cancelled

    def _undo(self) -> None:
        for part in self._started:
            self._process(part).stop(part.stop_s)

    def _process(self, part: Part) -> Process:
        return Process(part.name, self._folder)
