"""The group's offset store through one member's eyes: commits by its consumer, reads by an admin client (R3, R4).

The consumer alone would not do: it hides the metadata of what it reads, and knows its own membership only privately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    OffsetMetadataTooLargeError,
)
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from service.ledger import Commit, Evicted, Key, MetadataTooLarge

READ_S = 3.0  # of one read of the offset store; the caller tries again
GONE_S = 0.2  # how often a commit under way looks whether its topics still are there


def is_member(consumer: AIOKafkaConsumer | None) -> bool:
    """Whether the consumer counts itself a member. A lapsed membership shows only in this private field."""
    coordinator = getattr(consumer, "_coordinator", None)
    return coordinator is not None and coordinator.generation > 0


class GroupOffsets:
    """Implements `service.ledger.Offsets` for the group of `consumer()`."""

    def __init__(self, group: str, admin: AIOKafkaAdminClient, consumer: Callable[[], AIOKafkaConsumer | None]) -> None:
        self._group = group
        self._admin = admin
        self._consumer = consumer

    async def commit(self, commits: Mapping[Key, Commit]) -> None:
        consumer = self._consumer()
        # Without a generation the broker takes a commit of an empty group, from anybody (research: kafka-4.4 §2).
        if consumer is None or not is_member(consumer):
            raise Evicted("not a member of the group")
        try:
            await self._commit(consumer, commits)
        except CommitFailedError as error:
            raise Evicted(f"generation lost ({type(error.__cause__).__name__})") from error
        except IllegalStateError as error:
            raise Evicted(str(error)) from error
        except OffsetMetadataTooLargeError as error:
            raise MetadataTooLarge(str(error)) from error

    async def _commit(self, consumer: AIOKafkaConsumer, commits: Mapping[Key, Commit]) -> None:
        """For a topic that is not there the client would try for ever, and the lease run out meanwhile."""
        commits = {key: commit for key, commit in commits.items() if consumer.partitions_for_topic(key[0])}
        task = asyncio.ensure_future(
            consumer.commit({TopicPartition(*key): OffsetAndMetadata(*commit) for key, commit in commits.items()})
        )
        try:
            while not (await asyncio.wait({task}, timeout=GONE_S))[0]:
                if gone := sorted({topic for topic, _ in commits if not consumer.partitions_for_topic(topic)}):
                    raise KafkaError(f"topics are gone: {', '.join(gone)}")
            await task
        finally:
            task.cancel()

    async def committed(self, keys: Collection[Key]) -> dict[Key, Commit | None]:
        """Raises KafkaError, also if the answer leaves a partition out: a coordinator that is still loading answers
        with nothing, which must not be taken for "never committed"."""
        if not keys:
            return {}
        async with asyncio.timeout(READ_S):
            found = await self._admin.list_consumer_group_offsets(
                self._group, partitions=[TopicPartition(*key) for key in keys]
            )
        out: dict[Key, Commit | None] = {}
        for key in keys:
            stored = found.get(TopicPartition(*key))
            if stored is None:
                raise KafkaError(f"the coordinator left out {key[0]}/{key[1]} when asked for committed offsets")
            out[key] = Commit(stored.offset, stored.metadata or "") if stored.offset >= 0 else None
        return out
