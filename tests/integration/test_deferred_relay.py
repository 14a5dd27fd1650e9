"""Records on their way to another topic of the service: a real broker (R12)."""

from __future__ import annotations

import random
import uuid

import pytest

from service.deferred.relay import Relay, Unwanted
from service.deferred.transfer import Transfer
from service.settings import KafkaSettings, Settings
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import Log, create_topics, until


@pytest.fixture
async def topic(stack: TestStack) -> str:
    name = f"relay-{uuid.uuid4().hex[:8]}"
    await create_topics(stack.bootstrap, name)
    return name


async def test_what_is_published_together_arrives_whole_and_in_order_in_as_many_writes_as_it_takes(
    stack: TestStack, topic: str
) -> None:
    chance = random.Random(1)
    sent = [  # no compression makes one write of them
        Transfer(topic, 1, b"key" if n % 2 else None, chance.randbytes(60_000), (("n", b"%d" % n), ("empty", None)))
        for n in range(40)
    ]
    relay = Relay(Settings(kafka=KafkaSettings(bootstrap=stack.bootstrap)))
    await relay.start()
    try:
        async with Log(stack.bootstrap, topic) as log:
            await relay.publish_together(sent)
            await until(lambda: len(log.records) == len(sent), "all records")
            found = [Transfer(topic, r.partition, r.key, r.value, tuple(r.headers)) for r in log.records]
        assert found == sent
    finally:
        await relay.stop()


async def test_one_that_no_broker_takes_is_unwanted_among_others_too(stack: TestStack, topic: str) -> None:
    relay = Relay(Settings(kafka=KafkaSettings(bootstrap=stack.bootstrap)))
    await relay.start()
    try:
        small, huge = (Transfer(topic, 0, None, random.Random(1).randbytes(size), ()) for size in (10, 8_000_000))
        with pytest.raises(Unwanted):
            await relay.publish_together([small, huge])
        await relay.publish_together([small, small])
    finally:
        await relay.stop()
