"""What the delivery tests share: topics of their own, a link, synthetic jobs, and a reader of everything written."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import orjson
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAlreadyExistsError

from schemas.events import TERMINAL, read_event
from schemas.names import CHAT, DEAD_LETTERS, USAGE, status_topic
from service.delivery.link import Link
from service.delivery.stream import Stream
from service.frames import Delta, Ended, Error, Head, Pressure, Timing, Usage
from service.job import Place, Record
from service.settings import DeliverySettings, KafkaSettings, Settings, StoreSettings

LEASE_S = 60.0
WAIT_S = 30.0
PARTITIONS = 3


async def create_topics(bootstrap: str, *names: str, partitions: int = PARTITIONS) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        for name in names:
            with contextlib.suppress(TopicAlreadyExistsError):
                await admin.create_topics([NewTopic(name, partitions, 1)])
    finally:
        await admin.close()


async def delete_topics(bootstrap: str, *names: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.delete_topics(list(names))
    finally:
        await admin.close()


async def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s:g} s for {what}"
        await asyncio.sleep(0.01)


class Log:
    """Reads everything written to some topics from now on."""

    def __init__(self, bootstrap: str, *topics: str, connection: Mapping[str, Any] | None = None) -> None:
        self._connection = connection or {"bootstrap_servers": bootstrap}
        self._topics = topics
        self.records: list[ConsumerRecord] = []

    async def __aenter__(self) -> Self:
        self._consumer = AIOKafkaConsumer(**self._connection, enable_auto_commit=False)
        await self._consumer.start()
        places = []
        for topic in self._topics:
            count = 0
            while not count:
                self._consumer._client.add_topic(topic)
                await self._consumer._client.force_metadata_update()
                count = len(self._consumer.partitions_for_topic(topic) or ())
                await asyncio.sleep(0.01)
            places += [TopicPartition(topic, number) for number in range(count)]
        self._consumer.assign(places)
        await self._consumer.seek_to_end(*places)
        for place in places:
            await self._consumer.position(place)
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._consumer.stop()

    async def _read(self) -> None:
        while True:
            for records in (await self._consumer.getmany(timeout_ms=50)).values():
                self.records += records

    def of(self, topic: str) -> list[ConsumerRecord]:
        return [r for r in self.records if r.topic == topic]

    def events(self, job_id: str) -> list[dict[str, Any]]:
        found = [orjson.loads(r.value) for r in self.records if r.key == job_id.encode() and dict(r.headers).get("t")]
        return [e for e in found if e["job_id"] == job_id]

    def terminals(self, job_id: str) -> list[dict[str, Any]]:
        return [e for e in self.events(job_id) if e["type"] in TERMINAL]

    def valid(self, job_id: str) -> None:
        """Every event of the job parses as what contract.md says."""
        for record in self.records:
            if record.key == job_id.encode() and dict(record.headers).get("t"):
                event = read_event(record.value)
                headers = dict(record.headers)
                assert headers["t"].decode() == event.type
                if event.type != "waiting":
                    assert headers["a"].decode() == event.attempt
                    assert int(headers["s"]) == event.seq


class Room:
    """A link with a pool and topics of its own."""

    def __init__(
        self, bootstrap: str, store: str, state: Path, mode: str = "process", name: str = "", **delivery: Any
    ) -> None:
        self.name = name or f"delivery-{uuid.uuid4().hex[:8]}"
        self.bootstrap = bootstrap
        self.replies = f"{self.name}.replies"
        self.jobs = f"inference.{self.name}.jobs.standard"
        self.status = status_topic(self.name)
        self.settings = Settings(
            pool=self.name,
            worker=self.name,
            state_dir=state,
            kafka=KafkaSettings(bootstrap=bootstrap),
            store=StoreSettings(endpoint=store, deadline_s=10),
            delivery=DeliverySettings(mode=mode, **delivery),  # type: ignore[arg-type]
        )
        self.ended: list[Ended] = []
        self.pressures: list[Pressure] = []
        self.link = Link(self.settings, self.ended.append, self.pressures.append)
        self._offsets = 0

    async def topics(self) -> None:
        await create_topics(self.bootstrap, self.replies, self.status)
        await create_topics(self.bootstrap, USAGE, DEAD_LETTERS, partitions=6)

    @contextlib.asynccontextmanager
    async def open(self, lease: bool = True) -> AsyncIterator[Log]:
        await self.topics()
        async with Log(self.bootstrap, self.replies, self.status, USAGE, DEAD_LETTERS) as log:
            await self.link.start()
            if lease:
                self.link.lease(time.monotonic() + LEASE_S)
            try:
                yield log
            finally:
                await self.link.stop(5.0)
        await delete_topics(self.bootstrap, self.replies, self.status)

    def head(self, **changes: Any) -> Head:
        self._offsets += 1
        offset = self._offsets
        fields: dict[str, Any] = {
            "topic": self.jobs,
            "partition": 1,
            "offset": offset,
            "epoch": 1,
            "origin": f"{self.jobs}/1/{offset}",
            "job_id": f"{self.name}-{offset}",
            "run": 0,
            "tenant": "acme",
            "tier": "standard",
            "endpoint": CHAT,
            "model": "simulated:test",
            "reply_topic": self.replies,
            "reply_partition": None,
            "stream": True,
            "progress": True,
            "inline_max_bytes": 262_144,
            "store": "auto",
            "ttl_days": None,
            "metadata": {"k": "v"},
            "digest": "0" * 64,
            "trace": {},
            "broker_time": time.time(),
        }
        return Head(**{**fields, **changes})

    def record(self, head: Head) -> Record:
        place = Place(head.topic, head.partition, head.offset)
        return Record(place, b"acme", b'{"the":"job"}', (("h", b"1"),), int(head.broker_time * 1000))

    def stream(self, head: Head | None = None, **changes: Any) -> Stream:
        head = head or self.head(**changes)
        return self.link.open(head, announce=True, prompt_tokens=7, record=self.record(head))

    async def run(self, stream: Stream, texts: list[str], pause_s: float = 0.0) -> None:
        for text in texts:
            stream.send([Delta(0, text, 1)])
            await asyncio.sleep(pause_s)

    def end(self, stream: Stream, kind: str = "completed", tokens: int = 0, error: Error | None = None) -> None:
        now = time.time()
        timing = Timing(now - 1, now - 0.9, now - 0.8, now - 0.7, now - 0.5, now - 0.1, now)
        stream.end(kind, Usage(7, tokens, 3), timing, error)


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """Streamed text of one choice over chunk events."""
    parts = []
    for event in events:
        if event["type"] == "chunk":
            choices = [choice for choice in event["chunk"]["choices"] if choice["index"] == index]
            parts += [(c.get("delta") or c).get("content") or c.get("text") or "" for c in choices]
    return "".join(parts)


def numbering(events: list[dict[str, Any]]) -> None:
    """Within each attempt seq runs 0, 1, 2 …, and offsets are contiguous."""
    attempts: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["type"] != "waiting":
            attempts.setdefault(event["attempt"], []).append(event)
    for found in attempts.values():
        assert [e["seq"] for e in found] == list(range(len(found))), [(e["type"], e["seq"]) for e in found]
        expected = 0
        for event in found:
            if event["type"] == "chunk":
                assert event["offset"] == expected
                expected += event["tokens"]
