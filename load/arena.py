"""A stack of one's own and workers on it, all of which may be killed: for faults, backlogs and hostile records.

Owns processes and their signals. Knows nothing of jobs, and never touches a stack that somebody else uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psutil

from infra.part import NotReady, Part
from infra.progress import Progress
from infra.stack import Stack
from infra.startup import KAFKA, STORE
from infra.state import State, default_folder
from schemas.names import group_id
from service.settings import EngineSettings, KafkaSettings, Settings, StoreSettings

# Seconds: a worker's start (imports on a busy machine), a part's end after SIGKILL, and a part's start.
WORKER_START_S, PART_END_S, PART_START_S = 90.0, 15.0, 90.0
ENGINE_START_S = 240.0  # of a worker with the real engine, beside others
POLL_S = 0.05
DELIVERY_MODULE = "service.delivery"
# How the kernel names the core of a vLLM engine; its name is cut to 15 characters.
CORE_NAME = "VLLM::EngineCor"


class ArenaFailed(Exception):
    """A process did not start or end; one line saying which."""


class Spawned(Protocol):
    """A worker process (`service.cli.process.WorkerProcess`)."""

    name: str
    log: Path
    url: str

    @property
    def process(self) -> asyncio.subprocess.Process: ...

    async def __aenter__(self) -> Self: ...

    async def ready(self, deadline_s: float) -> str: ...

    async def stop(self, *, kill: bool = False) -> int: ...


Spawn = Callable[[str, Path, Mapping[str, str]], Spawned]


class Arena:
    """`async with Arena(spawn, "faults", partitions=12, show=Quiet()) as arena`. At the end nothing of it runs, and its
    folder is gone unless `keep` was set."""

    def __init__(
        self,
        spawn: Spawn,
        pool: str,
        *,
        partitions: int,
        show: Progress,
        environment: Mapping[str, str] | None = None,
        real_engine: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.folder = folder or default_folder() / f"{pool}-{uuid.uuid4().hex[:6]}"
        self.pool = pool
        self.partitions = partitions
        self.keep = False
        self.workers: dict[str, Spawned] = {}  # those that are meant to run
        self.start_s = 0.0  # what the last start of a worker took, until it was ready
        self.environment: dict[str, str] = {}
        self._spawn = spawn
        self._extra = dict(environment or {})
        self._stack = Stack(self.folder, partitions=partitions, pool=pool, with_model=real_engine, show=show)
        self._ready_s = ENGINE_START_S if real_engine else WORKER_START_S
        self._everyone: list[Spawned] = []
        self._families: set[psutil.Process] = set()  # delivery processes and engine cores ever seen

    async def __aenter__(self) -> Self:
        try:
            at = await asyncio.to_thread(self._stack.up)
            # The Collector stays away for ever: workers must not mind.
            for part in ("zipkin", "collector"):
                await asyncio.to_thread(self._stack.process(part).stop, 5.0)
            self.environment = {**self._stack.environment(), **self._extra}
            if not at.otlp_endpoint:
                self.environment.pop("HEADRACE_TELEMETRY__OTLP_ENDPOINT", None)
            self.bootstrap = at.bootstrap
            self._ports = State.read(self.folder).ports
        except BaseException:
            await asyncio.to_thread(self._stack.down)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._everyone:
            if worker.process.returncode is not None:
                continue  # its number may be somebody else's by now
            self._note_family(worker)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # it may be stopped, or draining
            await worker.process.wait()
        for process in self._families:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await asyncio.to_thread(self._stack.down)
        if not self.keep:
            await asyncio.to_thread(shutil.rmtree, self.folder, True)

    @property
    def settings(self) -> Settings:
        """As the workers have them, as far as a reader of the topics needs them."""
        served = self.environment.get("HEADRACE_ENGINE__SERVED_NAME")
        return Settings(
            pool=self.pool,
            partitions=self.partitions,
            state_dir=self.folder,
            kafka=KafkaSettings(bootstrap=self.bootstrap),
            store=StoreSettings(endpoint=STORE.address(self._ports)),
            engine=EngineSettings(served_name=served) if served else EngineSettings(),
        )

    @property
    def group(self) -> str:
        return group_id(self.pool)

    # workers

    async def launch(self, name: str) -> Spawned:
        """A worker that is not ready yet."""
        worker = self._spawn(name, self.folder / "logs", self.environment)
        if worker.log.exists():  # of the same name before it: a killed worker's log is what one looks for
            worker.log.replace(worker.log.with_suffix(f".{time.time_ns() // 1_000_000}.log"))
        await worker.__aenter__()
        self._everyone.append(worker)
        self.workers[name] = worker
        return worker

    async def start(self, name: str) -> Spawned:
        """A worker that has joined the group. Raises what the spawned process's `ready` raises."""
        began = time.monotonic()
        worker = await self.launch(name)
        await worker.ready(self._ready_s)
        self.start_s = time.monotonic() - began
        self._note_family(worker)
        return worker

    async def leave(self, name: str) -> int:
        """SIGTERM and its drain; returns the exit code."""
        worker = self.workers.pop(name)
        self._note_family(worker)
        return await worker.stop()

    async def kill(self, name: str) -> None:
        """kill -9 of the worker alone; its delivery process ends by itself."""
        worker = self.workers.pop(name)
        self._note_family(worker)
        await worker.stop(kill=True)

    def delivery(self, name: str) -> psutil.Process | None:
        """The worker's delivery process; None between two lives."""
        return self._child(self.workers[name], lambda process: DELIVERY_MODULE in process.cmdline())

    def core(self, name: str) -> psutil.Process | None:
        """The process of the worker's real engine."""
        return self._child(self.workers[name], lambda process: process.name().startswith(CORE_NAME))

    def orphans(self) -> list[int]:
        """Children of workers that are gone and should have ended by themselves."""
        kept = {child.pid for worker in self.workers.values() for child in self._note_family(worker)}
        found = []
        for process in self._families:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE and process.pid not in kept:
                    found.append(process.pid)
        return found

    def _child(self, worker: Spawned, wanted: Callable[[psutil.Process], bool]) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(worker.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if wanted(process) and process.status() != psutil.STATUS_ZOMBIE:
                        return process
        return None

    def _note_family(self, worker: Spawned) -> list[psutil.Process]:
        """Its children and theirs (an engine has processes of its own), from now on remembered."""
        try:
            family = psutil.Process(worker.process.pid).children(recursive=True)
        except psutil.Error:
            return []
        self._families.update(family)
        return family

    # parts of the stack

    def part(self, part: Part) -> psutil.Process | None:
        """Its process, to be measured."""
        identity = self._stack.process(part.name).identity()
        return psutil.Process(identity.pid) if identity is not None and identity.alive else None

    def signal_part(self, part: Part, number: signal.Signals) -> None:
        identity = self._stack.process(part.name).identity()
        if identity is None:
            raise ArenaFailed(f"{part.name} does not run")
        os.killpg(identity.pid, number)

    async def end_part(self, part: Part, number: signal.Signals) -> None:
        """By this signal; returns when it has ended."""
        identity = self._stack.process(part.name).identity()
        if identity is None:
            raise ArenaFailed(f"{part.name} does not run")
        os.killpg(identity.pid, number)
        deadline = time.monotonic() + PART_END_S
        while identity.alive:
            if time.monotonic() > deadline:
                os.killpg(identity.pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)

    async def begin_part(self, part: Part) -> None:
        """Starts it again on its old ports; returns when it answers."""
        process = self._stack.process(part.name)
        identity = process.start(part.command(self._ports, self.folder))
        deadline = time.monotonic() + PART_START_S
        while True:
            try:
                return await asyncio.to_thread(part.probe, self._ports, self.folder)
            except (NotReady, OSError) as error:
                if time.monotonic() > deadline or not identity.alive:
                    raise ArenaFailed(f"{part.name} did not come back: {error}") from error
            await asyncio.sleep(POLL_S)


BROKER: Part = KAFKA
OBJECTS: Part = STORE
