"""The measuring client: publishes jobs, reads every reply, and notes when. Judges nothing.

A first-token delay is the client's own: from just before the record is handed to the producer to when the first chunk
was read. Delivery sends a first chunk at once and flushes later ones every 50 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Self

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from load.fairness.plan import TIER, Arrival, Shape, Writer
from schemas.events import TERMINAL
from schemas.names import H_TYPE, REPLIES, jobs_topic

CONNECT_S = 20.0
POLL_MS = 100
BATCH = 2000
KINDS = frozenset(kind.encode() for kind in TERMINAL)


class End(NamedTuple):
    """How a job ended, this client's or not."""

    tenant: str
    at: float  # monotonic
    kind: str
    prompt: int  # tokens
    cached: int  # of them
    completion: int
    received: float  # by the worker; wall clock
    admitted: float | None  # by its scheduler; wall clock
    first: float | None  # token, at the engine; wall clock


@dataclass(slots=True, eq=False)
class Sent:
    """A job that this client published. Monotonic seconds; `published_at` wall clock."""

    tenant: str
    published: float
    published_at: float
    first: float | None = None
    end: End | None = None

    def stages(self) -> dict[str, float] | None:
        """Where the time to its first token went, seconds: there, the scheduler's queue, the engine, and back."""
        end = self.end
        if end is None or end.admitted is None or end.first is None or self.first is None:
            return None
        read_at = self.published_at + self.first - self.published
        return {
            "to_worker": end.received - self.published_at,
            "queue": end.admitted - end.received,
            "engine": end.first - end.admitted,
            "to_client": read_at - end.first,
        }


class Client:
    """`async with Client(bootstrap) as client`. One connection for any number of windows."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self.jobs: dict[bytes, Sent] = {}
        self.ends: list[End] = []
        self.flying = 0  # published and not ended
        self.on_end: Callable[[End], None] = lambda end: None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap, enable_auto_commit=False, max_partition_fetch_bytes=4 << 20
        )
        self._producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap, acks="all", linger_ms=0)
        async with asyncio.timeout(CONNECT_S):
            await self._consumer.start()
            await self._producer.start()
            places = [TopicPartition(REPLIES, number) for number in await self._producer.partitions_for(REPLIES)]
            self._consumer.assign(places)
            await self._consumer.seek_to_end(*places)
            for place in places:
                await self._consumer.position(place)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        for stop in (self._producer.stop(), self._consumer.stop()):
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(stop, 5)

    def forget(self) -> None:
        """What still comes of the jobs so far is of no interest."""
        self.jobs = {}
        self.ends = []
        self.flying = 0
        self.on_end = lambda end: None

    def raise_problem(self) -> None:
        """Raises what ended the reading; every wait of a measurement ends with this."""
        if self._reading is not None and self._reading.done():
            self._reading.result()

    # publishing

    async def publish(self, pool: str, tenant: str, job_id: str, value: bytes) -> Sent:
        sent = self.jobs[job_id.encode()] = Sent(tenant, time.monotonic(), time.time())
        self.flying += 1
        await self._producer.send(jobs_topic(pool, TIER), value, key=tenant.encode())
        return sent

    async def publish_at(self, pool: str, writer: Writer, plan: Sequence[Arrival], prompt: int, began: float) -> None:
        """Each at its time after `began`."""
        for one in plan:
            if (ahead := began + one.at_s - time.monotonic()) > 0:
                await asyncio.sleep(ahead)
            value = writer.value(one.tenant, one.number, prompt, one.tokens)
            await self.publish(pool, one.tenant, writer.id(one.tenant, one.number), value)

    async def publish_all(
        self, pool: str, writer: Writer, tenant: str, values: Iterable[bytes], first: int = 0
    ) -> None:
        """A backlog, as fast as the broker takes it."""
        for number, value in enumerate(values, first):
            await self.publish(pool, tenant, writer.id(tenant, number), value)
        await self._producer.flush()

    # reading

    async def _read(self) -> None:
        while True:
            for records in (await self._consumer.getmany(timeout_ms=POLL_MS, max_records=BATCH)).values():
                now = time.monotonic()
                for record in records:
                    if record.value is not None:
                        self._take(record, now)

    def _take(self, record: Any, now: float) -> None:
        kind = next((value for name, value in record.headers if name == H_TYPE), b"")
        sent = self.jobs.get(record.key)
        if kind == b"chunk":
            if sent is not None and sent.first is None:
                sent.first = now
        elif kind in KINDS:
            event = orjson.loads(record.value)
            usage = event.get("usage") or {}
            end = End(
                tenant=event["tenant"],
                at=now,
                kind=event["type"],
                prompt=usage.get("prompt_tokens") or 0,
                cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
                completion=usage.get("completion_tokens") or 0,
                received=(received := _received(event)),
                admitted=_after(event, "queue_ms", received),
                first=_after(event, "first_token_ms", received),
            )
            self.ends.append(end)
            if sent is not None and sent.end is None:
                sent.end = end
                self.flying -= 1
                self.on_end(end)


def _received(event: dict[str, Any]) -> float:
    total = (event.get("timings") or {}).get("total_ms") or 0.0
    return datetime.fromisoformat(event["at"]).timestamp() - total / 1000


def _after(event: dict[str, Any], stage: str, received: float) -> float | None:
    took = (event.get("timings") or {}).get(stage)
    return received + took / 1000 if took is not None else None


class Loop:
    """A closed loop of one tenant that fills up what the others leave: as long as fewer than `in_flight` jobs of all
    tenants are on their way, it publishes one. So the engine stays equally full, and nothing queues."""

    def __init__(
        self, client: Client, pool: str, writer: Writer, tenant: str, shape: Shape, tokens: Sequence[int]
    ) -> None:
        self.in_flight = 0
        self._client = client
        self._pool = pool
        self._writer = writer
        self._tenant = tenant
        self._shape = shape
        self._tokens = tokens  # of the outputs, in turn
        self._wake = asyncio.Event()

    def end(self, end: End) -> None:
        self._wake.set()

    def set(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        number = 0
        while True:
            while self._client.flying < self.in_flight:
                tokens = self._tokens[number % len(self._tokens)]
                value = self._writer.value(self._tenant, number, self._shape.prompt, tokens)
                await self._client.publish(self._pool, self._tenant, self._writer.id(self._tenant, number), value)
                number += 1
            self._wake.clear()
            await self._wake.wait()
