"""Reply topics asked of a real broker: nothing is created, answers are remembered, an outage is no answer."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from service.intake import topics as rooms
from service.intake.topics import KafkaReplyTopics
from service.settings import KafkaSettings
from tests.integration.conftest import TestStack


@pytest.fixture(scope="module")
async def admin(stack: TestStack):
    client = AIOKafkaAdminClient(bootstrap_servers=stack.bootstrap)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def reply_topics(stack: TestStack):
    topics = KafkaReplyTopics(KafkaSettings(bootstrap=stack.bootstrap))
    await topics.start()
    yield topics
    await topics.stop()


async def test_an_existing_topic_is_known_with_its_partitions(
    admin: AIOKafkaAdminClient, reply_topics: KafkaReplyTopics
) -> None:
    name = f"intake-{uuid.uuid4().hex[:8]}"
    assert reply_topics.known(name) is None
    await admin.create_topics([NewTopic(name, 3, 1)])
    try:
        async with asyncio.timeout(20):
            counts = await asyncio.gather(*(reply_topics.look_up(name) for _ in range(20)))
        assert set(counts) == {3}
        assert reply_topics.known(name) == 3
    finally:
        await admin.delete_topics([name])


async def test_a_missing_topic_is_missing_for_a_while_and_is_not_created(
    admin: AIOKafkaAdminClient, reply_topics: KafkaReplyTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "MISSING_S", 0.2)
    name = f"intake-{uuid.uuid4().hex[:8]}"
    async with asyncio.timeout(20):
        assert await reply_topics.look_up(name) is None
        assert reply_topics.known(name) == 0
        assert name not in await admin.list_topics()
        while reply_topics.known(name) is not None:
            await asyncio.sleep(0.02)
        await admin.create_topics([NewTopic(name, 2, 1)])
        try:
            assert await reply_topics.look_up(name) == 2, "created meanwhile"
        finally:
            await admin.delete_topics([name])


async def test_an_invalid_name_is_a_missing_topic(reply_topics: KafkaReplyTopics) -> None:
    async with asyncio.timeout(20):
        assert await reply_topics.look_up("no topic/at all") is None


async def test_one_waiters_cancellation_leaves_the_answer_to_the_others(reply_topics: KafkaReplyTopics) -> None:
    name = f"intake-{uuid.uuid4().hex[:8]}"
    first = asyncio.create_task(reply_topics.look_up(name))
    second = asyncio.create_task(reply_topics.look_up(name))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(20):
        assert await second is None
    assert first.cancelled()


async def test_without_an_answer_the_look_up_waits_instead_of_calling_the_topic_missing(
    reply_topics: KafkaReplyTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = reply_topics._ask
    answers: list[int | None] = [None, None, None]

    async def unreachable(topic: str) -> int | None:
        return answers.pop() if answers else await ask(topic)

    monkeypatch.setattr(rooms, "RETRY_S", 0.01)
    monkeypatch.setattr(rooms, "SETTLE_S", 0.02)
    monkeypatch.setattr(reply_topics, "_ask", unreachable)
    async with asyncio.timeout(20):
        assert await reply_topics.look_up("__consumer_offsets") is not None
    assert not answers


async def test_hostile_names_do_not_fill_the_memory(
    reply_topics: KafkaReplyTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(topic: str) -> int | None:
        return 0

    monkeypatch.setattr(rooms, "MAX_NAMES", 50)
    monkeypatch.setattr(rooms, "SETTLE_S", 0.0)
    monkeypatch.setattr(reply_topics, "_ask", missing)
    for number in range(300):
        await reply_topics.look_up(f"hostile-{number}")
    assert len(reply_topics._counts) <= 50
