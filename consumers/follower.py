"""Reads topics that everybody must know whole: once to their end, and from then on as they grow. Cancels, registries.

Without a group: every worker reads every record. Never decides anything: batches go, in the order of the log, to
whoever was named.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord, TopicPartition

from schemas.cancellation import is_asked_for
from service.bounded_stop import stop_within
from service.settings import KafkaSettings

log = logging.getLogger(__name__)

READ_S = 60.0  # to the end, at the worker's start
CALL_S = 5.0  # one question to the broker
POLL_MS = 500  # a long poll: what comes meanwhile is there at once
BATCH = 500  # records a turn: a few milliseconds
RETRY_FIRST_S, RETRY_MOST_S = 0.2, 5.0  # doubling, while the broker is away
STOP_S = 2.0


class TopicUnread(Exception):
    """A topic could not be read to its end; a worker that does not know all of it must not start."""


class Follower:
    """`take(records)` gets each batch, on the event loop; it is awaited if it returns something to await.

    `more()`: further topics to be read and how many partitions each has, asked again and again; they may come later.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        topic: str,
        take: Callable[[Sequence[ConsumerRecord]], Awaitable[None] | None],
        more: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._take = take
        self._more = more
        self._next: dict[TopicPartition, int] = {}  # first offset not read
        self._task: asyncio.Task[None] | None = None
        self._read = asyncio.Event()  # to the ends that were found first

    async def start(self, timeout_s: float = READ_S) -> None:
        """Returns when every record is known that was acknowledged before the call. Raises TopicUnread."""
        self._task = asyncio.create_task(self._follow(), name=f"follow {self._topic}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._read.wait()
        except TimeoutError:
            await self.stop()
            raise TopicUnread(
                f"{self._topic} could not be read to its end within {timeout_s:g} s; is the broker up?"
            ) from None

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2 * STOP_S)
            self._task = None

    async def _follow(self) -> None:
        delay = RETRY_FIRST_S
        while True:
            since = time.monotonic()
            consumer = AIOKafkaConsumer(
                **self._settings.connection(),
                enable_auto_commit=False,
                auto_offset_reset="earliest",  # also for a log that was cut
                isolation_level="read_committed",
                request_timeout_ms=self._settings.request_timeout_ms,
            )
            try:
                async with asyncio.timeout(CALL_S):
                    await consumer.start()
                await self._consume(consumer)
            except asyncio.CancelledError as error:
                if is_asked_for():
                    raise
                log.warning("topic cannot be read, tried again topic=%s: %r", self._topic, error)
            except Exception as error:
                log.warning("topic cannot be read, tried again topic=%s: %r", self._topic, error)
            finally:
                await stop_within(STOP_S, consumer.stop())
            if time.monotonic() - since > RETRY_MOST_S:
                delay = RETRY_FIRST_S
            await asyncio.sleep(delay)
            delay = min(delay * 2, RETRY_MOST_S)

    async def _consume(self, consumer: AIOKafkaConsumer) -> None:
        ends: dict[TopicPartition, int] = {}
        tps: set[TopicPartition] = set()
        while True:
            count = len(consumer.partitions_for_topic(self._topic) or ()) if tps else await self._partitions(consumer)
            counts = {self._topic: count, **self._more()}
            known = {TopicPartition(topic, number) for topic, most in counts.items() for number in range(most)}
            if not known <= tps:  # at the start, and when an operator added some
                tps |= known
                consumer.assign(list(tps))
                for tp in tps:
                    if tp in self._next:
                        consumer.seek(tp, self._next[tp])
                if not self._read.is_set():
                    ends = await _filled(consumer, list(tps))
            if not self._read.is_set() and not ends:
                self._read.set()
            turn = await consumer.getmany(timeout_ms=POLL_MS if self._read.is_set() else 100, max_records=BATCH)
            if records := [record for found in turn.values() for record in found]:
                taken = self._take(records)
                if taken is not None:
                    await taken
            for tp, found in turn.items():
                self._next[tp] = found[-1].offset + 1
            for tp in list(ends):
                async with asyncio.timeout(CALL_S):
                    if await consumer.position(tp) >= ends[tp]:
                        del ends[tp]
            await asyncio.sleep(0)

    async def _partitions(self, consumer: AIOKafkaConsumer) -> int:
        """How many partitions the topic has."""
        consumer.assign([TopicPartition(self._topic, 0)])  # makes the client ask for the topic's metadata
        async with asyncio.timeout(CALL_S):
            while not (count := len(consumer.partitions_for_topic(self._topic) or ())):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return count


async def _filled(consumer: AIOKafkaConsumer, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
    """The present ends of partitions that hold anything."""
    async with asyncio.timeout(CALL_S):
        begins, ends = await asyncio.gather(consumer.beginning_offsets(tps), consumer.end_offsets(tps))
    return {tp: end for tp, end in ends.items() if end > begins[tp]}
