"""How far the group has finished partitions of another worker: by its commits and the bounds of the logs.

A consumer without a group and an admin client, made when somebody asks first. Writes nothing. The ends it finds count
open transactions: what lies before them may still become a job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import TopicPartition

from schemas.names import group_id
from service.bounded_stop import stop_within
from service.ledger import Key
from service.settings import Settings

T = TypeVar("T")

CALL_S = 5.0  # one question to the broker
STOP_S = 2.0


class Census:
    """All questions raise KafkaError, OSError or TimeoutError; ask again later."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._consumer: AIOKafkaConsumer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._opening = asyncio.Lock()

    async def stop(self) -> None:
        consumer, self._consumer = self._consumer, None
        admin, self._admin = self._admin, None
        if consumer is not None:
            await stop_within(STOP_S, consumer.stop())
        if admin is not None:
            await stop_within(STOP_S, admin.close())

    async def until(self, keys: Iterable[Key], at_ms: int) -> dict[Key, int]:
        """For each partition the first offset that is not older than this time, by the broker's clock; else its end."""
        consumer, _ = await self._open()
        places = [TopicPartition(*key) for key in keys]
        ends = await _answered(consumer.end_offsets(places))
        found = await _answered(consumer.offsets_for_times(dict.fromkeys(places, at_ms)))
        out: dict[Key, int] = {}
        for place in places:
            at = found.get(place)
            out[place.topic, place.partition] = at.offset if at is not None else ends[place]
        return out

    async def ends(self, keys: Iterable[Key]) -> dict[Key, int]:
        """For each partition its present end."""
        consumer, _ = await self._open()
        ends = await _answered(consumer.end_offsets([TopicPartition(*key) for key in keys]))
        return {(place.topic, place.partition): end for place, end in ends.items()}

    async def passed(self, targets: Mapping[Key, int]) -> bool:
        """Whether everything before these offsets is finished, as the group's commits tell."""
        consumer, admin = await self._open()
        places = [TopicPartition(*key) for key in targets]
        stored = await _answered(admin.list_consumer_group_offsets(group_id(self._settings.pool), partitions=places))
        begins = await _answered(consumer.beginning_offsets(places))
        for place in places:
            commit = stored.get(place)
            finished = commit.offset if commit is not None and commit.offset >= 0 else 0
            if max(finished, begins[place]) < targets[place.topic, place.partition]:
                return False
        return True

    async def _open(self) -> tuple[AIOKafkaConsumer, AIOKafkaAdminClient]:
        async with self._opening:
            if self._consumer is None:
                consumer = AIOKafkaConsumer(**self._settings.kafka.connection(), enable_auto_commit=False)
                try:
                    await _answered(consumer.start())
                except BaseException:
                    await stop_within(STOP_S, consumer.stop())
                    raise
                self._consumer = consumer
            if self._admin is None:
                admin = AIOKafkaAdminClient(**self._settings.kafka.connection())
                try:
                    await _answered(admin.start())
                except BaseException:
                    await stop_within(STOP_S, admin.close())
                    raise
                self._admin = admin
            return self._consumer, self._admin


async def _answered(question: Awaitable[T]) -> T:
    async with asyncio.timeout(CALL_S):
        return await question
