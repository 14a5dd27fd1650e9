"""Timed jobs in whole workers with the simulated engine (R12): they wait on a topic of the service, not in memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import TopicPartition

from client import Client
from schemas.names import (
    H_DUE,
    H_JOB,
    H_ORIGIN,
    H_PUBLISHED,
    deferred_topic,
    group_id,
    jobs_topic,
    overflow_topic,
    status_topic,
)
from service.ledger import Commit
from service.ledger.metadata import Snapshot, decode
from tests.integration.command_kit import told
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import until
from tests.integration.simulated_kit import SimulatedPool, events_of, metric, statuses
from tests.integration.worker_kit import Wire, job, new_id

TOLERANCE_S = 2.0  # R14


class Yard:
    """One pool and its wire; jobs are published `due` seconds ahead."""

    def __init__(self, pool: SimulatedPool, wire: Wire) -> None:
        self.pool = pool
        self.wire = wire
        self.deferred = deferred_topic(pool.name)

    async def publish(self, due: float | None, **more: Any) -> tuple[str, float, Any]:
        value = job(new_id("later"), max_tokens=2)
        at = time.time() + (due or 0.0)
        if due is not None:
            value["not_before"] = datetime.fromtimestamp(at, UTC).isoformat()
        value["reply"]["progress"] = more.pop("progress", False)
        value |= more
        return value["id"], at, await self.wire.publish(value)

    def moved(self, id: str) -> list[Any]:
        return [record for record in self.wire.of(self.deferred) if id.encode() in (record.value or b"")]

    async def waits(self, *ids: str) -> None:
        await until(lambda: all(self.moved(id) for id in ids), f"{len(ids)} records on deferred", 60)

    async def committed(self, topic: str, partition: int) -> Snapshot | None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.pool.bootstrap)
        await admin.start()
        try:
            at = TopicPartition(topic, partition)
            found = (await admin.list_consumer_group_offsets(group_id(self.pool.name), partitions=[at]))[at]
        finally:
            await admin.close()
        return decode(Commit(found.offset, found.metadata)) if found.offset >= 0 else None

    async def commits(self, topic: str, partition: int, offset: int) -> Snapshot:
        """Waits until everything before `offset` is committed."""
        limit = time.monotonic() + 20
        while True:
            told = await self.committed(topic, partition)
            if told is not None and told.watermark >= offset:
                return told
            assert time.monotonic() < limit, f"{topic}/{partition} is not committed up to {offset}: {told}"

    def started(self, id: str) -> float:
        (event,) = events_of(self.wire, id, "started")
        return datetime.fromisoformat(event["at"]).timestamp()


@pytest.fixture
async def yard(stack: TestStack, tmp_path: Path) -> AsyncIterator[Yard]:
    pool = SimulatedPool(stack, tmp_path)
    await pool.topics()
    wire = Wire(pool.bootstrap, status_topic(pool.name), deferred_topic(pool.name), pool=pool.name)
    async with wire:
        yield Yard(pool, wire)
    await pool.close()


async def test_a_timed_job_waits_on_deferred_survives_a_kill_and_runs_once_at_its_time(yard: Yard) -> None:
    await yard.pool.start("first")
    id, at, place = await yard.publish(20, progress=True)
    await yard.waits(id)
    (record,) = yard.moved(id)
    headers = dict(record.headers)
    origin = f"{place.topic}/{place.partition}/{place.offset}"
    assert (record.partition, record.key) == (place.partition, b"acme")
    assert headers[H_ORIGIN].decode() == origin and headers[H_JOB].decode() == f"acme|{id}|0"
    assert abs(int(headers[H_DUE]) / 1000 - at) < 0.01 and int(headers[H_PUBLISHED]) == place.timestamp
    await yard.commits(place.topic, place.partition, place.offset + 1)  # it holds nothing back
    await until(lambda: events_of(yard.wire, id, "waiting"), "word of the wait", 10)
    assert events_of(yard.wire, id, "waiting")[0]["reason"] == "not_before"

    # A record that lies on deferred unfinished must be known to the next owner, and its commit must not pass it.
    await yard.pool.stop("first", kill=True)
    second = await yard.pool.start("second")
    await until(lambda: metric(second, "headrace_jobs_timed") == 1, "the job in the second worker's timetable", 30)
    assert time.time() < at, "the restart took too long for this test"
    assert not events_of(yard.wire, id, "started")
    end = await yard.wire.ended(id, 40)
    assert end["type"] == "completed" and len(events_of(yard.wire, id, "started")) == 1
    assert -0.01 < yard.started(id) - at < TOLERANCE_S, "not at its time"
    await until(lambda: statuses(yard.wire, yard.pool, id), "its status record", 10)
    (status,) = statuses(yard.wire, yard.pool, id)
    assert (status["origin"], status["place"]) == (origin, f"{yard.deferred}/{record.partition}/{record.offset}")
    await yard.commits(yard.deferred, record.partition, record.offset + 1)

    code, account = await told(yard.pool.bootstrap, yard.pool.name, "reconcile", "--since", "15m")
    assert (code, account["jobs"], account["ok"]) == (0, 1, 1), account


async def test_timed_jobs_stand_in_nobodys_way(yard: Yard) -> None:
    worker = await yard.pool.start("main")  # 8 sequences: a partition may hold 16 unfinished records
    late = [await yard.publish(3600) for _ in range(60)]
    await yard.waits(*(id for id, _, _ in late))
    await until(lambda: metric(worker, "headrace_jobs_timed") == 60, "all in the timetable", 30)
    assert len({place.partition for _, _, place in late}) == 1, "all in one partition"
    now, _, _ = await yard.publish(None)
    assert (await yard.wire.ended(now, 20))["type"] == "completed"
    soon, at, place = await yard.publish(8)  # behind sixty that are due later, on the same partition
    assert (await yard.wire.ended(soon, 30))["type"] == "completed"
    assert -0.01 < yard.started(soon) - at < TOLERANCE_S
    told_ = await yard.committed(yard.deferred, place.partition)
    assert told_ is not None and told_.watermark == 0
    await until(lambda: metric(worker, "headrace_jobs_timed") == 60, "the others still waiting", 5)

    code, account = await told(yard.pool.bootstrap, yard.pool.name, "reconcile", "--since", "15m")
    assert (code, account["running"], account["ok"]) == (0, 60, 2), account


async def test_a_crowd_of_timed_jobs_runs_when_it_is_due_each_once(yard: Yard) -> None:
    await yard.pool.start("main", HEADRACE_ENGINE__SIM_STEP_BASE_S="0.002")
    first, at, _ = await yard.publish(10)
    ids = [first, *[(await yard.publish(at - time.time()))[0] for _ in range(119)]]
    await yard.waits(*ids)
    assert not any(events_of(yard.wire, id, "started") for id in ids)
    await until(lambda: all(yard.wire.terminals(id) for id in ids), "the end of all", 60)
    for id in ids:
        assert len(yard.wire.terminals(id)) == 1 and len(events_of(yard.wire, id, "started")) == 1
    assert min(yard.started(id) for id in ids) >= at - 0.01


async def test_a_worker_killed_while_it_moves_jobs_loses_none_and_runs_none_twice(yard: Yard) -> None:
    await yard.pool.start("first")
    at = time.time() + 30
    ids = [(await yard.publish(at - time.time()))[0] for _ in range(40)]
    await until(lambda: yard.moved(ids[0]), "the first record on deferred", 20)
    await yard.pool.stop("first", kill=True)  # some are moved and not committed, and will be moved once more
    await yard.pool.start("second")
    await until(lambda: all(yard.wire.terminals(id) for id in ids), "the end of all", 90)
    await until(lambda: all(statuses(yard.wire, yard.pool, id) for id in ids), "their status records", 20)
    for id in ids:
        assert len(yard.wire.terminals(id)) == 1 and len(events_of(yard.wire, id, "started")) == 1
    code, account = await told(yard.pool.bootstrap, yard.pool.name, "reconcile", "--since", "15m")
    assert (code, account["ok"], account["running"]) == (0, 40, 0), account


async def test_a_timed_job_is_cancelled_at_once(yard: Yard) -> None:
    worker = await yard.pool.start("main")
    one, _, _ = await yard.publish(3600)
    other, _, _ = await yard.publish(3600)
    await until(lambda: metric(worker, "headrace_jobs_timed") == 2, "both in the timetable", 30)
    async with Client(yard.pool.bootstrap, tenant="acme", pool=yard.pool.name) as client:
        await client.cancel(one)
    assert (await yard.wire.ended(one, 15))["type"] == "cancelled"
    assert not yard.wire.terminals(other)
    await until(lambda: metric(worker, "headrace_jobs_timed") == 1, "the other one still waiting", 5)


async def test_a_wrong_timed_job_is_refused_when_it_is_published(yard: Yard) -> None:
    await yard.pool.start("main")
    id, _, _ = await yard.publish(3600, body={"model": "nobody", "messages": []})
    assert (await yard.wire.ended(id, 20))["type"] == "failed"
    assert not yard.moved(id)


async def test_records_on_overflow_are_admitted_like_jobs(yard: Yard) -> None:
    await yard.pool.start("main")
    value = job(new_id("spilled"), max_tokens=2)
    origin = f"{jobs_topic(yard.pool.name, 'bulk')}/3/0"
    async with AIOKafkaProducer(bootstrap_servers=yard.pool.bootstrap, acks="all") as producer:
        place = await producer.send_and_wait(
            overflow_topic(yard.pool.name),
            orjson.dumps(value),
            key=b"acme",
            partition=3,
            headers=[(H_ORIGIN, origin.encode()), (H_PUBLISHED, str(int(time.time() * 1000)).encode())],
        )
    assert (await yard.wire.ended(value["id"], 30))["type"] == "completed"
    await until(lambda: statuses(yard.wire, yard.pool, value["id"]), "its status record", 10)
    (status,) = statuses(yard.wire, yard.pool, value["id"])
    assert status["origin"] == origin
    await yard.commits(place.topic, 3, place.offset + 1)
