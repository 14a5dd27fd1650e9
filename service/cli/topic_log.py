"""Reads records of topics for people: from a time on, to the present end or for ever, without a consumer group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from heapq import merge
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from client import Reader, UnknownTopic, Unreachable
from client.connection import REMEDY
from schemas.errors import ErrorCode
from schemas.security import PLAINTEXT, KafkaSecurity
from service.bounded_stop import stop_within

T = TypeVar("T")

# Seconds a broker has for one answer before it counts as not reachable.
ANSWER_S = 5.0
# Milliseconds of one poll: how long the end of a bounded read may go unnoticed.
POLL_MS = 200


class Record(Protocol):
    """What the commands look at in a consumed record; `timestamp` is the broker's, in milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


def refuses_another(reader: Reader, event: Mapping[str, Any]) -> bool:
    """Whether an event refuses another record under the id of a job that has begun: `id_conflict`, told at once where
    the two are answered on different partitions. It ends nothing for whoever looks at the job on all of them.
    """
    return (
        event["type"] == "failed"
        and (event.get("error") or {}).get("code") == ErrorCode.ID_CONFLICT
        and event["run"] == reader.run
        and reader.attempt is not None
    )


class TopicLog:
    """An async context manager. One read at a time."""

    def __init__(self, bootstrap: str, security: KafkaSecurity = PLAINTEXT) -> None:
        self._bootstrap = bootstrap
        self._security = security
        self._consumer: AIOKafkaConsumer | None = None
        self._topics: set[str] = set()
        self.whole = True  # whether the last bounded read came to its end in the time given
        self.reached: dict[TopicPartition, int] = {}  # where the last bounded read ended

    async def __aenter__(self) -> Self:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            **self._security.arguments(),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            max_partition_fetch_bytes=4 << 20,
            fetch_max_wait_ms=POLL_MS,
        )
        self._consumer = consumer
        try:
            await self._answered(consumer.start())
            self._topics = await self._answered(consumer.topics())
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def has(self, topic: str) -> bool:
        return topic in self._topics

    async def partitions(self, topic: str) -> list[TopicPartition]:
        """Raises UnknownTopic, Unreachable."""
        if topic not in self._topics:
            raise UnknownTopic(
                f"there is no topic {topic} at {self._bootstrap}: run `headrace topics apply`, or check the name"
            )
        consumer = self._open()
        consumer.assign([TopicPartition(topic, 0)])  # makes the client ask for the topic's metadata
        ends = time.monotonic() + ANSWER_S
        while not (numbers := consumer.partitions_for_topic(topic)):
            if time.monotonic() > ends:
                raise Unreachable(f"the broker at {self._bootstrap} says nothing about {topic}")
            await asyncio.sleep(0.02)
        return [TopicPartition(topic, number) for number in sorted(numbers)]

    async def read(
        self,
        places: Sequence[TopicPartition],
        *,
        since_s: float | None,
        until_s: float | None = None,
        follow: bool = False,
        limit_s: float | None = None,
        starts: Mapping[TopicPartition, int] | None = None,
    ) -> AsyncIterator[Record]:
        """Records of `places` not older than `since_s` seconds; None = only new ones, or those from `starts` on.

        `until_s`: nor from the first record on that is younger than so many seconds.
        Without `follow` up to the end at the time of the call, at most for `limit_s` seconds: then `whole` is False.
        """
        consumer = self._open()
        consumer.assign(list(places))
        ends = await self._answered(consumer.end_offsets(places))
        begins = {**ends, **(starts or {})}
        if since_s is not None:
            begins.update(await self._offsets(places, since_s))
        if until_s is not None:
            ends.update(await self._offsets(places, until_s))
        for place, offset in begins.items():
            consumer.seek(place, offset)
        self.whole, self.reached = True, dict(ends)
        until = None if limit_s is None else time.monotonic() + limit_s
        open_ends = {place: end for place, end in ends.items() if begins[place] < end}
        while follow or open_ends:
            if until is not None and time.monotonic() > until:
                self.whole = False
                return
            for place, records in (await consumer.getmany(timeout_ms=POLL_MS)).items():
                for record in records:
                    if follow or record.offset < ends[place]:
                        yield record
            if not follow:
                for place in list(open_ends):
                    if await consumer.position(place) >= open_ends[place]:
                        del open_ends[place]
                        consumer.pause(place)

    async def job(
        self, id: str, places: Sequence[TopicPartition], *, since_s: float, limit_s: float | None = None
    ) -> list[Record]:
        """The records with this job's key up to the present end, in the order of their times.

        Within a partition the order stays that of the log, which is what the rules for readers go by; across
        partitions there is none, so time decides, and the same records always come in the same order.
        """
        found: dict[int, list[Record]] = {}
        key = id.encode()
        async for record in self.read(places, since_s=since_s, limit_s=limit_s):
            if record.key == key:
                found.setdefault(record.partition, []).append(record)
        return list(merge(*(found[number] for number in sorted(found)), key=lambda record: record.timestamp))

    async def _offsets(self, places: Sequence[TopicPartition], ago_s: float) -> dict[TopicPartition, int]:
        """Of the first record that is not older, where there is one."""
        moment = max(0, int((time.time() - ago_s) * 1000))
        found = await self._answered(self._open().offsets_for_times(dict.fromkeys(places, moment)))
        return {place: at.offset for place, at in found.items() if at is not None}

    async def record_at(self, topic: str, partition: int, offset: int) -> Record | None:
        """The record at this very place; None when it is there no longer."""
        place = TopicPartition(topic, partition)
        consumer = self._open()
        consumer.assign([place])
        begins = (await self._answered(consumer.beginning_offsets([place])))[place]
        ends = (await self._answered(consumer.end_offsets([place])))[place]
        if not begins <= offset < ends:
            return None
        consumer.seek(place, offset)
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until:
            for records in (await consumer.getmany(timeout_ms=POLL_MS, max_records=1)).values():
                return records[0] if records[0].offset == offset else None
        return None

    async def _answered(self, question: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(ANSWER_S):  # wait_for may swallow a cancellation (Python 3.11)
                return await question
        except (KafkaError, TimeoutError):
            raise Unreachable(f"no Kafka broker answers at {self._bootstrap}{self._security.hint}: {REMEDY}") from None

    def _open(self) -> AIOKafkaConsumer:
        assert self._consumer is not None, "use it as an async context manager"
        return self._consumer

    async def _stop(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_within(ANSWER_S, consumer.stop())
