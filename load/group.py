"""A pool's consumer group as its coordinator tells it: who owns which partition number, and what is not finished yet.

Owns a connection of its own, made anew after every failure, so that it outlives broker restarts. Never joins the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocol

from schemas.names import group_id, jobs_topics
from service.ledger.metadata import Commit, decode

# How often `follow` asks, and how long one answer may take, seconds.
WATCH_S, ASK_S = 0.4, 5.0


@dataclass(frozen=True, slots=True)
class Move:
    """A partition number that one worker had at `since` and another at `until`. Wall clock."""

    number: int
    since: float
    until: float
    old: str
    new: str


@dataclass(slots=True)
class Owners:
    """Who owned what when it was last known, and every move so far. Pure."""

    now: dict[int, str] = field(default_factory=dict)
    at: float = 0.0
    moves: list[Move] = field(default_factory=list)

    def saw(self, owners: dict[int, str], since: float, until: float) -> None:
        """These owners were told by an answer that was asked for at `since` and came at `until`."""
        for number, new in owners.items():
            old = self.now.get(number)
            if old is not None and old != new:
                self.moves.append(Move(number, self.at, until, old, new))
        self.now = owners
        self.at = since


class Group:
    def __init__(self, bootstrap: str, pool: str) -> None:
        self._bootstrap = bootstrap
        self._pool = pool
        self._admin: AIOKafkaAdminClient | None = None
        self.owners = Owners()

    async def follow(self) -> None:
        """Keeps `owners` up to date until it is cancelled."""
        while True:
            since = time.time()
            try:
                owners = await self._owners()
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                owners = {}  # the client library cancels its own futures when a connection goes away
            except Exception:
                owners = {}  # no broker, or no coordinator
            if owners:
                self.owners.saw(owners, since, time.time())
            await asyncio.sleep(WATCH_S)

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

    async def _owners(self) -> dict[int, str]:
        """Partition number → worker; empty while the group is rebalancing."""
        owners: dict[int, str] = {}
        for answer in await self._ask("describe_consumer_groups", [group_id(self._pool)]):
            for _, _, state, _, _, members, *_ in answer.groups:
                if state != "Stable":
                    return {}
                for _, worker, _, _, assigned, *_ in members:
                    for _, numbers in ConsumerProtocol.ASSIGNMENT.decode(assigned).assignment:
                        owners.update(dict.fromkeys(numbers, worker))
        return owners

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
