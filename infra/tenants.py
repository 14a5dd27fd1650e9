"""The development tenants, put on the registry topic when nothing has ever been written there. Changes nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from infra.part import DEV
from schemas.names import TENANTS
from service.settings import KafkaSettings
from service.tenants import load, write_entry

FILE = DEV / "tenants.yaml"
WRITE_S = 20.0


async def seed(settings: KafkaSettings, file: Path = FILE) -> list[str]:
    """The ids that were written; none if the topic has, or had, entries. Raises KafkaError, TimeoutError."""
    place = TopicPartition(TENANTS, 0)
    async with asyncio.timeout(WRITE_S):
        async with AIOKafkaConsumer(**settings.connection(), enable_auto_commit=False) as consumer:
            if (await consumer.end_offsets([place]))[place]:
                return []
        async with AIOKafkaProducer(**settings.connection(), acks="all") as producer:
            tenants = load(file)
            sent = [await producer.send(TENANTS, write_entry(t), key=id.encode()) for id, t in tenants.items()]
            await asyncio.gather(*sent)
    return list(tenants)
