"""The witness: publishes a round's jobs and writes down everything that comes back, as a reader of the log sees it.

Owns the bench's own connections, which outlive broker restarts. Judges nothing: judgement.py does. Times are wall-clock
seconds, those of events as their writer stamped the record; writers and witness share one machine's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from client.reader import Reader, Step
from load.faults.jobs import Planned
from load.group import STATES, Group
from schemas.events import TERMINAL
from schemas.names import REPLIES, jobs_topic, status_topic
from service.job import Place

log = logging.getLogger(__name__)

CONNECT_S = 20.0
POLL_MS = 100
BATCH = 2000
# A publish may wait for a broker that is away; idempotent, so that it is written once even then.
PUBLISH_MS = 120_000
# Keys a tenant's jobs are spread over.
SPREAD = 16


@dataclass(slots=True)
class Attempt:
    """One numbered series of events."""

    worker: str  # empty: it was never announced
    started: float
    seq: int = 0  # next number expected
    tokens: int = 0  # next offset expected
    gaps: int = 0
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Terminal:
    at: float
    partition: int
    run: int
    kind: str
    attempt: str
    code: str
    duplicate: bool


class Trace:
    """All that is known of one job."""

    def __init__(self, planned: Planned, published: float) -> None:
        self.planned = planned
        self.published = published
        self.places: list[Place] = []
        self.failed_publish: str = ""
        self.attempts: dict[str, Attempt] = {}
        self.terminals: list[Terminal] = []
        self.settled: float | None = None  # its first status record
        self.reader = Reader()
        self.reader_gap = False
        self.torn = ""  # what does not fit between stream and result
        self._texts: dict[int, Any] = {}

    @property
    def starts(self) -> int:
        """Attempts that were announced."""
        return sum(bool(attempt.worker) for attempt in self.attempts.values())

    def take(self, event: dict[str, Any], at: float, partition: int) -> None:
        kind: str = event["type"]
        if kind != "waiting":
            self._number(event, kind, at)
        if kind in TERMINAL:
            code = (event.get("error") or {}).get("code", "")
            duplicate = event.get("duplicate") is True
            self.terminals.append(Terminal(at, partition, event["run"], kind, event["attempt"], code, duplicate))
        step = self.reader.feed(event)
        if step is Step.STARTED:
            self._texts = {}
        elif step is Step.CHUNK:
            for choice in event["chunk"]["choices"]:
                text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
                self._texts.setdefault(choice["index"], hashlib.sha256()).update(text.encode())
        elif step is Step.GAP:
            self.reader_gap = True
        elif step is Step.END and kind == "completed":
            self._compare(event)

    def _number(self, event: dict[str, Any], kind: str, at: float) -> None:
        attempt = self.attempts.get(event["attempt"])
        if attempt is None:
            attempt = self.attempts[event["attempt"]] = Attempt("", at)
        if kind == "started":
            attempt.worker = event["worker"]
        seq: int = event["seq"]
        if seq < attempt.seq:
            return  # a record written twice by the producer's retry; a reader ignores it
        attempt.gaps += seq - attempt.seq
        attempt.seq = seq + 1
        if kind == "chunk":
            attempt.chunks += 1
            attempt.gaps += event["offset"] != attempt.tokens
            attempt.tokens = event["offset"] + event["tokens"]

    def _compare(self, event: dict[str, Any]) -> None:
        """The result says the same as the stream, and has all that was asked for."""
        tokens = event["usage"]["completion_tokens"]
        if tokens != self.planned.tokens:
            self.torn = f"{tokens} tokens instead of {self.planned.tokens}"
        elif self.planned.stream and self.reader.attempt == event["attempt"]:
            told = [self._texts[index].hexdigest() for index in sorted(self._texts)]
            if self.reader.tokens != tokens or told != event["text_sha256"]:
                self.torn = f"the stream has {self.reader.tokens} tokens, the result {tokens}"


class Witness:
    """`async with Witness(bootstrap, pool, partitions) as witness`; one for all rounds of a bench."""

    def __init__(self, bootstrap: str, pool: str, partitions: int) -> None:
        self._bootstrap = bootstrap
        self._pool = pool
        self._partitions = partitions
        self._status = status_topic(pool)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.group = Group(bootstrap, pool)
        self.traces: dict[str, Trace] = {}

    async def __aenter__(self) -> Self:
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=4 << 20,
        )
        self._producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap, enable_idempotence=True, linger_ms=2, request_timeout_ms=PUBLISH_MS
        )
        async with asyncio.timeout(CONNECT_S):
            await self._consumer.start()
            await self._producer.start()
            places = []
            for topic in (REPLIES, self._status):
                for number in await self._producer.partitions_for(topic):
                    places.append(TopicPartition(topic, number))  # noqa: PERF401
            self._consumer.assign(places)
            await self._consumer.seek_to_end(*places)
            for place in places:
                await self._consumer.position(place)
        self._spawn(self._read())
        self._spawn(self.group.follow(len(await self._producer.partitions_for(STATES))))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stop in (self._producer.stop(), self._consumer.stop(), self.group.close()):
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(stop, 5)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # publishing

    async def publish(self, jobs: Iterable[Planned], began: float) -> None:
        """Each at its time after `began` (monotonic). Returns when every publish is acknowledged or given up."""
        sending = []
        for number, job in enumerate(jobs):
            if (ahead := began + job.at_s - time.monotonic()) > 0:
                await asyncio.sleep(ahead)
            trace = self.traces[job.id] = Trace(job, time.time())
            key = f"{job.tenant}|{number % SPREAD}".encode()
            sending += [asyncio.create_task(self._send(trace, key)) for _ in range(1 + job.twice)]
        await asyncio.gather(*sending)

    async def _send(self, trace: Trace, key: bytes) -> None:
        topic = jobs_topic(self._pool, trace.planned.tier)
        try:
            told = await self._producer.send_and_wait(topic, trace.planned.value, key=key)
        except KafkaError as error:
            trace.failed_publish = type(error).__name__
        else:
            trace.places.append(Place(told.topic, told.partition, told.offset))

    # reading

    async def _read(self) -> None:
        while True:
            try:
                for place, records in (await self._consumer.getmany(timeout_ms=POLL_MS, max_records=BATCH)).items():
                    for record in records:
                        self._note(place, record)
            except KafkaError as error:  # it goes on from where it was
                log.warning("reading: %r", error)
                await asyncio.sleep(0.2)

    def _note(self, place: TopicPartition, record: Any) -> None:
        if record.value is None:
            return
        at = record.timestamp / 1000
        if place.topic == self._status:
            told = orjson.loads(record.value)
            trace = self.traces.get(told["job_id"])
            if trace is not None and trace.settled is None:
                trace.settled = at
            return
        trace = self.traces.get((record.key or b"").decode())
        if trace is not None:
            trace.take(orjson.loads(record.value), at, place.partition)

    async def behind(self) -> list[str]:
        """As `Group.behind`."""
        return await self.group.behind(self._consumer, self._partitions)
