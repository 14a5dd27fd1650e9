"""The reader of cancels on a real broker: all of them before it returns, then each at once; what is none is left."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence

import orjson
import pytest
from aiokafka import AIOKafkaProducer

from consumers.cancels import CancelReader
from consumers.follower import TopicUnread
from schemas.names import CANCEL
from schemas.records import cancel_key
from service.cancels import Wish
from service.settings import KafkaSettings
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import until
from tests.integration.simulated_kit import SimulatedPool


@pytest.fixture
async def producer(simulated: SimulatedPool) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=simulated.bootstrap, acks="all") as producer:
        yield producer


async def wish(producer: AIOKafkaProducer, tenant: str, job_id: str | None, **more: object) -> int:
    value = {"schema_version": 1, "tenant": tenant, **({"job_id": job_id} if job_id else {}), **more}
    written = await producer.send_and_wait(CANCEL, orjson.dumps(value), key=cancel_key(tenant, job_id))
    return int(written.timestamp)


async def test_everything_acknowledged_before_the_start_is_known_then_and_the_rest_at_once(
    simulated: SimulatedPool, producer: AIOKafkaProducer
) -> None:
    ids = [f"cancels-{uuid.uuid4().hex[:8]}" for _ in range(40)]
    times = {id: await wish(producer, "acme", id, run=3) for id in ids}
    await wish(producer, "globex", None, reason="all of them")
    taken: list[Wish] = []

    def take(wishes: Sequence[Wish]) -> None:
        taken.extend(wishes)

    reader = CancelReader(KafkaSettings(bootstrap=simulated.bootstrap), take)
    await reader.start()
    try:
        found = {w.job_id: w for w in taken if w.job_id in times}
        assert found == {id: Wish("acme", id, 3, times[id]) for id in ids}  # the broker's time, not the caller's
        assert any(w[:3] == ("globex", None, None) for w in taken)
        late = f"late-{uuid.uuid4().hex[:8]}"
        await wish(producer, "acme", late)
        began = time.monotonic()
        await until(lambda: any(w.job_id == late for w in taken), "a cancel written later", 5)
        assert time.monotonic() - began < 0.5
    finally:
        await reader.stop()


async def test_what_is_no_cancel_is_passed_over(simulated: SimulatedPool, producer: AIOKafkaProducer) -> None:
    taken: list[Wish] = []
    reader = CancelReader(KafkaSettings(bootstrap=simulated.bootstrap), taken.extend)
    await reader.start()
    try:
        refused, key = reader.refused, b"acme|x"
        for value in (
            b"",
            None,
            b"no json",
            b'{"tenant": "acme"}',
            b'{"schema_version": 1, "tenant": "a b", "job_id": "x"}',
        ):
            await producer.send_and_wait(CANCEL, value, key=key)
        await wish(producer, "acme", "typo", jobid="x")
        await wish(producer, "acme", None, run=1)
        good = f"good-{uuid.uuid4().hex[:8]}"
        await producer.send_and_wait(
            CANCEL, orjson.dumps({"schema_version": 1, "tenant": "acme", "job_id": good}), key=key
        )
        await until(lambda: any(w.job_id == good for w in taken), "the good one behind them", 5)
        await until(lambda: reader.refused >= refused + 4, "the refused ones", 5)
        assert not any(w.job_id in ("typo", "x") or (w.job_id is None and w.run) for w in taken)
    finally:
        await reader.stop()


async def test_a_worker_that_cannot_read_the_cancels_does_not_start(stack: TestStack) -> None:
    reader = CancelReader(KafkaSettings(bootstrap="127.0.0.1:9"), lambda wishes: None)
    with pytest.raises(TopicUnread):
        await reader.start(timeout_s=0.5)
