"""A stack of the bench's own, and workers on it: each on topics of its own, so that nothing is left over from the last.

Owns processes and gauges. Publishes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import psutil
import yaml

from infra.progress import Progress
from load.arena import Arena, ArenaFailed, Spawn, Spawned
from load.fairness.offer import Offer
from service import topics
from service.settings import KafkaSettings, Settings

PARTITIONS = 12
SAMPLE_S = 0.5
OFFER_START_S = 30.0
# Of the worker's metrics: how full the engine is, its queues, and what was read and moved out of others' way.
WATCHED = (
    *("engine_running", "engine_waiting", "jobs_waiting"),
    *("records_received_total", "moved_to_overflow_total", "scheduler_seconds_total"),
)

SIMULATED = {
    "HEADRACE_ENGINE__KIND": "simulated",
    "HEADRACE_ENGINE__SIM_PROFILE": "h200-8b",
    "HEADRACE_ENGINE__MAX_NUM_BATCHED_TOKENS": "8192",
}


@dataclass(slots=True)
class Gauges:
    """Samples of a worker's gauges, every SAMPLE_S. Times are monotonic seconds."""

    url: str
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            self.samples.append((time.monotonic(), await self.now()))
            await asyncio.sleep(SAMPLE_S)

    async def now(self) -> dict[str, float]:
        return await asyncio.to_thread(self._read)

    def mean(self, name: str, since: float, until: float = float("inf")) -> float:
        """0 if there is no sample."""
        found = [values.get(name, 0.0) for at, values in self.samples if since <= at <= until]
        return sum(found) / len(found) if found else 0.0

    def rate(self, name: str, since: float, until: float) -> float:
        """Of a counter, per second."""
        found = [(at, values.get(name, 0.0)) for at, values in self.samples if since <= at <= until]
        if len(found) < 2 or found[-1][0] == found[0][0]:
            return 0.0
        return (found[-1][1] - found[0][1]) / (found[-1][0] - found[0][0])

    def _read(self) -> dict[str, float]:
        values: dict[str, float] = {}
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                name = line.partition(" ")[0].partition("{")[0].removeprefix("headrace_")
                if name in WATCHED:
                    values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
        return values


@dataclass(slots=True)
class Place:
    """A running worker and its pool."""

    pool: str
    worker: Spawned
    gauges: Gauges

    def cpu_s(self) -> float:
        """Processor time of the worker process so far; its delivery process is another one."""
        times = psutil.Process(self.worker.process.pid).cpu_times()
        return float(times.user + times.system)


class Load:
    """What a worker and the whole machine were busy with, from its making on."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._began = time.monotonic()
        self._worker = place.cpu_s()
        psutil.cpu_percent()

    def line(self) -> dict[str, float]:
        """Cores that the worker process used on average, and the share of all processors that was busy."""
        took = time.monotonic() - self._began
        cores = (self._place.cpu_s() - self._worker) / took
        return {"worker_cores": round(cores, 2), "machine_busy": round(psutil.cpu_percent() / 100, 2)}


class Stage:
    """`async with Stage(spawn, show, real=False, …) as stage`. `slots` of the engine; `weights` by tenant."""

    def __init__(
        self, spawn: Spawn, show: Progress, *, real: bool, slots: int, wait_bound_s: float, weights: Mapping[str, float]
    ) -> None:
        environment = {
            **({} if real else SIMULATED),
            "HEADRACE_SCHEDULER__MAX_WAIT_S": str(wait_bound_s),
            "HEADRACE_ENGINE__MAX_NUM_SEQS": str(slots),
            "HEADRACE_LOG_LEVEL": "WARNING",
        }
        self._weights = dict(weights)
        self.arena = Arena(
            spawn, "fairness", partitions=PARTITIONS, show=show, environment=environment, real_engine=real
        )
        self._opened = 0

    async def __aenter__(self) -> Stage:
        await self.arena.__aenter__()
        try:
            file = self.arena.folder / "tenants.yaml"
            await asyncio.to_thread(file.write_text, tenants(self._weights))
            self.arena.environment["HEADRACE_TENANTS_FILE"] = str(file)
            self.arena.environment.pop("HEADRACE_TELEMETRY__OTLP_ENDPOINT", None)
            self.model = self.arena.settings.engine.served_name
        except BaseException:
            await self.arena.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.arena.__aexit__(None, None, None)

    @property
    def bootstrap(self) -> str:
        return self.arena.bootstrap

    @contextlib.asynccontextmanager
    async def place(self, name: str, **environment: str) -> AsyncIterator[Place]:
        """A worker with topics of its own; killed at the end, whatever it has left."""
        self._opened += 1
        pool = f"fairness-{name}-{self._opened}"
        made = await topics.apply(
            Settings(pool=pool, partitions=PARTITIONS, kafka=KafkaSettings(bootstrap=self.bootstrap))
        )
        if made.findings:
            raise ArenaFailed("; ".join(map(str, made.findings)))
        before = dict(self.arena.environment)
        self.arena.environment.update({**environment, "HEADRACE_POOL": pool})
        try:
            worker = await self.arena.start(pool)
        finally:
            self.arena.environment = before
        gauges = Gauges(worker.url)
        following = asyncio.create_task(gauges.follow())
        try:
            yield Place(pool, worker, gauges)
        finally:
            following.cancel()
            await asyncio.wait({following})
            if pool in self.arena.workers:
                await self.arena.kill(pool)

    @contextlib.asynccontextmanager
    async def offering(self, offer: Offer) -> AsyncIterator[None]:
        """The flood, for as long as the block lasts."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "load.fairness.offer", offer.model_dump_json()), stdin=pipe, stdout=pipe
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            if not await asyncio.wait_for(process.stdout.readline(), OFFER_START_S):
                raise ArenaFailed("the flood could not begin; its lines above say why")
            process.stdin.write(b"go\n")
            yield
            if process.returncode is not None:
                raise ArenaFailed(f"the flood ended by itself with {process.returncode}")
        finally:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5)
            if process.returncode is None:
                process.kill()
                await process.wait()


def tenants(weights: Mapping[str, float]) -> str:
    """A registry that lets each of them reply where it likes."""
    entries = [{"id": name, "weight": weight, "reply_topics": ["*"]} for name, weight in weights.items()]
    return yaml.safe_dump({"tenants": entries})
