"""Whether a tenant has jobs that were not finished, in any pool: by the groups' commits and the keys on the logs.

Reads from each commit's watermark to the end; joins no group, writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition

from client import Unreachable
from schemas import names
from schemas.keys import tenant_of
from service.ledger import Commit
from service.ledger.metadata import Snapshot, decode
from service.settings import KafkaSettings

T = TypeVar("T")

ANSWER_S = 10.0  # one question to the broker
POLL_MS = 200
# Unfinished jobs that are counted; more are said to be as many.
ENOUGH = 1_000


async def unfinished(settings: KafkaSettings, tenants: Iterable[str]) -> dict[str, dict[str, int]]:
    """Tenant → pool → jobs that are not finished, `ENOUGH` at most; what is 0 is left out. Raises Unreachable."""
    wanted = frozenset(tenants)
    consumer = AIOKafkaConsumer(
        **settings.connection(),
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        fetch_max_wait_ms=100,
    )
    admin = AIOKafkaAdminClient(**settings.connection(), client_id="headrace-lag")
    try:
        await _answered(consumer.start())
        await _answered(admin.start())
        counts = {t["topic"]: len(t["partitions"]) for t in await _answered(admin.describe_topics())}
        found: dict[str, dict[str, int]] = {}
        jobs = {topic: said.pool for topic in counts if (said := names.parse_jobs_topic(topic))}
        for pool in sorted(set(jobs.values())):
            topics = [topic for topic, of in jobs.items() if of == pool]
            topics += [topic for topic in (names.deferred_topic(pool), names.overflow_topic(pool)) if topic in counts]
            places = [TopicPartition(topic, number) for topic in topics for number in range(counts[topic])]
            for tenant, count in (await _count(consumer, admin, pool, places, wanted)).items():
                found.setdefault(tenant, {})[pool] = count
        return found
    except (KafkaError, OSError, TimeoutError) as error:
        raise Unreachable(f"no Kafka broker answers at {settings.bootstrap} ({type(error).__name__})") from None
    finally:
        closing = [asyncio.ensure_future(part) for part in (consumer.stop(), admin.close())]
        await asyncio.wait(closing, timeout=ANSWER_S)


async def _count(
    consumer: AIOKafkaConsumer,
    admin: AIOKafkaAdminClient,
    pool: str,
    places: list[TopicPartition],
    wanted: frozenset[str],
) -> dict[str, int]:
    # Ends first: what is published afterwards is not asked for, and a commit that comes later only tells more.
    ends = await _answered(consumer.end_offsets(places))
    begins = await _answered(consumer.beginning_offsets(places))
    stored = await _answered(admin.list_consumer_group_offsets(names.group_id(pool), partitions=places))
    told: dict[TopicPartition, Snapshot] = {}
    for place in places:
        commit = stored.get(place)
        known = decode(Commit(commit.offset, commit.metadata or "")) if commit and commit.offset >= 0 else None
        told[place] = (known or Snapshot.plain(begins[place])).within(begins[place], ends[place])
    left = {place: ends[place] for place in places if told[place].watermark < ends[place]}
    counts: dict[str, int] = {}
    if not left:
        return counts
    consumer.assign(list(left))
    for place in left:
        consumer.seek(place, told[place].watermark)
    while left:
        for place, records in (await _answered(consumer.getmany(timeout_ms=POLL_MS))).items():
            snapshot = told[place]
            said = names.parse_jobs_topic(place.topic)
            for record in records:
                tenant = said.tenant if said is not None and said.tenant is not None else tenant_of(record.key)
                open_ = record.offset >= snapshot.next or record.offset in snapshot.unfinished
                if open_ and record.offset < ends[place] and tenant in wanted:
                    counts[tenant] = counts.get(tenant, 0) + 1
        if sum(counts.values()) >= ENOUGH:
            return counts
        for place in list(left):
            if await _answered(consumer.position(place)) >= left[place]:
                del left[place]
                consumer.pause(place)
    return counts


async def _answered(question: Awaitable[T]) -> T:
    async with asyncio.timeout(ANSWER_S):
        return await question
