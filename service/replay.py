"""Puts replays of dead letters onto their topics, and the notes that say so beside the letters (R15).

The record first, then its note: a replay that is cut off between the two can be asked for again, and is then the same
identity, which the duplicate rule recognises (R7). The other way round a letter would count as replayed that never was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from schemas.names import DEAD_LETTERS
from schemas.security import PLAINTEXT, KafkaSecurity
from service.bounded_stop import stop_within
from service.dead_letters import Note, NotReplayable, Replay
from service.job import Place
from service.topics import COPY_BYTES, MAX_JOB_BYTES, BrokerUnreachable

T = TypeVar("T")

START_S = 5.0  # a broker that has not answered by then counts as not reachable
SEND_S = 15.0  # one record, its retries included


class Replayer:
    """An asynchronous context; many `send` at a time are fine."""

    def __init__(self, bootstrap: str, security: KafkaSecurity = PLAINTEXT) -> None:
        self._bootstrap = bootstrap
        self._security = security
        self._producer: AIOKafkaProducer | None = None

    async def __aenter__(self) -> Self:
        """Raises BrokerUnreachable."""
        self._producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            **self._security.arguments(),
            client_id="headrace-replay",
            acks="all",
            compression_type="lz4",
            max_request_size=MAX_JOB_BYTES + COPY_BYTES,
            request_timeout_ms=int(SEND_S * 1000),
        )
        try:
            await self._answered(self._producer.start(), START_S)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def send(self, replay: Replay, letter_key: bytes | None) -> Note:
        """Returns once record and note are acknowledged. Raises NotReplayable, BrokerUnreachable."""
        assert self._producer is not None, "use it as an async context manager"
        numbers = await self._answered(self._producer.partitions_for(replay.topic), SEND_S)
        if replay.partition not in (numbers or ()):
            raise NotReplayable(f"came from {replay.topic}/{replay.partition}, which is gone; publish the job anew")
        try:
            sent = await self._answered(
                self._producer.send_and_wait(
                    replay.topic,
                    replay.value,
                    key=replay.key,
                    partition=replay.partition,
                    headers=list(replay.headers),
                ),
                SEND_S,
            )
        except MessageSizeTooLargeError:
            raise NotReplayable(
                f"is too large for {replay.topic} with its new run; publish the job anew with a claim-checked input"
            ) from None
        note = Note(replay.letter, replay.run, Place(sent.topic, sent.partition, sent.offset))
        await self._answered(
            self._producer.send_and_wait(
                DEAD_LETTERS,
                note.value(time.time()),
                key=letter_key,
                partition=replay.letter.partition,
                headers=note.headers(),
            ),
            SEND_S,
        )
        return note

    async def _answered(self, question: Awaitable[T], seconds: float) -> T:
        try:
            async with asyncio.timeout(seconds):  # wait_for may swallow a cancellation (Python 3.11)
                return await question
        except MessageSizeTooLargeError:
            raise
        except TopicAuthorizationFailedError:
            raise NotReplayable("may not be replayed with these rights: writing to its topic is refused") from None
        except UnknownTopicOrPartitionError:
            raise NotReplayable("came from a topic that is gone; publish the job anew") from None
        except (KafkaError, TimeoutError, OSError):
            raise BrokerUnreachable(f"no Kafka broker answers at {self._bootstrap}{self._security.hint}") from None

    async def _stop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_within(START_S, producer.stop())
