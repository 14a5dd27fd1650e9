"""Fills the window from the status topic, in the background, for partition numbers that came to this worker (R7).

Each number is read from an hour back (or from where it was read to before) to its end. Admission waits for a few
thousand records, which take less time than the rest of taking partitions over, and never for more; those are read in
short turns of the loop, and three times as long is left to the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import TopicPartition

from schemas.cancellation import is_asked_for
from service.bounded_stop import stop_within
from service.identity.retelling import identity_of, read_status
from service.identity.window import Identity, Spot
from service.settings import KafkaSettings

log = logging.getLogger(__name__)

POLL_MS = 200
BATCH = 500  # records a turn: about 5 ms
REST = 3.0  # rests so many times as long as a turn took
FEW = 5_000  # records that are read without a rest, and waited for
CALL_S = 5.0  # one question to the broker
RETRY_S = 1.0
STOP_S = 2.0
WAIT_S = 0.1  # between looks at whether a reading has ended

Learn = Callable[[Identity, Spot, float], None]  # identity, where its status record lies, when it ended (wall clock)


class History:
    """`learn` is called for each end found. `span_s`, `most`: those of the window."""

    def __init__(self, settings: KafkaSettings, status_topic: str, learn: Learn, *, span_s: float, most: int) -> None:
        self._settings = settings
        self._topic = status_topic
        self._learn = learn
        self._span_s = span_s
        self._most = most
        self._next: dict[int, int] = {}  # partition number → first offset not read
        self._due: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()  # nothing is left to be read, or too much to wait for
        self.ready.set()

    def recall(self, numbers: Collection[int]) -> None:
        """These partition numbers came to this worker."""
        if not numbers:
            return
        self._due |= set(numbers)
        self.ready.clear()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._load(), name="history")

    async def known(self, numbers: Collection[int]) -> None:
        """Reads these numbers too, and returns when they are read to the ends that they had at this call."""
        while self._due.intersection(numbers):  # noqa: ASYNC110 (one that has begun may have looked for the ends before)
            await asyncio.sleep(WAIT_S)
        self.recall(numbers)
        while self._due.intersection(numbers):  # noqa: ASYNC110
            await asyncio.sleep(WAIT_S)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=2 * STOP_S)

    async def _load(self) -> None:
        while self._due:
            numbers = frozenset(self._due)
            consumer = AIOKafkaConsumer(
                **self._settings.connection(),
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                request_timeout_ms=self._settings.request_timeout_ms,
                fetch_max_wait_ms=100,
            )
            try:
                async with asyncio.timeout(CALL_S):
                    await consumer.start()
                await self._read(consumer, numbers)
                self._due -= numbers
            except asyncio.CancelledError as error:
                if is_asked_for():
                    raise
                log.warning("ended jobs of the last hour not read yet, tried again: %r", error)
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                log.warning("ended jobs of the last hour not read yet, tried again: %r", error)
                await asyncio.sleep(RETRY_S)
            finally:
                await stop_within(STOP_S, consumer.stop())
        self.ready.set()

    async def _read(self, consumer: AIOKafkaConsumer, numbers: frozenset[int]) -> None:
        began, found = time.monotonic(), 0
        left = await self._bounds(consumer, numbers)
        if not left:
            return
        few = sum(end - start for start, end in left.values()) <= FEW
        if not few:
            self.ready.set()
        consumer.assign(list(left))
        for tp, (start, _) in left.items():
            consumer.seek(tp, start)
        while left:
            turn = await consumer.getmany(timeout_ms=POLL_MS, max_records=BATCH)
            since = time.monotonic()
            for tp, records in turn.items():
                for record in records:
                    found += self._tell(tp.partition, record)
            for tp in list(left):
                async with asyncio.timeout(CALL_S):
                    position = await consumer.position(tp)
                self._next[tp.partition] = position
                if position >= left[tp][1]:
                    del left[tp]
                    consumer.pause(tp)
            await asyncio.sleep(REST * (time.monotonic() - since) if turn and not few else 0)
        log.info("recalled %d ended jobs of %d partitions in %.3f s", found, len(numbers), time.monotonic() - began)

    def _tell(self, number: int, record: Any) -> bool:
        status = read_status(record.value)
        identity = identity_of(status) if status is not None else None
        if identity is None:
            return False
        self._learn(identity, Spot(number, record.offset), record.timestamp / 1000)
        return True

    async def _bounds(
        self, consumer: AIOKafkaConsumer, numbers: frozenset[int]
    ) -> dict[TopicPartition, tuple[int, int]]:
        """First offset to read and end, for partitions that have something; together at most `most` records."""
        tps = [TopicPartition(self._topic, number) for number in numbers]
        since = int((time.time() - self._span_s) * 1000)
        async with asyncio.timeout(CALL_S):
            ends, by_time = await asyncio.gather(
                consumer.end_offsets(tps), consumer.offsets_for_times(dict.fromkeys(tps, since))
            )
        found: dict[TopicPartition, tuple[int, int]] = {}
        for tp in tps:
            at, end = by_time[tp], ends[tp]
            if at is not None and (start := max(at.offset, self._next.get(tp.partition, 0))) < end:
                found[tp] = (start, end)
        total = sum(end - start for start, end in found.values())
        if total > self._most:
            share = self._most / total
            found = {tp: (end - int((end - start) * share), end) for tp, (start, end) in found.items()}
        return {tp: bounds for tp, bounds in found.items() if bounds[0] < bounds[1]}
