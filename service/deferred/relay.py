"""Publishes records on other topics of the service and waits for the acknowledgement (R12). Decides nothing.

A producer of the worker's own: what it sends is no part of a job's answer, needs no lease, and its record must stay
where it is until the copy is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    InvalidTopicError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
)

from schemas.cancellation import is_asked_for
from service.bounded_stop import stop_within
from service.deferred.transfer import Transfer
from service.settings import Settings
from service.topics import COPY_BYTES, MAX_JOB_BYTES

log = logging.getLogger(__name__)

SEND_S = 20.0  # one record, the client's own retries included
STOP_S = 2.0
RETRY_FIRST_S, RETRY_MOST_S = 0.5, 30.0  # doubling
LINGER_MS = 5  # transfers come in crowds: a batch of jobs for the night
# Of one partition one batch at a time is on its way: at the client's 16 KiB, 8 jobs a round trip, 500 jobs a second.
BATCH_BYTES = 1_048_576
NEVER = (InvalidTopicError, MessageSizeTooLargeError, RecordListTooLargeError, TopicAuthorizationFailedError)


class Unwanted(Exception):
    """The topic will not take this record however often it is sent."""


class Publisher(Protocol):
    async def publish(self, transfer: Transfer) -> None:
        """Returns once it is acknowledged. Raises Unwanted; anything else: it may have been written."""

    async def publish_together(self, transfers: Sequence[Transfer]) -> None:
        """Several for one partition, which is named; returns once all are acknowledged. Raises as `publish` does."""


class Relay:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._producer: AIOKafkaProducer | None = None

    async def start(self) -> None:
        """Raises KafkaError if no broker answers."""
        producer = AIOKafkaProducer(
            **self._settings.kafka.connection(),
            client_id=f"{self._settings.worker}-relay",
            acks="all",
            compression_type="lz4",
            linger_ms=LINGER_MS,
            max_batch_size=BATCH_BYTES,
            max_request_size=MAX_JOB_BYTES + COPY_BYTES,
            request_timeout_ms=self._settings.kafka.request_timeout_ms,
        )
        try:
            async with asyncio.timeout(SEND_S):
                await producer.start()
        except BaseException:
            await stop_within(STOP_S, producer.stop())
            raise
        self._producer = producer

    async def stop(self) -> None:
        """Never hangs: what is not acknowledged by now stays where it was."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_within(STOP_S, producer.stop())

    async def publish(self, transfer: Transfer) -> None:
        """Returns once it is acknowledged. Raises Unwanted; KafkaError or TimeoutError: it may have been written."""
        async with self._sending() as producer:
            await producer.send_and_wait(
                transfer.topic,
                transfer.value,
                key=transfer.key,
                partition=transfer.partition,
                headers=list(transfer.headers),
            )

    async def publish_together(self, transfers: Sequence[Transfer]) -> None:
        """For one partition, in one write if they fit: 30 µs of CPU each at 16 of them, where `publish` takes 109.

        Returns once all are acknowledged. Raises Unwanted; KafkaError or TimeoutError: they may have been written.
        """
        topic, partition = transfers[0].topic, transfers[0].partition
        left, now = list(reversed(transfers)), int(time.time() * 1000)
        async with self._sending() as producer:
            while left:
                batch = producer.create_batch()
                while left:
                    one = left[-1]
                    if batch.append(key=one.key, value=one.value, timestamp=now, headers=list(one.headers)) is None:
                        break
                    left.pop()
                if not batch.record_count():
                    raise Unwanted("a record that no batch can hold")
                batch.close()
                await (await producer.send_batch(batch, topic, partition=partition))

    @contextlib.asynccontextmanager
    async def _sending(self) -> AsyncIterator[AIOKafkaProducer]:
        if self._producer is None:
            raise RuntimeError("the relay is not started")
        try:
            async with asyncio.timeout(SEND_S):
                yield self._producer
        except NEVER as error:
            raise Unwanted(type(error).__name__) from error


async def carry(relay: Publisher, transfer: Transfer, left: Callable[[], float]) -> bool:
    """Publishes until it is acknowledged: True. False: the topic will not take it, or no time is left.

    `left()`: seconds for which it still makes sense; 0 or less = none.
    """
    delay = RETRY_FIRST_S
    while (seconds := left()) > 0:
        try:
            await relay.publish(transfer)
            return True
        except Unwanted as problem:
            log.error("cannot be moved, stays where it is topic=%s cause=%s", transfer.topic, problem)
            return False
        except asyncio.CancelledError as problem:
            if is_asked_for():
                raise
            log.warning("not moved yet, tried again topic=%s: %r", transfer.topic, problem)
        except Exception as problem:
            log.warning("not moved yet, tried again topic=%s: %r", transfer.topic, problem)
        await asyncio.sleep(min(delay, seconds))
        delay = min(delay * 2, RETRY_MOST_S)
    return False
