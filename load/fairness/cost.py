"""What the fair scheduler costs beside plain FIFO: throughput of rounds of small jobs, the two in turn (A B B A …).

Two workers are up all the time, one of each policy, on pools of their own; the one whose turn it is not idles. The
engine's steps are so short that the worker is what limits: what the scheduler costs shows in full, while with a real
engine most of it would be hidden. Nobody reads the replies meanwhile; rates come from the records' own times.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from load.arena import ArenaFailed
from load.fairness.plan import TIER, Shape, Sizes, Writer
from load.fairness.stage import PARTITIONS, Place, Stage
from load.flood import Item, flood, producer
from load.overhead import Round, order
from schemas.keys import partition_of
from schemas.names import jobs_topic, status_topic

Say = Callable[[str], None]

POLICIES = {"A": "fifo", "B": "fair"}
TENANTS = 48
SHAPE = Shape(16, 2, 2)
ROUND_S = 60.0
POLL_S = 0.05
# Of a round's ends, the first and the last are left out: filling and emptying.
EDGE = 0.05
QUICK = {
    "HEADRACE_ENGINE__SIM_PROFILE": "custom",
    "HEADRACE_ENGINE__SIM_STEP_BASE_S": "0.001",
    "HEADRACE_ENGINE__SIM_STEP_PER_SEQ_S": "0",
    "HEADRACE_ENGINE__SIM_STEP_PER_PREFILL_TOKEN_S": "0",
    "HEADRACE_ENGINE__MAX_NUM_SEQS": "512",
}


@dataclass(frozen=True, slots=True)
class Cost:
    rounds: list[Round]  # tokens = jobs; cpu_s = of the worker process
    deciding_us: list[float]  # of each round: what the scheduler itself took of the event loop, a job
    seconds: float

    def line(self) -> dict[str, Any]:
        return {
            "kind": "cost",
            "seconds": round(self.seconds, 1),
            "rounds": [
                {
                    "policy": POLICIES[one.side],
                    "jobs_per_s": round(one.tokens_per_s, 1),
                    "worker_cpu_us_per_job": round(one.cpu_us_per_token or 0.0, 1),
                    "scheduler_us_per_job": round(deciding, 1),
                }
                for one, deciding in zip(self.rounds, self.deciding_us, strict=True)
            ],
        }

    def cpu_us(self, side: str) -> float:
        """Of the worker process, a job; the median of the rounds."""
        return statistics.median(one.cpu_us_per_token or 0.0 for one in self.rounds if one.side == side)

    def scheduler_us(self, side: str) -> float:
        """Of the scheduler alone, a job; the median of the rounds."""
        found = zip(self.rounds, self.deciding_us, strict=True)
        return statistics.median(deciding for one, deciding in found if one.side == side)


def names() -> list[str]:
    return [f"small-{number:02}" for number in range(TENANTS)]


async def measure(stage: Stage, sizes: Sizes, say: Say) -> Cost:
    """Raises ArenaFailed if a round does not end."""
    began = time.monotonic()
    rounds: list[Round] = []
    deciding_us: list[float] = []
    fifo = stage.place("fifo", **QUICK, HEADRACE_SCHEDULER__POLICY="fifo")
    fair = stage.place("fair", **QUICK, HEADRACE_SCHEDULER__POLICY="fair")
    async with fifo as a, fair as b:
        places = {"A": a, "B": b}
        for number, side in enumerate(("A", "B", *order(sizes.pairs))):
            place = places[side]
            before = await place.gauges.now()
            jobs, seconds, cpu = await _round(stage, place, f"{side}{number}", sizes.round_jobs)
            after = await place.gauges.now()
            if number < 2:
                continue  # warm-up
            rounds.append(Round("A" if side == "A" else "B", jobs, seconds, cpu * jobs / sizes.round_jobs))
            name = "scheduler_seconds_total"
            deciding_us.append((after.get(name, 0.0) - before.get(name, 0.0)) / sizes.round_jobs * 1e6)
            spent = cpu / sizes.round_jobs * 1e6
            say(f"  {POLICIES[side]:<8} {jobs / seconds:8.1f} jobs/s, {spent:6.1f} µs of the worker's CPU a job")
    return Cost(rounds, deciding_us, time.monotonic() - began)


async def _round(stage: Stage, place: Place, run: str, count: int) -> tuple[int, float, float]:
    """Jobs and seconds between the edges, and the worker's processor time for the whole round."""
    topic = status_topic(place.pool)
    parts = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    consumer = AIOKafkaConsumer(bootstrap_servers=stage.bootstrap, enable_auto_commit=False)
    await consumer.start()
    publishing = await producer(stage.bootstrap)
    try:
        consumer.assign(parts)
        before = await consumer.end_offsets(parts)
        cpu = place.cpu_s()
        writer = Writer(run, stage.model)
        for part in range(PARTITIONS):
            items = list(_items(writer, count, part))
            await flood(publishing, [(jobs_topic(place.pool, TIER), part)], items)
        deadline = time.monotonic() + ROUND_S
        while sum((await consumer.end_offsets(parts)).values()) - sum(before.values()) < count:
            if time.monotonic() > deadline:
                raise ArenaFailed(f"a round of {count} jobs did not end within {ROUND_S:.0f} s")
            await asyncio.sleep(POLL_S)
        cpu = place.cpu_s() - cpu
        for part in parts:
            consumer.seek(part, before[part])
        times: list[int] = []
        while len(times) < count:
            for records in (await consumer.getmany(timeout_ms=1000)).values():
                times += [record.timestamp for record in records]
    finally:
        await publishing.stop()
        await consumer.stop()
    times.sort()
    low, high = int(count * EDGE), int(count * (1 - EDGE)) - 1
    return high - low, (times[high] - times[low]) / 1000, cpu


def _items(writer: Writer, count: int, part: int) -> Iterator[Item]:
    """Those of a round's jobs that lie on this partition."""
    known = names()
    for number in range(count):
        tenant = known[number % TENANTS]
        if partition_of(tenant, PARTITIONS) == part:
            yield Item(tenant.encode(), writer.value(tenant, number, SHAPE.prompt, SHAPE.low))
