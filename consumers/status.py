"""Reads the status topic from where a commit left off to its end: what ended without being committed (R4).

A plain consumer without a group, made for one reading and closed again. It reads uncommitted: status records are not
written in transactions, and what it is asked for of jobs topics are their real ends, open transactions included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import TopicPartition

from service.bounded_stop import stop_within
from service.job import Place
from service.ledger import Key
from service.settings import KafkaSettings

log = logging.getLogger(__name__)

POLL_MS = 200
BATCH = 2_000  # records per turn: a few milliseconds of the event loop
CALL_S = 5.0  # one question to the broker
STOP_S = 2.0


class LogReader:
    """An asynchronous context: bounds of partitions, and the status records of some."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._consumer = AIOKafkaConsumer(
            **settings.connection(),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            request_timeout_ms=settings.request_timeout_ms,
            fetch_max_wait_ms=100,
        )

    async def __aenter__(self) -> LogReader:
        try:
            async with asyncio.timeout(CALL_S):
                await self._consumer.start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        await stop_within(STOP_S, self._consumer.stop())

    async def bounds(self, keys: Collection[Key]) -> dict[Key, tuple[int, int]]:
        """First offset and end offset of each partition. Raises KafkaError, TimeoutError."""
        if not keys:
            return {}
        tps = [TopicPartition(*key) for key in keys]
        async with asyncio.timeout(CALL_S):
            begins, ends = await asyncio.gather(self._consumer.beginning_offsets(tps), self._consumer.end_offsets(tps))
        return {(tp.topic, tp.partition): (begins[tp], ends[tp]) for tp in tps}

    async def ended(
        self, topic: str, starts: Mapping[int, int], tell: Callable[[Place, int, int], Any], deadline: float
    ) -> dict[int, int]:
        """Calls `tell(place, offset, time in ms)` for every status record; returns the end offset per partition number.

        `starts`: first offset to read, per partition number. `deadline`: monotonic. Raises KafkaError, TimeoutError.
        """
        bounds = await self.bounds([(topic, number) for number in starts])
        ends: dict[int, int] = {}
        left: dict[TopicPartition, int] = {}
        first: dict[TopicPartition, int] = {}
        for number, start in starts.items():
            begin, end = bounds[(topic, number)]
            ends[number] = end
            if max(start, begin) < end:
                tp = TopicPartition(topic, number)
                left[tp] = end
                first[tp] = max(start, begin)
        if not left:
            return ends
        self._consumer.assign(list(left))
        for tp, offset in first.items():
            self._consumer.seek(tp, offset)
        while left:
            if time.monotonic() > deadline:
                raise TimeoutError(f"status partitions {sorted(tp.partition for tp in left)} not read to their end")
            for records in (await self._consumer.getmany(timeout_ms=POLL_MS, max_records=BATCH)).values():
                for record in records:
                    place = ended_at(record.value)
                    if place is not None:
                        tell(place, record.offset, record.timestamp)
            for tp in [tp for tp, end in left.items() if await self._position(tp) >= end]:
                del left[tp]
                self._consumer.pause(tp)
            await asyncio.sleep(0)
        return ends

    async def _position(self, tp: TopicPartition) -> int:
        async with asyncio.timeout(CALL_S):
            return int(await self._consumer.position(tp))


def ended_at(value: bytes | None) -> Place | None:
    """The place of the record that ended, its last one (R12); None for anything that is no status record."""
    if not value:
        return None
    try:
        status = orjson.loads(value)
        return Place.parse(status.get("place") or status["origin"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
