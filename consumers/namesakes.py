"""Static member ids (R18): a worker announces its name on `inference.control`, and hears of one who took it over.

The broker fences the elder of two members with one static id, but the client library cannot tell that from a lapsed
session: it would join again and throw the younger one out, which would do the same, for ever. Decides nothing: whoever
is superseded is told so once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import orjson
from aiokafka import AIOKafkaProducer
from aiokafka.structs import ConsumerRecord
from ulid import ULID

from consumers.follower import READ_S, Follower
from schemas.names import CONTROL, SCHEMA_VERSION
from service.bounded_stop import stop_within
from service.settings import Settings

log = logging.getLogger(__name__)

ANNOUNCE_S = 10.0
STOP_S = 2.0


class Namesakes:
    """`superseded(worker)` is called on the event loop when `worker` has announced the same static id after us."""

    def __init__(self, settings: Settings, superseded: Callable[[str], None]) -> None:
        self._settings = settings
        self._superseded = superseded
        self._key = f"{settings.pool}|{settings.kafka.instance}".encode()
        self._boot = str(ULID())
        self._ours: int | None = None  # offset of our announcement
        self._latest: tuple[int, str] = (-1, "")  # offset of another one's, and its worker
        self._told = False
        self._follower = Follower(settings.kafka, CONTROL, self._take)

    async def start(self, timeout_s: float = READ_S) -> None:
        """Call before joining: an elder hears of us first. Raises TopicUnread, KafkaError, TimeoutError."""
        await self._follower.start(timeout_s)
        producer = AIOKafkaProducer(**self._settings.kafka.connection(), acks="all")
        try:
            async with asyncio.timeout(ANNOUNCE_S):
                await producer.start()
                written = await producer.send_and_wait(CONTROL, self._announcement(), key=self._key, partition=0)
        except BaseException:
            await self.stop()
            raise
        finally:
            await stop_within(STOP_S, producer.stop())
        self._ours = written.offset
        self._judge()

    async def stop(self) -> None:
        await self._follower.stop()

    def _announcement(self) -> bytes:
        return orjson.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "kind": "announcement",
                "worker": self._settings.worker,
                "instance": self._settings.kafka.instance,
                "boot": self._boot,
            }
        )

    def _take(self, records: Sequence[ConsumerRecord]) -> None:
        for record in records:
            if record.key != self._key or record.offset < self._latest[0]:
                continue
            try:
                told = orjson.loads(record.value or b"")
                kind, boot, worker = told["kind"], told["boot"], str(told["worker"])
            except (orjson.JSONDecodeError, KeyError, TypeError):
                log.warning("no announcement topic=%s offset=%d", record.topic, record.offset)
                continue
            if kind == "announcement" and boot != self._boot:
                self._latest = (record.offset, worker)
        self._judge()

    def _judge(self) -> None:
        offset, worker = self._latest
        if self._ours is not None and offset > self._ours and not self._told:
            self._told = True
            self._superseded(worker)
