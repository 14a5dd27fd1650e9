"""A backlog of a million jobs through one worker: how fast, and whether memory stays flat (`headrace bench backlog`).

The whole backlog lies on the topic before the worker starts; nothing is streamed and nobody reads the replies, so what
is measured is the worker's own way from record to acknowledged end. Owns the measuring; the arena owns the processes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from infra.progress import Progress
from load.arena import BROKER, Arena, ArenaFailed, Spawn
from load.flood import Item, flood, producer
from schemas.names import COMPLETIONS, REPLIES, jobs_topic

POOL = "backlog"
PARTITIONS = 12
TIER = "bulk"
# Memory is judged from here on: pools, caches and windows of fixed size have filled up.
WARM_JOBS = 50_000
FLAT = 0.10  # of the resident size at that point
STRETCHES = 20
SAMPLE_S = 1.0
# No job has ended for so long: it has stopped.
STUCK_S = 60.0
REREAD = 1.01  # records handed over by the consumer, as a multiple of the jobs

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sample:
    at: float  # monotonic
    done: int
    received: int
    worker: int  # bytes
    delivery: int


def jobs(count: int, run: str, model: str) -> Iterator[Item]:
    """Finals of one token for three tenants; built from a template, which is most of the speed."""
    templates = []
    for tenant in ("acme", "globex", "initech"):
        head = f'{{"schema_version":1,"id":"{run}-'
        tail = (
            f'","tenant":"{tenant}","endpoint":"{COMPLETIONS}","body":{{"model":"{model}","prompt":"river water mill '
            f'wheel","max_tokens":1,"temperature":0}},"reply":{{"topic":"{REPLIES}","stream":false}}}}'
        )
        templates.append((tenant.encode(), head.encode(), tail.encode()))
    for number in range(count):
        key, first, last = templates[number % len(templates)]
        yield Item(key, b"%b%d%b" % (first, number, last))


async def run(spawn: Spawn, count: int, say: Say, show: Progress) -> dict[str, Any]:
    """The whole measurement; returns what the command prints. Raises ArenaFailed."""
    environment = {
        "HEADRACE_ENGINE__KIND": "simulated",
        "HEADRACE_ENGINE__MAX_NUM_SEQS": "512",
        "HEADRACE_ENGINE__SIM_STEP_BASE_S": "0.002",
        "HEADRACE_ENGINE__SIM_STEP_PER_SEQ_S": "0.0",
        "HEADRACE_LOG_LEVEL": "WARNING",
    }
    async with Arena(spawn, POOL, partitions=PARTITIONS, show=show, environment=environment) as arena:
        model = arena.settings.engine.served_name
        places = [(jobs_topic(POOL, TIER), number) for number in range(PARTITIONS)]
        publishing = await producer(arena.bootstrap)
        began = time.monotonic()
        try:
            written = await flood(publishing, places, jobs(count, f"b{time.time_ns() // 1_000_000}", model))
        finally:
            await publishing.stop()
        took = time.monotonic() - began
        say(f"{written} jobs published in {took:.1f} s ({written / took:.0f} a second)")
        worker = await arena.start("eater")
        say(f"worker ready after {arena.start_s:.1f} s")
        processes = {
            "worker": psutil.Process(worker.process.pid),
            "delivery": arena.delivery(worker.name),
            "broker": arena.part(BROKER),
        }
        before = {name: _cpu_s(process) for name, process in processes.items()}
        samples = await _watch(arena, worker.name, worker.url, written, say)
        judged = _judge(samples, written)
        judged["cpu_us_per_job"] = {
            name: round((_cpu_s(process) - before[name]) / written * 1e6) for name, process in processes.items()
        }
        arena.keep = judged["verdict"] != "pass"
        return judged


async def _watch(arena: Arena, name: str, url: str, count: int, say: Say) -> list[Sample]:
    """Samples until everything has ended. Raises ArenaFailed when nothing moves any more."""
    process = psutil.Process(arena.workers[name].process.pid)
    samples: list[Sample] = []
    moved = told = time.monotonic()
    while not samples or samples[-1].done < count:
        counters = await asyncio.to_thread(_counters, url)
        delivery = arena.delivery(name)
        sample = Sample(
            at=time.monotonic(),
            done=counters["done"],
            received=counters["received"],
            worker=process.memory_info().rss,
            delivery=delivery.memory_info().rss if delivery is not None else 0,
        )
        if not samples or sample.done > samples[-1].done:
            moved = sample.at
        elif sample.at - moved > STUCK_S:
            raise ArenaFailed(f"no job has ended for {STUCK_S:.0f} s, {sample.done} of {count} are done")
        samples.append(sample)
        if sample.at - told > 10.0:
            told = sample.at
            rate = sample.done / (sample.at - samples[0].at)
            say(f"  {sample.done} done, {rate:.0f} a second, {_mib(sample.worker)} + {_mib(sample.delivery)} MiB")
        await asyncio.sleep(SAMPLE_S)
    return samples


def _counters(url: str) -> dict[str, int]:
    found = {"done": 0.0, "received": 0.0}
    names = {"headrace_jobs_complete_total": "done", "headrace_records_received_total": "received"}
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            family = names.get(line.partition("{")[0].partition(" ")[0])
            if family is not None:
                found[family] += float(line.rpartition(" ")[2])
    return {name: int(value) for name, value in found.items()}


def _judge(samples: list[Sample], count: int) -> dict[str, Any]:
    last = samples[-1]
    took = last.at - samples[0].at
    memory = {name: _memory([(s.done, getattr(s, name)) for s in samples]) for name in ("worker", "delivery")}
    flat = all(one["flat"] for one in memory.values())
    reread = last.received / count
    return {
        "bench": "backlog",
        "jobs": count,
        "jobs_per_s": round((last.done - samples[0].done) / took, 1) if took else None,
        "took_s": round(took, 1),
        "records_received": last.received,
        "received_per_job": round(reread, 4),
        "memory": memory,
        "verdict": "pass" if flat and reread <= REREAD and last.done == count else "fail",
    }


def _cpu_s(process: psutil.Process | None) -> float:
    """Processor time so far; 0 for one that has gone."""
    if process is None or not process.is_running():
        return 0.0
    used = process.cpu_times()
    return float(used.user + used.system)


def _memory(points: list[tuple[int, int]]) -> dict[str, Any]:
    """Resident size over twenty stretches of the way after WARM_JOBS, each by its median: single samples show what a
    batch takes for a moment, and gives back. Flat = every stretch within FLAT of the first."""
    warm = [point for point in points if point[0] >= WARM_JOBS] or points
    width = max(1, -(-(warm[-1][0] - warm[0][0] + 1) // STRETCHES))
    stretches: dict[int, list[int]] = {}
    for done, size in warm:
        stretches.setdefault((done - warm[0][0]) // width, []).append(size)
    course = [statistics.median(sizes) for _, sizes in sorted(stretches.items())]
    low, high = min(course) / course[0], max(course) / course[0]
    return {
        "at_50000_mib": _mib(course[0]),
        "end_mib": _mib(course[-1]),
        "lowest": round(low, 3),
        "highest": round(high, 3),
        "lowest_sample_mib": _mib(min(size for _, size in warm)),
        "highest_sample_mib": _mib(max(size for _, size in warm)),
        "course_mib": [_mib(size) for size in course],
        "flat": low >= 1 - FLAT and high <= 1 + FLAT,
    }


def _mib(size: float) -> float:
    return round(size / (1 << 20), 1)
