"""What the scheduler costs of the event loop: `python -m load.scheduler_rate [jobs] [tenants]`, no servers.

Jobs go put → rendered → admitted → first token → released at an engine that is always full, with a backlog.
Microseconds a job, by the scheduler's own count (what /metrics shows), and of the whole process with the tasks it
starts.
"""

from __future__ import annotations

import asyncio
import sys
import time

from service.engine.protocol import Capacity, Prepared
from service.frames import Head, Usage
from service.job import Job, Place, Record, Ticket
from service.scheduler.scheduler import Entry, Scheduler
from service.settings import SchedulerSettings

CAPACITY = Capacity(max_model_len=8192, max_num_seqs=544, kv_tokens=800_000, block_size=16, model="m", version="0")
RESERVED = 30
BACKLOG = 900  # jobs that wait, as many as a partition's window holds
TOGETHER = 4  # jobs that end in one turn of the loop
PROMPT = "river water mill wheel stone bridge bank flood " * 12


class Renderer:
    async def prepare(self, job: Job) -> Prepared:
        return Prepared(prompt_tokens=128, max_tokens=128, n=1)


class Exits:
    """Runs nothing: who is admitted is released by the measurement, in order."""

    def __init__(self) -> None:
        self.running: list[Entry] = []

    async def have(self, count: int) -> None:
        while len(self.running) < count:  # noqa: ASYNC110 (an event a job would be measured too)
            await asyncio.sleep(0)

    async def run(self, entry: Entry) -> None:
        self.running.append(entry)

    def refuse(self, job: Job, refusal: Exception) -> None:
        raise refusal

    def waiting(self, job: Job, reason: str, since: float) -> None:
        raise AssertionError("no job asked for it")


def made(number: int, tenants: int) -> Job:
    place = Place("inference.default.jobs.standard", 0, number)
    head = Head(
        topic=place.topic,
        partition=0,
        offset=number,
        epoch=1,
        origin=str(place),
        job_id=str(number),
        run=0,
        tenant=f"tenant-{number % tenants}",
        tier="standard",
        endpoint="/v1/completions",
        model="m",
        reply_topic="replies",
        reply_partition=None,
        stream=True,
        progress=False,
        inline_max_bytes=0,
        store="auto",
        ttl_days=None,
        metadata=None,
        digest="",
        trace={},
        broker_time=0.0,
    )
    record = Record(place, b"", b"x" * 700, (), 0)
    return Job(Ticket(place, 1), record, head, {"model": "m", "prompt": PROMPT, "max_tokens": 128}, 0.0)


async def measure(policy: str, jobs: int, tenants: int) -> tuple[float, float]:
    """(microseconds a job of the scheduler itself, of everything)."""
    scheduler = Scheduler(Renderer(), settings=SchedulerSettings.model_validate({"policy": policy}))
    exits = scheduler.exits = Exits()
    scheduler.start(CAPACITY, RESERVED, 0.06)
    waiting = [made(number, tenants) for number in range(jobs + BACKLOG)]
    for job in waiting[:BACKLOG]:
        scheduler.put(job)
    await exits.have(CAPACITY.max_num_seqs - RESERVED)
    own, began = scheduler.seconds, time.process_time()
    for number, job in enumerate(waiting[BACKLOG:]):
        if number % TOGETHER == 0:
            await asyncio.sleep(0)
        await exits.have(number + 1)
        entry = exits.running[number]
        entry.first_output()
        entry.usage = Usage(prompt=128, completion=128)
        scheduler.learn(entry.job, 128, 1)
        scheduler.release(entry.job.ticket)
        scheduler.put(job)
    spent = time.process_time() - began
    own = scheduler.seconds - own
    await scheduler.stop()
    return own / jobs * 1e6, spent / jobs * 1e6


def main() -> int:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    tenants = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    for policy in ("fair", "fifo") * 2:
        own, whole = asyncio.run(measure(policy, jobs, tenants))
        print(f"{policy}: {own:.1f} us a job in the scheduler, {whole:.1f} us with rendering and running tasks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
