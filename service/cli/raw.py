"""What lies on a reply topic, counted from the raw log: no client, no rules for readers in between."""

from __future__ import annotations

from collections import Counter

import orjson
from aiokafka import AIOKafkaConsumer, TopicPartition

from schemas.events import TERMINAL
from schemas.security import PLAINTEXT, KafkaSecurity


async def topic_ends(bootstrap: str, topic: str, security: KafkaSecurity = PLAINTEXT) -> dict[int, int]:
    """Partition → end offset, now."""
    connection = {"bootstrap_servers": bootstrap, **security.arguments()}
    async with AIOKafkaConsumer(topic, **connection, enable_auto_commit=False) as consumer:
        ends = await consumer.end_offsets(list(consumer.assignment()))
    return {tp.partition: end for tp, end in ends.items()}


async def terminals_since(
    bootstrap: str, topic: str, starts: dict[int, int], security: KafkaSecurity = PLAINTEXT
) -> Counter[str]:
    """Terminal events per job id between `starts` and the topic's present end."""
    seen: Counter[str] = Counter()
    connection = {"bootstrap_servers": bootstrap, **security.arguments()}
    async with AIOKafkaConsumer(**connection, enable_auto_commit=False) as consumer:
        parts = [TopicPartition(topic, number) for number in starts]
        consumer.assign(parts)
        ends = await consumer.end_offsets(parts)
        for part in parts:
            consumer.seek(part, starts[part.partition])
        left = {part for part in parts if ends[part] > starts[part.partition]}
        while left:
            for part, records in (await consumer.getmany(timeout_ms=500)).items():
                for record in records:
                    event = orjson.loads(record.value)
                    if event.get("type") in TERMINAL:
                        seen[event["job_id"]] += 1
                if records and records[-1].offset + 1 >= ends[part]:
                    left.discard(part)
    return seen
