"""What the archive finds on the status and reply topics of a real broker."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete

from service.identity import archive as room
from service.identity.archive import Archive, Unread
from service.job import Place
from service.settings import KafkaSettings
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import create_topics, delete_topics

PARTITIONS, RECORDS = 3, 600


@pytest.fixture
async def topic(stack: TestStack) -> AsyncIterator[str]:
    """Record n of a partition holds `partition/n`; some batches are large."""
    name = f"archive-{uuid.uuid4().hex[:8]}"
    await create_topics(stack.bootstrap, name, partitions=PARTITIONS)
    async with AIOKafkaProducer(bootstrap_servers=stack.bootstrap, linger_ms=2) as producer:
        sent = [
            await producer.send(name, f"{p}/{n}".encode().ljust(2000 if n % 50 else 200_000), partition=p)
            for n in range(RECORDS)
            for p in range(PARTITIONS)
        ]
        await asyncio.gather(*sent)
    yield name
    await delete_topics(stack.bootstrap, name)


@pytest.fixture
async def archive(stack: TestStack) -> AsyncIterator[Archive]:
    archive = Archive(KafkaSettings(bootstrap=stack.bootstrap))
    archive.start()
    yield archive
    await archive.stop()


async def test_every_record_is_found_whatever_else_is_asked_for_meanwhile(archive: Archive, topic: str) -> None:
    dice = random.Random(7)
    places = [Place(topic, dice.randrange(PARTITIONS), dice.randrange(RECORDS)) for _ in range(300)]

    async def read(place: Place, delay: float) -> bytes | None:
        await asyncio.sleep(delay)
        return await archive.read(place)

    values = await asyncio.gather(*(read(place, dice.random()) for place in places))
    for place, value in zip(places, values, strict=True):
        assert value is not None and value.rstrip() == f"{place.partition}/{place.offset}".encode(), place


async def test_what_is_gone_is_told_at_once(archive: Archive, topic: str, stack: TestStack) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=stack.bootstrap)
    await admin.start()
    try:
        await admin.delete_records(
            {TopicPartition(topic, 0): RecordsToDelete(300), TopicPartition(topic, 1): RecordsToDelete(-1)}
        )
    finally:
        await admin.close()
    began = time.monotonic()
    places = [Place(topic, 0, 299), Place(topic, 0, 300), Place(topic, 1, 5), Place(topic, 2, RECORDS + 5)]
    values = await asyncio.gather(*map(archive.read, places))
    assert [value and value.rstrip() for value in values] == [None, b"0/300", None, None]
    assert time.monotonic() - began < 3
    assert (await archive.read(Place(topic, 2, 7))) is not None


async def test_a_topic_that_is_no_more_holds_up_nothing_else(
    archive: Archive, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "READ_S", 2.0)
    began = time.monotonic()
    missing = asyncio.create_task(archive.read(Place(f"{topic}-none", 0, 0)))
    assert (await archive.read(Place(topic, 1, 7))) is not None
    assert time.monotonic() - began < 1.5
    with pytest.raises(Unread):
        await missing
    assert time.monotonic() - began < 4


async def test_a_record_that_was_written_after_the_last_reading_is_found(
    archive: Archive, topic: str, stack: TestStack
) -> None:
    async with AIOKafkaProducer(bootstrap_servers=stack.bootstrap) as producer:
        for number in range(RECORDS, RECORDS + 20):
            await producer.send_and_wait(topic, b"new", partition=0)
            assert await archive.read(Place(topic, 0, number)) == b"new"
