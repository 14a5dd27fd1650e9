"""What the fair scheduler costs beside plain FIFO: throughput of rounds of jobs, the two in turn (A B B A …).

Two workers are up all the time, one of each policy, on pools of their own; the one whose turn it is not idles. In two
regimes: `fitted`, the engine of the other measurements, of which the promise is; and `cpu_bound`, with steps so short
that the worker is what limits and the scheduler's cost shows in full, shown beside it. Nobody reads the replies
meanwhile; rates come from the status records' own times, in tokens.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer, TopicPartition

from load.arena import ArenaFailed
from load.fairness.plan import TIER, Regime, Writer
from load.fairness.stage import PARTITIONS, Place, Stage
from load.flood import Item, flood, producer
from load.overhead import Round, Side, order
from schemas.keys import partition_of
from schemas.names import jobs_topic, status_topic

Say = Callable[[str], None]

POLICIES = {"A": "fifo", "B": "fair"}
TENANTS = 48
ROUND_S = 90.0
POLL_S = 0.05
# Of a round's ends, the first and the last are left out: filling and emptying.
EDGE = 0.1
QUICK = {
    "HEADRACE_ENGINE__SIM_PROFILE": "custom",
    "HEADRACE_ENGINE__SIM_STEP_BASE_S": "0.001",
    "HEADRACE_ENGINE__SIM_STEP_PER_SEQ_S": "0",
    "HEADRACE_ENGINE__SIM_STEP_PER_PREFILL_TOKEN_S": "0",
    "HEADRACE_ENGINE__MAX_NUM_SEQS": "512",
}


@dataclass(frozen=True, slots=True)
class Spent:
    """One round."""

    round: Round
    jobs_per_s: float
    cpu_us: float  # of the worker process, a job
    deciding_us: float  # of it what the scheduler took of the event loop


@dataclass(frozen=True, slots=True)
class Cost:
    """One regime."""

    regime: str
    spent: list[Spent]
    seconds: float

    @property
    def rounds(self) -> list[Round]:
        return [one.round for one in self.spent]

    def line(self) -> dict[str, Any]:
        return {
            "kind": f"cost_{self.regime}",
            "seconds": round(self.seconds, 1),
            "rounds": [
                {
                    "policy": POLICIES[one.round.side],
                    "jobs_per_s": round(one.jobs_per_s, 1),
                    "tokens_per_s": round(one.round.tokens_per_s, 1),
                    "worker_cpu_us_per_job": round(one.cpu_us, 1),
                    "scheduler_us_per_job": round(one.deciding_us, 1),
                }
                for one in self.spent
            ],
        }

    def cpu_us(self, side: str) -> float:
        """Of the worker process, a job; the median of the rounds."""
        return statistics.median(one.cpu_us for one in self.spent if one.round.side == side)

    def scheduler_us(self, side: str) -> float:
        """Of the scheduler alone, a job; the median of the rounds."""
        return statistics.median(one.deciding_us for one in self.spent if one.round.side == side)


def names() -> list[str]:
    return [f"small-{number:02}" for number in range(TENANTS)]


async def measure(stage: Stage, regime: Regime, say: Say) -> Cost:
    """Raises ArenaFailed if a round does not end."""
    began = time.monotonic()
    spent: list[Spent] = []
    engine = {} if regime.fitted else QUICK
    fifo = stage.place("fifo", **engine, HEADRACE_SCHEDULER__POLICY="fifo")
    fair = stage.place("fair", **engine, HEADRACE_SCHEDULER__POLICY="fair")
    async with fifo as a, fair as b:
        places: dict[Side, Place] = {"A": a, "B": b}
        warm: list[Side] = ["A", "B"]
        for number, side in enumerate((*warm, *order(regime.pairs))):
            one = await _round(stage, places[side], side, f"{side}{number}", regime)
            if number < len(warm):
                continue
            spent.append(one)
            say(
                f"  {POLICIES[side]:<8} {one.round.tokens_per_s:8.1f} tok/s, {one.jobs_per_s:7.1f} jobs/s, "
                f"{one.cpu_us:6.1f} µs of the worker's CPU a job"
            )
    return Cost(regime.name, spent, time.monotonic() - began)


async def _round(stage: Stage, place: Place, side: Side, run: str, regime: Regime) -> Spent:
    topic, count = status_topic(place.pool), regime.jobs
    parts = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    consumer = AIOKafkaConsumer(bootstrap_servers=stage.bootstrap, enable_auto_commit=False)
    await consumer.start()
    publishing = await producer(stage.bootstrap)
    try:
        consumer.assign(parts)
        begins = await consumer.end_offsets(parts)
        gauges = await place.gauges.now()
        cpu = place.cpu_s()
        writer = Writer(run, stage.model)
        for part in range(PARTITIONS):
            items = list(_items(writer, regime, part))
            await flood(publishing, [(jobs_topic(place.pool, TIER), part)], items)
        deadline = time.monotonic() + ROUND_S
        while sum((await consumer.end_offsets(parts)).values()) - sum(begins.values()) < count:
            if time.monotonic() > deadline:
                raise ArenaFailed(f"a round of {count} jobs did not end within {ROUND_S:.0f} s")
            await asyncio.sleep(POLL_S)
        cpu = place.cpu_s() - cpu
        after = await place.gauges.now()
        for part in parts:
            consumer.seek(part, begins[part])
        ends: list[tuple[int, int]] = []  # (ms, tokens)
        while len(ends) < count:
            for records in (await consumer.getmany(timeout_ms=1000)).values():
                ends += [(one.timestamp, _tokens(one.value)) for one in records]
    finally:
        await publishing.stop()
        await consumer.stop()
    jobs, tokens, seconds = _between(sorted(ends))
    name = "scheduler_seconds_total"
    deciding = after.get(name, 0.0) - gauges.get(name, 0.0)
    return Spent(Round(side, tokens, seconds), jobs / seconds, cpu / count * 1e6, deciding / count * 1e6)


def _tokens(status: bytes) -> int:
    found = orjson.loads(status)
    if found["kind"] != "completed":
        raise ArenaFailed(f"a job ended as {found['kind']} ({found.get('code')})")
    return int(found["usage"]["completion_tokens"])


def _between(ends: Sequence[tuple[int, int]]) -> tuple[int, int, float]:
    """Jobs and tokens that ended between the edges, and the seconds that took."""
    low, high = int(len(ends) * EDGE), int(len(ends) * (1 - EDGE)) - 1
    return high - low, sum(tokens for _, tokens in ends[low + 1 : high + 1]), (ends[high][0] - ends[low][0]) / 1000


def _items(writer: Writer, regime: Regime, part: int) -> Iterator[Item]:
    """Those of a round's jobs that lie on this partition. The same in every round."""
    known, shape, chance = names(), regime.shape, random.Random(1)
    for number in range(regime.jobs):
        tenant, output = known[number % TENANTS], chance.randint(shape.low, shape.high)
        if partition_of(tenant, PARTITIONS) == part:
            yield Item(tenant.encode(), writer.value(tenant, number, shape.prompt, output))
