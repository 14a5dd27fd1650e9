"""What the service's registries tell publishers: a tenant's spread and tier, a model's pool. Read whole, then followed.

The topics may be missing, or not for this user to read: then nothing is known, and the client keeps to its arguments.
Never writes, never decides whether a job is allowed: that is the service's to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import TopicAuthorizationFailedError
from pydantic import BaseModel, ValidationError

from client.connection import Connection, stop
from schemas.cancellation import is_asked_for
from schemas.keys import entry_name
from schemas.names import MODELS, TENANTS
from schemas.tenants import ModelEntry, Tenant

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

POLL_MS = 500  # a long poll: what comes meanwhile is there at once
RETRY_S = 1.0


class Registry:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._consumer: AIOKafkaConsumer | None = None
        self._places: list[TopicPartition] = []
        self._following: asyncio.Task[None] | None = None
        self._tenants: dict[str, Tenant] = {}
        self._models: dict[str, ModelEntry] = {}

    def tenant(self, id: str) -> Tenant | None:
        return self._tenants.get(id)

    def pool_of(self, model: object) -> str | None:
        """The pool whose workers serve a model or alias; None: the registry names none."""
        entry = self._models.get(model) if isinstance(model, str) else None
        return entry.pool if entry is not None else None

    async def open(self) -> None:
        """Returns when everything is known that was acknowledged before. Raises KafkaError."""
        consumer = self._consumer = self._connection.reader(fetch_max_wait_ms=POLL_MS)
        await consumer.start()
        there = await consumer.topics()
        for topic in (TENANTS, MODELS):
            if topic in there:
                count = await self._connection.partitions(topic)
                self._places += [TopicPartition(topic, number) for number in range(count)]
        if self._places:
            consumer.assign(self._places)
            await self._read_whole(consumer)
            self._following = asyncio.create_task(self._follow(consumer), name="registry")
        else:
            await self.close()

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
            self._following = None
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop(consumer)

    async def _read_whole(self, consumer: AIOKafkaConsumer) -> None:
        begins = await consumer.beginning_offsets(self._places)
        ends = await consumer.end_offsets(self._places)
        left = {place for place in self._places if begins[place] < ends[place]}
        while left:
            await self._turn(consumer)
            left &= set(self._places)
            for place in list(left):
                if await consumer.position(place) >= ends[place]:
                    left.discard(place)

    async def _follow(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            try:
                await self._turn(consumer)
            except (asyncio.CancelledError, Exception) as error:
                if isinstance(error, asyncio.CancelledError) and is_asked_for():
                    raise
                log.warning("the registry cannot be followed, tried again: %r", error)
                await asyncio.sleep(RETRY_S)

    async def _turn(self, consumer: AIOKafkaConsumer) -> None:
        if not self._places:
            await asyncio.sleep(RETRY_S)
            return
        try:
            turn = await consumer.getmany(timeout_ms=POLL_MS)
        except TopicAuthorizationFailedError as error:
            hidden = set(error.args[0]) if error.args and not isinstance(error.args[0], str) else {TENANTS, MODELS}
            log.info("not for this user to read: %s", ", ".join(sorted(hidden)))
            self._places = [place for place in self._places if place.topic not in hidden]
            consumer.assign(self._places)
            return
        for place, records in turn.items():
            if place.topic == TENANTS:
                _take(self._tenants, Tenant, records)
            else:
                _take(self._models, ModelEntry, records)


def _take(known: dict[str, Model], model: type[Model], records: Iterable[ConsumerRecord]) -> None:
    """What is not valid leaves the former entry in force, as it does in the service."""
    for record in records:
        key = entry_name(record.key)
        if record.value is None:
            known.pop(key, None)
            continue
        try:
            known[key] = model.model_validate_json(record.value)
        except ValidationError:
            log.warning("the registry's entry of %s is not valid, the former one stays in force", key[:64])
