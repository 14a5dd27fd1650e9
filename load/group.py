"""A pool's consumer group: who owned which partition number from when on, and what is not finished yet.

The history is read from the broker's own log of group states (`__consumer_offsets`), so that no generation is missed,
however short; the rest is asked of the coordinator. Never joins the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import KafkaError
from aiokafka.protocol.types import Array, Bytes, Int16, Int32, Int64, Schema, String

from schemas.names import group_id, jobs_topics
from service.ledger.metadata import Commit, decode

log = logging.getLogger(__name__)

STATES = "__consumer_offsets"
ASK_S = 5.0  # one question to the coordinator
POLL_MS = 200

# Kafka's GroupMetadataKey version 2 and GroupMetadataValue version 3, which brokers have written since 2.4.
KEY_VERSION, VALUE_VERSION = 2, 3
_KEY = Schema(("version", Int16), ("group", String("utf-8")))
_VALUE = Schema(
    ("version", Int16),
    ("protocol_type", String("utf-8")),
    ("generation", Int32),
    ("protocol", String("utf-8")),
    ("leader", String("utf-8")),
    ("since", Int64),
    (
        "members",
        Array(
            ("member_id", String("utf-8")),
            ("instance", String("utf-8")),
            ("client_id", String("utf-8")),
            ("client_host", String("utf-8")),
            ("rebalance_timeout", Int32),
            ("session_timeout", Int32),
            ("subscription", Bytes),
            ("assignment", Bytes),
        ),
    ),
)


class Member(NamedTuple):
    id: str  # given by the coordinator: another one after every new join
    worker: str


@dataclass(frozen=True, slots=True)
class Move:
    """A partition number that went from one member to another. Wall clock, seconds."""

    number: int
    at: float
    old: str
    new: str


@dataclass(slots=True)
class Owners:
    """Who has what, and every move so far. Pure."""

    now: dict[int, Member] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)

    def saw(self, owners: Mapping[int, Member], at: float) -> None:
        """An assignment of the group. A number that nobody has keeps its last owner until somebody else has it."""
        for number, new in owners.items():
            old = self.now.get(number)
            if old is not None and old.id != new.id:
                self.moves.append(Move(number, at, old.worker, new.worker))
        self.now.update(owners)


def assignment(key: bytes | None, value: bytes | None, group: str) -> dict[int, Member]:
    """Partition number → member, as a record of `__consumer_offsets` tells it; empty if it tells of no assignment."""
    if not key or not value or int.from_bytes(key[:2], "big") != KEY_VERSION or _decode(_KEY, key)[1] != group:
        return {}
    if int.from_bytes(value[:2], "big") != VALUE_VERSION:
        return {}
    owners: dict[int, Member] = {}
    for member_id, _, worker, _, _, _, _, assigned in _decode(_VALUE, value)[6]:
        if assigned:
            for _, numbers in ConsumerProtocol.ASSIGNMENT.decode(assigned).assignment:
                owners.update(dict.fromkeys(numbers, Member(member_id, worker)))
    return owners


def _decode(schema: Schema, data: bytes) -> Any:
    return schema.decode(BytesIO(data))


class Group:
    def __init__(self, bootstrap: str, pool: str) -> None:
        self._bootstrap = bootstrap
        self._pool = pool
        self._admin: AIOKafkaAdminClient | None = None
        self.owners = Owners()

    async def follow(self, partitions: int) -> None:
        """Keeps `owners` up to date, from the group's beginning, until it is cancelled. `partitions`: of the states."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap, enable_auto_commit=False, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            consumer.assign([TopicPartition(STATES, number) for number in range(partitions)])
            while True:
                try:
                    for records in (await consumer.getmany(timeout_ms=POLL_MS)).values():
                        for record in records:
                            owners = assignment(record.key, record.value, group_id(self._pool))
                            self.owners.saw(owners, record.timestamp / 1000)
                except KafkaError as error:  # it goes on from where it was
                    log.warning("reading group states: %r", error)
                    await asyncio.sleep(0.2)
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(consumer.stop(), 2.0)

    async def behind(self, consumer: AIOKafkaConsumer, partitions: int) -> list[str]:
        """Partitions of which not everything is committed as finished, in words; empty = all is done.

        Raises KafkaError, TimeoutError.
        """
        tps = [TopicPartition(topic, number) for topic in jobs_topics(self._pool) for number in range(partitions)]
        async with asyncio.timeout(ASK_S):
            ends = await consumer.end_offsets(tps)
        stored = await self._ask("list_consumer_group_offsets", group_id(self._pool))
        found = []
        for tp, end in sorted(ends.items()):
            commit = stored.get(tp)
            told = decode(Commit(commit.offset, commit.metadata or "")) if commit and commit.offset >= 0 else None
            if told is None:
                if end:
                    found.append(f"{tp.topic}/{tp.partition}: nothing committed of {end}")
            elif told.watermark != end or told.unfinished:
                found.append(f"{tp.topic}/{tp.partition}: {told.watermark} of {end}, unfinished {[*told.unfinished]}")
        return found

    async def close(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(admin.close(), 1.0)

    async def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(ASK_S):
                if self._admin is None:
                    self._admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap, request_timeout_ms=4000)
                    await self._admin.start()
                return await getattr(self._admin, what)(*arguments)
        except BaseException:
            await self.close()
            raise
