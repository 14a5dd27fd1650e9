"""The last hour's ends, read from the status topic of a real broker: all of them, not for ever, not held up by many."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import orjson
import pytest
from aiokafka import AIOKafkaProducer

from service.identity.history import FEW, History
from service.identity.window import Identity, Spot
from service.settings import KafkaSettings
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import create_topics, delete_topics, until

PARTITIONS = 3


class Status:
    """A status topic, and a history of it."""

    def __init__(self, bootstrap: str, topic: str, producer: AIOKafkaProducer) -> None:
        self.topic = topic
        self.learnt: dict[Identity, tuple[Spot, float]] = {}
        self.told = 0
        self._bootstrap = bootstrap
        self._producer = producer

    def history(self, *, span_s: float = 3600, most: int = 200_000) -> History:
        return History(KafkaSettings(bootstrap=self._bootstrap), self.topic, self._learn, span_s=span_s, most=most)

    def _learn(self, identity: Identity, spot: Spot, at: float) -> None:
        self.told += 1
        self.learnt[identity] = (spot, at)

    async def write(self, first: int, count: int, *, age_s: float = 0.0, **more: object) -> None:
        at = int((time.time() - age_s) * 1000)
        sent = []
        for n in range(first, first + count):
            status = {"kind": "completed", "tenant": "acme", "job_id": f"j{n}", "run": 0, **more}
            sent.append(
                await self._producer.send(
                    self.topic, orjson.dumps(status), partition=n % PARTITIONS, timestamp_ms=at, key=f"{n}".encode()
                )
            )
        await asyncio.gather(*sent)


@pytest.fixture
async def status(stack: TestStack) -> AsyncIterator[Status]:
    topic = f"inference.history-{uuid.uuid4().hex[:8]}.status"
    await create_topics(stack.bootstrap, topic, partitions=PARTITIONS)
    async with AIOKafkaProducer(bootstrap_servers=stack.bootstrap, linger_ms=5) as producer:
        yield Status(stack.bootstrap, topic, producer)
    await delete_topics(stack.bootstrap, topic)


async def test_the_ends_of_the_window_are_told_once_and_only_of_the_numbers_asked_for(status: Status) -> None:
    await status.write(0, 30, age_s=7200)  # before the window
    await status.write(30, 30)
    await status.write(60, 3, repeat=True)
    await status.write(63, 3, kind="undeliverable")
    history = status.history()
    try:
        history.recall([0, 1])
        await asyncio.wait_for(history.ready.wait(), 10)
        assert set(status.learnt) == {("acme", f"j{n}", 0) for n in range(30, 60) if n % PARTITIONS != 2}
        spot, at = status.learnt["acme", "j30", 0]
        assert spot == (0, 10) and abs(at - time.time()) < 60
        told = status.told
        await status.write(66, 6)
        history.recall([0, 1, 2])
        await asyncio.wait_for(history.ready.wait(), 10)
        assert {("acme", "j66", 0), ("acme", "j71", 0), ("acme", "j32", 0)} <= set(status.learnt)
        assert status.told == told + 10 + 6  # what was read before is not read again
    finally:
        await history.stop()


async def test_many_are_read_in_the_background_and_nobody_waits_for_them(status: Status) -> None:
    await status.write(0, 2 * FEW)
    history = status.history()
    try:
        history.recall([0, 1, 2])
        await asyncio.wait_for(history.ready.wait(), 10)
        assert len(status.learnt) < 2 * FEW
        await until(lambda: len(status.learnt) == 2 * FEW, "all of them", 30)
    finally:
        await history.stop()


async def test_of_more_than_the_window_holds_the_newest_are_read(status: Status) -> None:
    await status.write(0, 3000)
    history = status.history(most=600)
    try:
        history.recall([0, 1, 2])
        await asyncio.wait_for(history.ready.wait(), 10)
        assert set(status.learnt) == {("acme", f"j{n}", 0) for n in range(2400, 3000)}
    finally:
        await history.stop()


async def test_without_a_broker_nobody_is_held_up_for_ever() -> None:
    history = History(KafkaSettings(bootstrap="127.0.0.1:9"), "t", lambda *a: None, span_s=1, most=1)
    history.recall([0])
    assert not history.ready.is_set()
    began = time.monotonic()
    await history.stop()
    assert time.monotonic() - began < 5
