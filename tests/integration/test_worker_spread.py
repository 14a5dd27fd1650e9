"""Spread, changed live under load: nothing lost, nothing twice, early copies included (tenancy.md §3)."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from client import Client, Submitted
from schemas.keys import partition_of
from schemas.names import H_TYPE, REPLIES, overflow_topic, status_topic
from tests.integration.command_kit import told
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import until
from tests.integration.simulated_kit import SimulatedPool, metric
from tests.integration.worker_kit import MODEL, TERMINAL, Wire, new_id

ENGINE = {
    "HEADRACE_ENGINE__MAX_NUM_SEQS": "16",
    "HEADRACE_LEDGER__MAX_UNFINISHED": "32",
    "HEADRACE_ENGINE__SIM_STEP_BASE_S": "0.02",
}
BEFORE, LOAD_S, EVERY_S = 700, 25.0, 0.05


def scattered(tenant: str) -> bool:
    """Whether all four keys lie elsewhere than the one key, on several partitions: then every copy goes another way."""
    keys = {partition_of(f"{tenant}|{k}", 6) for k in range(4)}
    return len(keys) > 1 and partition_of(tenant, 6) not in keys


class Street:
    """A tenant of its own, its publishers, and what became of its jobs."""

    def __init__(self, pool: SimulatedPool, wire: Wire) -> None:
        self.pool = pool
        self.wire = wire
        self.tenant = next(filter(scattered, (f"spread-{uuid.uuid4().hex[:8]}" for _ in range(10_000))))
        self.records: Counter[str] = Counter()  # published, by id
        self.partitions: dict[str, set[int]] = {}
        self._seen = 0
        self.terminals: Counter[str] = Counter()
        self.started: Counter[str] = Counter()

    async def set(self, *arguments: str) -> None:
        code, done = await told(self.pool.bootstrap, self.pool.name, "tenants", "set", self.tenant, *arguments, "--yes")
        assert code == 0 and done["applied"], done

    def client(self, **more: Any) -> Client:
        return Client(
            self.pool.bootstrap, tenant=self.tenant, pool=self.pool.name, model=MODEL, tier="standard", **more
        )

    async def publish(self, client: Client, id: str | None = None) -> str:
        """A job, or a further record of one; its content follows from its id."""
        id = id or new_id("job")
        body = {"messages": [{"role": "user", "content": id}], "max_tokens": 16}
        job: Submitted = await client.publish(body, id=id, stream=False)
        job.close()
        assert job.place is not None
        self.records[id] += 1
        self.partitions.setdefault(id, set()).add(job.place.partition)
        return id

    def read(self) -> None:
        records = self.wire.of(REPLIES)
        for record in records[self._seen :]:
            kind, id = (dict(record.headers).get(H_TYPE) or b"").decode(), (record.key or b"").decode()
            if kind == "started":
                self.started[id] += 1
            elif kind in TERMINAL:
                self.terminals[id] += 1
        self._seen = len(records)

    def all_answered(self) -> bool:
        self.read()
        return all(self.terminals[id] >= count for id, count in self.records.items())

    def moved(self) -> float:
        return sum(
            metric(worker, "headrace_moved_to_overflow_total", reason="spread") for worker in self.pool.workers.values()
        )


@pytest.fixture
async def street(stack: TestStack, tmp_path: Path) -> AsyncIterator[Street]:
    pool = SimulatedPool(stack, tmp_path)
    await pool.topics()
    async with Wire(pool.bootstrap, status_topic(pool.name), overflow_topic(pool.name), pool=pool.name) as wire:
        yield Street(pool, wire)
    await pool.close()


async def test_a_spread_changed_under_load_loses_and_doubles_nothing_copies_of_old_ids_included(street: Street) -> None:
    await street.set("--spread", "1")
    await street.pool.start("one", **ENGINE)
    await street.pool.start("two", **ENGINE)
    dice = random.Random(7)
    async with street.client() as client, street.client() as other:
        ids = list(await asyncio.gather(*(street.publish(client) for _ in range(BEFORE))))
        assert len({number for at in street.partitions.values() for number in at}) == 1
        await street.set("--spread", "4")
        until_s = time.monotonic() + LOAD_S
        while (
            time.monotonic() < until_s
        ):  # new jobs, and copies of any that were published before, whatever they do now
            ids.append(await street.publish(client))
            await street.publish(other, dice.choice(ids))
            await asyncio.sleep(EVERY_S)
        await until(street.all_answered, "an answer to every record", 120)
        both = [id for id, at in street.partitions.items() if len(at) > 1]
        assert len(both) > 20, "copies lay on other partitions than their first"

        late = await asyncio.gather(*(street.publish(client) for _ in range(40)))
        await until(street.all_answered, "an answer to the late ones", 30)
    assert len({number for id in late for number in street.partitions[id]}) > 1, "the new spread is in force"

    assert {id: n for id, n in street.started.items() if n != 1} == {}, "none ran twice"
    assert street.moved() > 0, "copies of the time of the former spread were waited for"
    wrong = {id: street.terminals[id] for id, count in street.records.items() if street.terminals[id] != count}
    assert wrong == {}, "each record has one answer"
    code, account = await told(street.pool.bootstrap, street.pool.name, "reconcile", "--since", "30m")
    assert (code, account["lost"], account["doubled"]) == (0, 0, 0), account
    assert account["ok"] == sum(street.records.values()), account


async def test_once_all_of_the_former_time_has_ended_jobs_stay_and_old_copies_are_still_answered(
    street: Street,
) -> None:
    await street.set("--spread", "1")
    await street.pool.start("one", **ENGINE)
    await street.pool.start("two", **ENGINE)
    async with street.client() as client:
        old = [await street.publish(client) for _ in range(20)]
        await until(street.all_answered, "the old ones", 30)
        await street.set("--spread", "4")
        deadline = time.monotonic() + 60  # publishers' clocks get their grace, and the homes are looked at
        while True:
            before = street.moved()
            await asyncio.gather(*(street.publish(client) for _ in range(12)))
            await until(street.all_answered, "their answers", 30)
            if len({n for at in street.partitions.values() for n in at}) > 1 and street.moved() == before:
                break
            assert time.monotonic() < deadline, "jobs still go home"
            await asyncio.sleep(0.5)
        for id in old:
            await street.publish(client, id)
        await until(street.all_answered, "answers to the copies", 30)
        assert street.moved() == before, "the copies were answered where they lay"
    assert {id: n for id, n in street.started.items() if n != 1} == {}, "none ran twice"
    assert all(len(street.partitions[id]) > 1 for id in old), "each copy lay elsewhere than its first"
