"""First-token delays of neighbours beside a heavy tenant: in a closed loop (the baseline), and with a hundred times as
much (the flood), the engine equally full; and on an idle engine. The order is flood, idle, baseline, baseline, flood.

The same neighbours' jobs arrive at the same times in all of them. A job without a first token when its window is over
counts with the time that it has waited so far.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from load.fairness.client import Client, End, Loop, Sent
from load.fairness.measures import p95, turn_wait
from load.fairness.offer import Offer
from load.fairness.plan import FACTOR, HEAVY, Sizes, Writer, arrivals
from load.fairness.stage import PARTITIONS, Load, Place, Stage
from service.engine.bounds import ordinary
from service.settings import EngineSettings

Say = Callable[[str], None]

# Jobs of the last moment get so long for their first token, seconds.
GRACE_S = 3.0
# The closed loop is made wider or narrower so often, seconds, and by at most this share.
TUNE_S = 1.0
AWAY = 0.1
# Of the ordinary slots, this share stays free in the baseline, so that nothing queues for one.
SPARE = 0.015


@dataclass(slots=True)
class Window:
    """What one window showed. Delays in seconds by tenant."""

    kind: str  # flood, idle, baseline
    seconds: float
    delays: dict[str, list[float]]
    unanswered: dict[str, int]
    stages: dict[str, dict[str, float]]  # 95th percentiles of each stage on the way to a first token, seconds
    running: float  # sequences in the engine's batch, on average
    waiting: float  # requests in the engine's own queue
    queued: float  # jobs in the worker's queue
    heavy_per_s: float  # jobs of the heavy tenant that ended
    max_wait_s: float  # for a tenant's next turn
    offered_per_s: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "seconds": round(self.seconds, 1),
            "engine_running": round(self.running, 1),
            "engine_waiting": round(self.waiting, 1),
            "jobs_waiting": round(self.queued, 1),
            "heavy_offered_per_s": round(self.offered_per_s, 1),
            "heavy_ended_per_s": round(self.heavy_per_s, 1),
            "max_wait_s": round(self.max_wait_s, 2),
            "tenants": {
                tenant: {
                    "jobs": len(found),
                    "unanswered": self.unanswered[tenant],
                    "ttft_p50_ms": round(sorted(found)[len(found) // 2] * 1e3, 1),
                    "ttft_p95_ms": round(p95(found) * 1e3, 1),
                    "stages_p95_ms": {stage: round(one * 1e3, 1) for stage, one in self.stages[tenant].items()},
                }
                for tenant, found in self.delays.items()
            },
            **self.notes,
        }


class Flood:
    """All windows, one after the other."""

    def __init__(self, stage: Stage, client: Client, sizes: Sizes, names: Sequence[str], say: Say) -> None:
        self._stage = stage
        self._client = client
        self._sizes = sizes
        self._names = names
        self._say = say
        self._seeds = range(1, 1 + sizes.rounds)
        self.windows: list[Window] = []

    async def run(self) -> list[Window]:
        """Raises ArenaFailed, WorkerStopped, KafkaError."""
        await self._flood(self._seeds[0])
        target = self.windows[0].running
        async with self._stage.place("baseline") as place:
            self._client.forget()
            await self._measure("idle", place, self._seeds[0])
            await self._baseline(place, target)
        for seed in self._seeds[1:]:
            await self._flood(seed)
        return self.windows

    def delays(self, kind: str) -> dict[str, list[float]]:
        """Of all windows of a kind together."""
        found: dict[str, list[float]] = {name: [] for name in self._names}
        for window in self.windows:
            if window.kind == kind:
                for name, delays in window.delays.items():
                    found[name] += delays
        return found

    async def _flood(self, seed: int) -> None:
        shape, sizes = self._sizes.shape, self._sizes
        rate = FACTOR * sizes.heavy_per_s
        async with self._stage.place(f"flood{seed}") as place:
            offer = Offer(
                bootstrap=self._stage.bootstrap,
                pool=place.pool,
                partitions=PARTITIONS,
                tenant=HEAVY,
                run=f"offer{seed}",
                model=self._stage.model,
                per_s=rate,
                prompt=shape.prompt,
                low=shape.low,
                high=shape.high,
            )
            self._client.forget()
            async with self._stage.offering(offer):
                window = await self._measure("flood", place, seed)
        window.offered_per_s = rate

    async def _baseline(self, place: Place, target: float) -> None:
        """Both windows in one go, on one worker."""
        client, sizes, shape = self._client, self._sizes, self._sizes.shape
        chance = random.Random(0)
        target = min(target, ordinary(EngineSettings(max_num_seqs=sizes.slots)) * (1 - SPARE))
        outputs = [chance.randint(shape.low, shape.high) for _ in range(997)]
        loop = Loop(client, place.pool, Writer("closed", self._stage.model), HEAVY, shape, outputs)
        client.forget()
        client.on_end = loop.end
        loop.in_flight = round(target)
        tasks = {asyncio.create_task(loop.run()), asyncio.create_task(self._tune(place, loop, target))}
        try:
            for seed in self._seeds:
                window = await self._measure("baseline", place, seed)
                window.notes["closed_loop"] = loop.in_flight
        finally:
            await _end(tasks)

    async def _tune(self, place: Place, loop: Loop, target: float) -> None:
        """So many in flight as run at the engine, and on top what is on its way there and back."""
        while True:
            await asyncio.sleep(TUNE_S)
            since = time.monotonic() - TUNE_S
            # What queues is not on its way: counted in, a queue would keep itself up.
            here = sum(place.gauges.mean(name, since) for name in ("engine_running", "engine_waiting", "jobs_waiting"))
            loop.set(round(target + min(max(0.0, self._client.flying - here), AWAY * target)))

    async def _measure(self, kind: str, place: Place, seed: int) -> Window:
        client, sizes = self._client, self._sizes
        writer = Writer(f"{kind}{seed}", self._stage.model, stream=True)
        plan = arrivals(self._names, sizes.per_s, sizes.warm_s + sizes.window_s, sizes.shape, seed)
        began = time.monotonic()
        since, until = began + sizes.warm_s, began + sizes.warm_s + sizes.window_s
        publishing = asyncio.create_task(client.publish_at(place.pool, writer, plan, sizes.shape.prompt, began))
        try:
            await asyncio.sleep(since - time.monotonic())
            load = Load(place)
            await asyncio.sleep(until - time.monotonic())
            busy = load.line()
            await asyncio.sleep(GRACE_S)
        finally:
            await _end({publishing})
        client.raise_problem()
        now = time.monotonic()
        delays: dict[str, list[float]] = {name: [] for name in self._names}
        unanswered = dict.fromkeys(self._names, 0)
        counted = [s for s in client.jobs.values() if s.tenant in delays and since <= s.published < until]
        for sent in counted:
            delays[sent.tenant].append((sent.first or now) - sent.published)
            unanswered[sent.tenant] += sent.first is None
        ends = [end for end in client.ends if since <= end.at < until]
        gauges = place.gauges
        window = Window(
            kind=kind,
            seconds=sizes.window_s,
            delays=delays,
            unanswered=unanswered,
            stages={name: _stages(counted, name) for name in self._names},
            running=gauges.mean("engine_running", since, until),
            waiting=gauges.mean("engine_waiting", since, until),
            queued=gauges.mean("jobs_waiting", since, until),
            heavy_per_s=sum(end.tenant == HEAVY for end in ends) / sizes.window_s,
            max_wait_s=_longest(ends),
            notes={
                "records_per_s": round(gauges.rate("records_received_total", since, until), 1),
                "moved_per_s": round(gauges.rate("moved_to_overflow_total", since, until), 1),
                **busy,
            },
        )
        self.windows.append(window)
        worst = max(p95(found) for found in delays.values())
        self._say(
            f"  {kind:<8} {window.running:6.1f} running, heavy {window.heavy_per_s:6.1f} jobs/s, "
            f"worst neighbour p95 {worst * 1e3:7.1f} ms"
        )
        return window


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels them; raises what one of them had failed with."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


def _stages(jobs: Sequence[Sent], tenant: str) -> dict[str, float]:
    told = [stages for sent in jobs if sent.tenant == tenant and (stages := sent.stages()) is not None]
    return {stage: p95([one[stage] for one in told]) for stage in told[0]} if told else {}


def _longest(ends: Sequence[End]) -> float:
    turns: dict[str, list[tuple[float, float]]] = {}
    for end in ends:
        if end.admitted is not None:
            turns.setdefault(end.tenant, []).append((end.received, end.admitted))
    return max(map(turn_wait, turns.values()), default=0.0)
