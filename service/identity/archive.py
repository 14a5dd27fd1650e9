"""Reads single records by their place, without a group: what a copy of an ended job is answered from (R7).

One consumer for all readings, made when the first is wanted. It asks for the partitions of everything that is wanted
at the moment, each from its lowest wanted offset. Never raises for what is not there, never waits longer than `READ_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord, TopicPartition

from schemas.cancellation import is_asked_for
from service.bounded_stop import stop_within
from service.job import Place
from service.settings import KafkaSettings

log = logging.getLogger(__name__)

READ_S = 10.0  # of one record; a broker that restarts is back by then
POLL_MS = 100
FETCH_BYTES = 65_536  # of one partition; a larger record comes all the same
FAR = 200  # records: a wanted offset so far ahead is sought instead of read up to
POSITION_S = 0.05  # known at once, but for a log that was cut
RETRY_S = 0.5
STOP_S = 2.0


class Unread(Exception):
    """A record could not be read in time; whether it is there is unknown."""


class Archive:
    """`start` and `stop` once; `read` any number of times at once."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._wanted: dict[TopicPartition, dict[int, list[_Reading]]] = {}
        self._some = asyncio.Event()
        self._fresh = False  # something is wanted that the consumer was not told of
        self._task: asyncio.Task[None] | None = None
        self._consumer: AIOKafkaConsumer | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._serve(), name="archive")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_S)
        await self._close()
        for reading in self._all():
            reading.give_up()

    async def read(self, place: Place) -> bytes | None:
        """The value of the record at this place; None if there is none any more. Raises Unread."""
        record = await self.record(place)
        return record.value if record is not None else None

    async def record(self, place: Place) -> ConsumerRecord | None:
        """The record at this place; None if there is none any more. Raises Unread."""
        reading = _Reading(asyncio.get_running_loop().create_future(), time.monotonic() + READ_S)
        offsets = self._wanted.setdefault(TopicPartition(place.topic, place.partition), {})
        offsets.setdefault(place.offset, []).append(reading)
        self._fresh = True
        self._some.set()
        return await reading.answer

    # the one reader

    async def _serve(self) -> None:
        while True:
            await self._some.wait()
            try:
                consumer = await self._open()
                self._turn_to(consumer)
                for tp, records in (await consumer.getmany(timeout_ms=POLL_MS)).items():
                    self._match(consumer, tp, records)
                await self._miss(consumer)
            except asyncio.CancelledError as error:
                if is_asked_for():
                    raise
                await self._begin_again(error)  # the client library cancels its futures when a connection goes away
            except Exception as error:
                await self._begin_again(error)
            self._give_up()
            if not self._wanted:
                self._some.clear()
                if self._consumer is not None:
                    self._consumer.pause(*self._consumer.assignment())

    async def _open(self) -> AIOKafkaConsumer:
        if self._consumer is None:
            self._consumer = AIOKafkaConsumer(
                **self._settings.connection(),
                enable_auto_commit=False,
                auto_offset_reset="earliest",  # a place that is no more shows by a later record
                request_timeout_ms=self._settings.request_timeout_ms,
                max_partition_fetch_bytes=FETCH_BYTES,
                fetch_max_wait_ms=POLL_MS,
            )
            async with asyncio.timeout(READ_S):
                await self._consumer.start()
        return self._consumer

    async def _begin_again(self, error: BaseException) -> None:
        log.warning("records of ended jobs not read, tried again: %r", error)
        await self._close()
        self._fresh = True
        await asyncio.sleep(RETRY_S)

    async def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_within(STOP_S, consumer.stop())

    def _turn_to(self, consumer: AIOKafkaConsumer) -> None:
        """Makes it read what is wanted, and nothing else. A new assignment also forgets where logs ended before."""
        if self._fresh:
            self._fresh = False
            consumer.assign(list(self._wanted))
            for tp, offsets in self._wanted.items():
                consumer.seek(tp, min(offsets))
        elif done := [tp for tp in consumer.assignment() - self._wanted.keys() if tp not in consumer.paused()]:
            consumer.pause(*done)

    def _match(self, consumer: AIOKafkaConsumer, tp: TopicPartition, records: list[ConsumerRecord]) -> None:
        offsets = self._wanted.get(tp)
        if not offsets or not records:
            return
        for record in records:
            if readings := offsets.pop(record.offset, None):
                _tell(readings, record)
        if not offsets:
            del self._wanted[tp]
        if not offsets or self._fresh:  # a place that is wanted since this was asked for may lie before it
            return
        last = records[-1].offset
        for offset in [offset for offset in offsets if offset <= last]:  # compacted or deleted
            _tell(offsets.pop(offset), None)
        if not offsets:
            del self._wanted[tp]
        elif min(offsets) > last + FAR:
            consumer.seek(tp, min(offsets))

    async def _miss(self, consumer: AIOKafkaConsumer) -> None:
        """Places before the beginning of the log, and beyond the end of one that is another than it was."""
        for tp in list(self._wanted):
            if self._fresh or tp not in consumer.assignment() or (end := consumer.highwater(tp)) is None:
                continue
            try:
                async with asyncio.timeout(POSITION_S):
                    position = await consumer.position(tp)
            except TimeoutError:  # the log's beginning is being asked for
                continue
            offsets = self._wanted.get(tp, {})
            for offset in [offset for offset in offsets if offset < position or offset >= end]:
                _tell(offsets.pop(offset), None)
            if not offsets:
                self._wanted.pop(tp, None)

    def _give_up(self) -> None:
        now = time.monotonic()
        for tp, offsets in list(self._wanted.items()):
            for offset, readings in list(offsets.items()):
                if all(reading.until <= now or reading.answer.done() for reading in readings):
                    for reading in offsets.pop(offset):
                        reading.give_up()
            if not offsets:
                del self._wanted[tp]

    def _all(self) -> Iterable[_Reading]:
        return [r for offsets in self._wanted.values() for readings in offsets.values() for r in readings]


class _Reading:
    __slots__ = ("answer", "until")

    def __init__(self, answer: asyncio.Future[ConsumerRecord | None], until: float) -> None:
        self.answer = answer
        self.until = until  # monotonic

    def tell(self, record: ConsumerRecord | None) -> None:
        if not self.answer.done():
            self.answer.set_result(record)

    def give_up(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(Unread())


def _tell(readings: list[_Reading], record: ConsumerRecord | None) -> None:
    for reading in readings:
        reading.tell(record)
