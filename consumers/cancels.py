"""Reads `inference.cancel`: once to its end, before the worker joins its group, and from then on as it grows (R13).

Without a group: every worker reads every cancel, since any of them may hold the job, or be given it later. Never
decides anything: cancels go, in the order of the log, to whoever was named.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord, TopicPartition
from pydantic import ValidationError

from schemas.names import CANCEL
from schemas.records import CancelRecord
from service.cancels import Wish
from service.settings import KafkaSettings
from service.topics import CANCEL_RETENTION_MS

log = logging.getLogger(__name__)

READ_S = 60.0  # to the end, at the worker's start
CALL_S = 5.0  # one question to the broker
POLL_MS = 500  # a long poll: what comes meanwhile is there at once
BATCH = 500  # records a turn: a few milliseconds
RETRY_FIRST_S, RETRY_MOST_S = 0.2, 5.0  # doubling, while the broker is away
STOP_S = 2.0


class CancelsUnread(Exception):
    """The cancel topic could not be read to its end; a worker that does not know all cancels must not start."""


class CancelReader:
    """`take(wishes)` gets each batch, on the event loop."""

    def __init__(self, settings: KafkaSettings, take: Callable[[Sequence[Wish]], None]) -> None:
        self._settings = settings
        self._take = take
        self._next: dict[int, int] = {}  # partition → first offset not read
        self._task: asyncio.Task[None] | None = None
        self._read = asyncio.Event()  # to the ends that were found first
        self.refused = 0  # records that are no cancels

    async def start(self, timeout_s: float = READ_S) -> None:
        """Returns when every cancel is known that was acknowledged before the call. Raises CancelsUnread."""
        self._task = asyncio.create_task(self._follow(), name="cancels")
        try:
            async with asyncio.timeout(timeout_s):
                await self._read.wait()
        except TimeoutError:
            await self.stop()
            raise CancelsUnread(
                f"{CANCEL} could not be read to its end within {timeout_s:g} s; is the broker up?"
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
                bootstrap_servers=self._settings.bootstrap,
                enable_auto_commit=False,
                auto_offset_reset="earliest",  # also for a log that was cut
                request_timeout_ms=self._settings.request_timeout_ms,
            )
            try:
                async with asyncio.timeout(CALL_S):
                    await consumer.start()
                await self._consume(consumer)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The client library cancels its own futures when a connection goes away.
                log.warning("cancels cannot be read, tried again: %r", error)
            except Exception as error:
                log.warning("cancels cannot be read, tried again: %r", error)
            finally:
                stopping = asyncio.ensure_future(consumer.stop())
                await asyncio.wait({stopping}, timeout=STOP_S)
                if not stopping.done():
                    stopping.cancel()
            if time.monotonic() - since > RETRY_MOST_S:
                delay = RETRY_FIRST_S
            await asyncio.sleep(delay)
            delay = min(delay * 2, RETRY_MOST_S)

    async def _consume(self, consumer: AIOKafkaConsumer) -> None:
        ends: dict[TopicPartition, int] = {}
        count = 0
        while True:
            known = len(consumer.partitions_for_topic(CANCEL) or ()) if count else await _partitions(consumer)
            if known > count:  # at the start, and when an operator added some
                count = known
                tps = [TopicPartition(CANCEL, number) for number in range(count)]
                consumer.assign(tps)
                for tp in tps:
                    if tp.partition in self._next:
                        consumer.seek(tp, self._next[tp.partition])
                if not self._read.is_set():
                    ends = await _filled(consumer, tps)
            if not self._read.is_set() and not ends:
                self._read.set()
            turn = await consumer.getmany(timeout_ms=POLL_MS if self._read.is_set() else 100, max_records=BATCH)
            wishes = [w for records in turn.values() for record in records if (w := self._wish(record))]
            if wishes:
                self._take(wishes)
            for tp, records in turn.items():
                self._next[tp.partition] = records[-1].offset + 1
            for tp in list(ends):
                async with asyncio.timeout(CALL_S):
                    if await consumer.position(tp) >= ends[tp]:
                        del ends[tp]
            await asyncio.sleep(0)

    def _wish(self, record: ConsumerRecord) -> Wish | None:
        if not record.value or record.timestamp < time.time() * 1000 - CANCEL_RETENTION_MS:
            return None
        try:
            cancel = CancelRecord.model_validate_json(record.value)
        except ValidationError as error:
            self.refused += 1
            first = error.errors(include_input=False, include_url=False)[0]
            log.warning("no cancel partition=%d offset=%d: %s", record.partition, record.offset, first["msg"])
            return None
        return Wish(cancel.tenant, cancel.job_id, cancel.run, record.timestamp)


async def _filled(consumer: AIOKafkaConsumer, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
    """The present ends of partitions that hold anything."""
    async with asyncio.timeout(CALL_S):
        begins, ends = await asyncio.gather(consumer.beginning_offsets(tps), consumer.end_offsets(tps))
    return {tp: end for tp, end in ends.items() if end > begins[tp]}


async def _partitions(consumer: AIOKafkaConsumer) -> int:
    """How many partitions the topic has."""
    consumer.assign([TopicPartition(CANCEL, 0)])  # makes the client ask for the topic's metadata
    async with asyncio.timeout(CALL_S):
        while not (count := len(consumer.partitions_for_topic(CANCEL) or ())):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return count
