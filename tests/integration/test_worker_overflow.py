"""A tenant that fills a partition gives way to its neighbours (tenancy.md §3): real Kafka, the simulated engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.structs import TopicPartition

from schemas.keys import partition_of
from schemas.names import H_ORIGIN, H_TYPE, REPLIES, jobs_topic, overflow_topic, status_topic
from tests.integration.command_kit import told
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import until
from tests.integration.simulated_kit import SimulatedPool, metric, state_of
from tests.integration.worker_kit import TERMINAL, Wire, job, new_id

FLOOD, NEIGHBOUR = "acme", "initech"  # their keys lie on the same partition of six
ENGINE = {
    "HEADRACE_ENGINE__MAX_NUM_SEQS": "64",
    "HEADRACE_LEDGER__MAX_UNFINISHED": "128",
    "HEADRACE_ENGINE__SIM_STEP_BASE_S": "0.05",
}


class Flood:
    """A pool of its own, what is published into it, and what came of it."""

    def __init__(self, pool: SimulatedPool, wire: Wire) -> None:
        self.pool = pool
        self.wire = wire
        self._seen = 0
        self.ended: dict[str, int] = {}  # job id → place in the order of terminals
        self.terminals: Counter[str] = Counter()
        self.started: Counter[str] = Counter()

    async def publish(self, tenant: str, count: int, what: str, max_tokens: int = 16) -> list[str]:
        """Small jobs, all on one partition, as fast as the broker takes them."""
        ids = [new_id(what) for _ in range(count)]
        topic = jobs_topic(self.pool.name, "standard")
        async with AIOKafkaProducer(bootstrap_servers=self.pool.bootstrap, acks="all", linger_ms=5) as producer:
            sent = []
            for id in ids:
                value = job(id, tenant=tenant, max_tokens=max_tokens)
                value["reply"] = {"topic": REPLIES, "stream": False}
                sent.append(await producer.send(topic, orjson.dumps(value), key=tenant.encode()))
            places = await asyncio.gather(*sent)
        assert len({place.partition for place in places}) == 1
        return ids

    def read(self) -> None:
        records = self.wire.of(REPLIES)
        for record in records[self._seen :]:
            kind = (dict(record.headers).get(H_TYPE) or b"").decode()
            id = (record.key or b"").decode()
            if kind == "started":
                self.started[id] += 1
            elif kind in TERMINAL:
                self.terminals[id] += 1
                self.ended.setdefault(id, len(self.ended))
        self._seen = len(records)

    async def end(self, ids: list[str], timeout_s: float) -> None:
        left = set(ids)

        def done() -> bool:
            self.read()
            left.difference_update(self.ended)
            return not left

        try:
            await until(done, f"the end of {len(ids)} jobs", timeout_s)
        except AssertionError as problem:
            problem.add_note(f"{len(left)} have not ended, as {sorted(left)[:3]}")
            for name, worker in self.pool.workers.items():
                problem.add_note(f"{name}:\n{state_of(worker)}")
            raise

    async def spilled(self) -> int:
        place = TopicPartition(overflow_topic(self.pool.name), partition_of(FLOOD, 6))
        return int((await self.wire._consumer.end_offsets([place]))[place])

    async def reconciled(self, jobs: int) -> None:
        code, account = await told(self.pool.bootstrap, self.pool.name, "reconcile", "--since", "30m")
        assert (code, account["lost"], account["doubled"]) == (0, 0, 0), account
        assert account["ok"] == jobs, account


pytestmark = pytest.mark.timeout(600)  # thousands of jobs on a machine that others may use too


@pytest.fixture
async def flood(stack: TestStack, tmp_path: Path) -> AsyncIterator[Flood]:
    assert partition_of(FLOOD, 6) == partition_of(NEIGHBOUR, 6)
    pool = SimulatedPool(stack, tmp_path)
    await pool.topics()
    async with Wire(pool.bootstrap, status_topic(pool.name), overflow_topic(pool.name), pool=pool.name) as wire:
        yield Flood(pool, wire)
    await pool.close()


async def test_a_neighbour_behind_5000_jobs_on_its_partition_does_not_wait_for_them(flood: Flood) -> None:
    worker = await flood.pool.start("main", **ENGINE)
    many = await flood.publish(FLOOD, 5_000, "many")
    began = time.monotonic()
    few = await flood.publish(NEIGHBOUR, 20, "few")
    await flood.end(few, 200)
    waited, before = time.monotonic() - began, len(flood.ended)
    assert before < len(many) / 2, f"the neighbour's end came after {before} of the flood's jobs"
    assert metric(worker, "headrace_moved_to_overflow_total", reason="full") > len(many) / 2
    await flood.end(many, 500)
    print(f"neighbour done after {waited:.1f} s and {before} jobs, all after {time.monotonic() - began:.1f} s")
    ids = [*many, *few]
    assert {id: flood.terminals[id] for id in ids if flood.terminals[id] != 1} == {}, "nothing twice"
    assert {id: flood.started[id] for id in ids if flood.started[id] != 1} == {}, "nothing run twice"

    moved = [dict(record.headers)[H_ORIGIN] for record in flood.wire.of(overflow_topic(flood.pool.name))]
    assert len(moved) == len(set(moved)), "nothing is moved twice"
    await flood.reconciled(len(ids))


async def test_a_worker_killed_while_it_moves_jobs_to_overflow_loses_and_doubles_none(flood: Flood) -> None:
    await flood.pool.start("first", **ENGINE)
    many = await flood.publish(FLOOD, 1_500, "many")
    few = await flood.publish(NEIGHBOUR, 10, "few")
    limit = time.monotonic() + 60
    while not 100 <= await flood.spilled() < 1_000:
        assert time.monotonic() < limit, "no moment in the midst of it"
    await flood.pool.stop("first", kill=True)
    await flood.pool.start("second", **ENGINE)
    await flood.end([*many, *few], 500)
    ids = [*many, *few]
    assert {id: flood.terminals[id] for id in ids if flood.terminals[id] != 1} == {}
    again = [id for id in ids if flood.started[id] > 1]
    assert len(again) <= 64 * 2, f"{len(again)} ran again, more than can have been interrupted"
    await flood.reconciled(len(ids))


async def test_overflow_holds_no_more_in_memory_than_its_window(flood: Flood) -> None:
    worker = await flood.pool.start("main", **ENGINE)
    many = await flood.publish(FLOOD, 1_990, "many")
    many += await flood.publish(FLOOD, 10, "wrong", max_tokens=-1)  # moved unread, and answered all the same
    most: dict[str, Any] = {"jobs": 0.0, "overflow": 0.0}

    def watch() -> bool:
        for name, topic in (
            ("jobs", jobs_topic(flood.pool.name, "standard")),
            ("overflow", overflow_topic(flood.pool.name)),
        ):
            most[name] = max(
                most[name], metric(worker, "headrace_ledger_unfinished_records", topic=topic, partition="0")
            )
        flood.read()
        return len(flood.ended) >= len(many) / 2

    await until(watch, "half of the jobs", 120)
    assert 64 < most["overflow"] <= 128 and most["jobs"] <= 128, most
    await flood.end(many, 500)
    assert all(flood.terminals[id] == 1 for id in many)
