"""Publishes records on other topics of the service and waits for the acknowledgement (R12). Decides nothing.

A producer of the worker's own: what it sends is no part of a job's answer, needs no lease, and its record must stay
where it is until the copy is written.
"""

from __future__ import annotations

import asyncio
import logging

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    InvalidTopicError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
)

from service.deferred.transfer import Transfer
from service.settings import Settings
from service.topics import COPY_BYTES, MAX_JOB_BYTES

log = logging.getLogger(__name__)

SEND_S = 20.0  # one record, the client's own retries included
STOP_S = 2.0
LINGER_MS = 5  # transfers come in crowds: a batch of jobs for the night
NEVER = (InvalidTopicError, MessageSizeTooLargeError, RecordListTooLargeError, TopicAuthorizationFailedError)


class Unwanted(Exception):
    """The topic will not take this record however often it is sent."""


class Relay:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._producer: AIOKafkaProducer | None = None

    async def start(self) -> None:
        """Raises KafkaError if no broker answers."""
        producer = AIOKafkaProducer(
            bootstrap_servers=self._settings.kafka.bootstrap,
            client_id=f"{self._settings.worker}-relay",
            acks="all",
            compression_type="lz4",
            linger_ms=LINGER_MS,
            max_request_size=MAX_JOB_BYTES + COPY_BYTES,
            request_timeout_ms=self._settings.kafka.request_timeout_ms,
        )
        try:
            async with asyncio.timeout(SEND_S):
                await producer.start()
        except BaseException:
            await _stop(producer)
            raise
        self._producer = producer

    async def stop(self) -> None:
        """Never hangs: what is not acknowledged by now stays where it was."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await _stop(producer)

    async def publish(self, transfer: Transfer) -> None:
        """Returns once it is acknowledged. Raises Unwanted; KafkaError or TimeoutError: it may have been written."""
        if self._producer is None:
            raise RuntimeError("the relay is not started")
        try:
            async with asyncio.timeout(SEND_S):
                await self._producer.send_and_wait(
                    transfer.topic,
                    transfer.value,
                    key=transfer.key,
                    partition=transfer.partition,
                    headers=list(transfer.headers),
                )
        except NEVER as error:
            raise Unwanted(type(error).__name__) from error


async def _stop(producer: AIOKafkaProducer) -> None:
    stopping = asyncio.ensure_future(producer.stop())
    await asyncio.wait({stopping}, timeout=STOP_S)
    if not stopping.done():
        stopping.cancel()
