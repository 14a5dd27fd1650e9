"""Parts for the consumer group's tests: topics of their own, a worker that is only the consuming half, a producer.

Also a program: `python -m tests.integration.group_kit '<json>'` is a member process that can be killed. It prints one
JSON line per event, so that its parent can wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from consumers import JobsConsumer
from schemas import names
from service.job import Place, Record, Ticket
from service.ledger import Book, Key
from service.settings import KafkaSettings, Settings

PARTITIONS = 6


async def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


def settings_for(pool: str, bootstrap: str, **kafka: Any) -> Settings:
    return Settings(pool=pool, partitions=PARTITIONS, kafka=KafkaSettings(bootstrap=bootstrap, **kafka))


class Pool:
    """The topics of a pool with a name of its own, and a producer into them."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.bootstrap = bootstrap
        self.name = name
        self.settings = settings_for(name, bootstrap)
        self.admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        self.producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=2)
        self.sent: set[Place] = set()

    async def publish(self, count: int, **fields: Any) -> list[Place]:
        """Records spread over all tiers and partitions."""
        futures = []
        for n in range(count):
            topic = names.jobs_topic(self.name, names.TIERS[n % 3])
            value = json.dumps({"n": n, **fields}).encode()
            futures.append(await self.producer.send(topic, value, partition=(n // 3) % PARTITIONS))
        places = [Place(m.topic, m.partition, m.offset) for m in await asyncio.gather(*futures)]
        self.sent.update(places)
        return places

    async def committed(self) -> dict[Key, Any]:
        found = await self.admin.list_consumer_group_offsets(names.group_id(self.name))
        return {(tp.topic, tp.partition): value for tp, value in found.items()}


@contextlib.asynccontextmanager
async def pool_of(bootstrap: str) -> AsyncIterator[Pool]:
    pool = Pool(bootstrap, f"consumers-{uuid.uuid4().hex[:8]}")
    topics = [*names.jobs_topics(pool.name), names.status_topic(pool.name)]
    await pool.admin.start()
    await pool.admin.create_topics([NewTopic(topic, PARTITIONS, 1) for topic in topics])
    await pool.producer.start()
    try:
        yield pool
    finally:
        await pool.producer.stop()
        with contextlib.suppress(Exception):
            await pool.admin.delete_topics(topics)
        await pool.admin.close()


class Worker:
    """Reception and outlet of a consumer whose jobs take `job_s` seconds and whose delivery is a status record.

    As in the real one, a job completes when its status record is acknowledged, in the order of the status offsets.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        job_s: Callable[[Record], float | None] = lambda record: 0.0,
        high: int = 100,
        tell: Callable[..., None] = lambda *a, **k: None,
    ) -> None:
        self.book = Book(high=high, max_span=32_768)
        self.consumer = JobsConsumer(settings, self.book, self, self)
        self.settings = settings
        self.admitted: Counter[Place] = Counter()
        self.ended: set[Place] = set()
        self.records: list[Record] = []
        self.poisoned: list[tuple[Record, str]] = []
        self.live: dict[Place, asyncio.Task[None]] = {}
        self.doubled: list[Place] = []
        self.starts: dict[Place, int] = {}
        self.careful: set[Place] = set()
        self.lease_until = 0.0
        self.barriers = 0
        self.released: list[set[Key]] = []
        self._job_s = job_s
        self._tell = tell
        self._held = asyncio.Event()
        self._held.set()
        self._producer = AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap, acks="all", linger_ms=2)
        self._reports: asyncio.Queue[tuple[Any, Ticket]] = asyncio.Queue()
        self._reporter: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._producer.start()
        self._reporter = asyncio.create_task(self._report())
        await self.consumer.start()

    async def stop(self, *, clean: bool = True) -> bool:
        """As a drain whose time is up: running jobs are abandoned, then the consumer leaves."""
        self.consumer.pause_all("draining")
        self.abandon(set(self.book.keys))
        stored = await self.consumer.stop(clean=clean)
        await self.vanish()
        return stored

    async def vanish(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        for task in self.live.values():
            task.cancel()
        stopping = asyncio.create_task(self._producer.stop())
        await asyncio.wait({stopping}, timeout=2.0)

    # Reception

    def admit(self, record: Record, ticket: Ticket) -> None:
        place = record.place
        self.records.append(record)
        self.admitted[place] += 1
        self.starts[place] = self.book.starts(ticket)
        if self.book.careful(ticket):
            self.careful.add(place)
        if place in self.live:
            self.doubled.append(place)
        self._tell("admitted", place)
        self.live[place] = asyncio.create_task(self._run(record, ticket))

    def poison(self, record: Record, ticket: Ticket, message: str) -> None:
        self.poisoned.append((record, message))
        self.book.complete(ticket)

    def abandon(self, lost: set[Key]) -> None:
        for place in [place for place in self.live if place[:2] in lost]:
            self.live.pop(place).cancel()

    async def _run(self, record: Record, ticket: Ticket) -> None:
        self.book.start(ticket)
        seconds = self._job_s(record)
        await asyncio.sleep(1e6 if seconds is None else seconds)
        while not self._held.is_set() or time.monotonic() > self.lease_until:
            await asyncio.sleep(0.01)
        if not self.book.owns(ticket):
            return
        value = json.dumps({"origin": str(ticket.place), "kind": "completed"}).encode()
        sent = await self._producer.send(
            names.status_topic(self.settings.pool), value, partition=ticket.place.partition
        )
        self._reports.put_nowait((sent, ticket))

    async def _report(self) -> None:
        while True:
            sent, ticket = await self._reports.get()
            metadata = await sent
            self.ended.add(ticket.place)
            self._tell("ended", ticket.place)
            if self.book.complete(ticket, metadata.offset):
                self.live.pop(ticket.place, None)
            self._reports.task_done()

    # Outlet

    def lease(self, until_monotonic: float) -> None:
        self.lease_until = until_monotonic

    async def barrier(self) -> None:
        self.barriers += 1
        self._held.clear()
        await self._reports.join()

    def release(self, lost: set[Key]) -> None:
        self.released.append(lost)
        self._held.set()


async def member(options: dict[str, Any]) -> None:
    """A member process: jobs with `"hold": true` never end. Runs until it is killed or told to stop on stdin."""

    def tell(event: str, place: Place | None = None, **more: Any) -> None:
        print(json.dumps({"event": event, "place": place and list(place), **more}), flush=True)

    worker = Worker(
        settings_for(options["pool"], options["bootstrap"], instance=options.get("instance", "")),
        job_s=lambda record: None if json.loads(record.value or b"{}").get("hold") else 0.0,
        tell=tell,
    )
    await worker.start()
    tell("joined", numbers=sorted({number for _, number in worker.consumer.assignment}))
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    commits = 0
    waiting = asyncio.create_task(reader.read())
    while not waiting.done():
        await asyncio.wait({waiting}, timeout=0.1)
        if worker.consumer.committer.commits != commits:
            commits = worker.consumer.committer.commits
            tell("committed", live=len(worker.live))
    tell("stopped", stored=await worker.stop(), doubled=len(worker.doubled))


if __name__ == "__main__":
    asyncio.run(member(json.loads(sys.argv[1])))
