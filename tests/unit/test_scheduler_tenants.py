"""Tenants' limits and order modes in the running scheduler, and what it tells of them."""

from __future__ import annotations

import asyncio
import time

import pytest

from schemas.tenants import Tenant, TenantLimits
from service.engine.protocol import Capacity
from service.frames import Usage
from service.job import Place, Ticket
from service.scheduler.scheduler import WAITING_FIRST_S, Entry, Scheduler
from tests.unit.jobs import job
from tests.unit.test_scheduler_loop import CAPACITY, Exits, Parts, Rendering, parts, until

__all__ = ["parts"]  # the fixture


async def test_a_full_queue_of_a_tenant_refuses_the_next_and_nobody_else() -> None:
    rendering, exits = Rendering(), Exits()
    tenants = {"few": Tenant(id="few", limits=TenantLimits(queued_jobs=2))}
    scheduler = Scheduler(rendering, tenants.get)
    scheduler.exits = exits
    scheduler.start(CAPACITY)
    scheduler.hold("test")
    for n in range(5):
        scheduler.put(job(n, tenant="few"))
    scheduler.put(job(5, tenant="other"))
    assert [(j.head.job_id, r.code) for j, r in exits.refused] == [(f"job-{n}", "quota_exceeded") for n in (2, 3, 4)]
    assert scheduler.queued_of("few") == 2 and scheduler.queued == 3
    spilled = job(6, tenant="few")
    place = Place("inference.default.overflow", 0, 6)
    spilled.ticket = Ticket(place, 1)
    scheduler.put(spilled)
    assert scheduler.queued_of("few") == 3, "one that lay on overflow was accepted before"
    scheduler.unhold("test")
    await until(lambda: scheduler.running == 4)
    assert scheduler.queued_of("few") == 0
    await scheduler.stop()


async def test_a_job_that_could_never_run_under_its_tenants_limit_ends_with_it() -> None:
    rendering, exits = Rendering(), Exits()
    tenants = {"few": Tenant(id="few", limits=TenantLimits(tokens_in_engine=10))}
    scheduler = Scheduler(rendering, tenants.get)
    scheduler.exits = exits
    scheduler.start(CAPACITY)
    scheduler.put(job(0, tenant="few"))
    await until(lambda: len(exits.refused) == 1)
    assert exits.refused[0][1].code == "quota_exceeded" and not scheduler.queued
    await scheduler.stop()


async def test_who_waits_is_told_the_reason() -> None:
    rendering, exits = Rendering(), Exits()
    tenants = {
        "few": Tenant(id="few", limits=TenantLimits(running_jobs=1)),
        "strict": Tenant(id="strict", order="tenant"),
    }
    scheduler = Scheduler(rendering, tenants.get)
    scheduler.exits = exits
    scheduler.start(CAPACITY)
    for n, name in enumerate(("few", "few", "strict", "strict", "plain", "plain", "plain")):
        scheduler.put(job(n, tenant=name, progress=True))
    scheduler.put(job(9, tenant="plain", progress=True, not_before=time.time() + 100))
    await until(lambda: scheduler.running == 4)
    scheduler.run_alarms(time.time() + WAITING_FIRST_S + 1)
    told = {j.head.job_id: why for j, why in exits.told}
    assert told == {"job-1": "quota", "job-3": "order", "job-6": "capacity", "job-9": "not_before"}
    assert scheduler.census.waits(scheduler.holds) == {"quota": 1, "order": 1, "capacity": 1, "not_before": 1}
    assert {(s.tier, s.tenant): (s.running, s.waiting) for s in scheduler.census.standings()} == {
        ("standard", "few"): (1, 1),
        ("standard", "strict"): (1, 1),
        ("standard", "plain"): (2, 2),
    }
    assert sum(s.share for s in scheduler.census.standings()) == pytest.approx(1.0)
    await scheduler.stop()


async def test_a_rate_goes_on_by_itself_while_nothing_else_happens() -> None:
    rendering, exits = Rendering(), Exits()
    tenants = {"slow": Tenant(id="slow", limits=TenantLimits(tokens_per_minute=60))}
    scheduler = Scheduler(rendering, tenants.get)
    scheduler.exits = exits
    scheduler.start(CAPACITY)
    for n in range(4):
        scheduler.put(job(n, tenant="slow"))
    await until(lambda: len(exits.running) >= 1 and scheduler.census.waits(scheduler.holds)["quota"] >= 1)
    tenants["slow"] = Tenant(id="slow", limits=TenantLimits(tokens_per_minute=6000))
    await until(lambda: len(exits.running) == 4)
    await scheduler.stop()


async def test_a_later_job_of_an_ordered_tenant_waits_for_one_that_intake_still_has() -> None:
    rendering, exits = Rendering(), Exits()
    tenants = {"strict": Tenant(id="strict", order="tenant")}
    scheduler = Scheduler(rendering, tenants.get)
    scheduler.exits = exits
    coming = {1}
    scheduler.order_ready(lambda job: not any(offset < job.place.offset for offset in coming))
    scheduler.start(CAPACITY)
    scheduler.put(job(2, tenant="strict"))
    scheduler.put(job(3, tenant="other"))
    await until(lambda: [j.head.job_id for j in exits.running] == ["job-3"])
    coming.clear()
    scheduler.put(job(1, tenant="strict"))
    scheduler.order_moved()
    await until(lambda: len(exits.running) == 2)
    assert exits.running[-1].head.job_id == "job-1"
    scheduler.release(exits.running[-1].ticket)
    await until(lambda: len(exits.running) == 3)
    assert exits.running[-1].head.job_id == "job-2"
    await scheduler.stop()


async def test_what_running_jobs_really_produce_counts_for_admission() -> None:
    """Two jobs expected to produce 8 tokens go on to 400: no third fits into a cache of 1000 until one has ended."""
    rendering, exits = Rendering(), Exits()
    rendering.max_tokens = 400
    scheduler = Scheduler(rendering, kv_usage=lambda: 0.9)
    scheduler.exits = exits
    entries: list[Entry] = []
    run = exits.run

    async def kept(entry: Entry) -> None:
        entries.append(entry)
        await run(entry)

    exits.run = kept  # type: ignore[method-assign]
    scheduler.start(Capacity(max_model_len=512, max_num_seqs=8, kv_tokens=1000, block_size=16, model="m", version="1"))
    for _ in range(64):
        scheduler.learn(job(0), 8, 1)
    for n in range(2):
        scheduler.put(job(n))
    await until(lambda: len(entries) == 2)
    for entry in entries:
        entry.first_output()
        entry.usage = Usage(prompt=10, completion=390)
    admission = scheduler._turns.admission
    assert admission is not None
    await until(lambda: admission.tokens >= 2 * 400)
    rendering.max_tokens = 200
    for _ in range(64):
        scheduler.learn(job(0), 200, 1)
    scheduler.put(job(2, max_tokens=200))
    await asyncio.sleep(0.05)
    assert len(entries) == 2
    scheduler.release(entries[0].job.ticket)
    await until(lambda: len(entries) == 3)
    await scheduler.stop()


async def test_a_job_of_a_lost_partition_does_not_come_back_from_the_engine(parts: Parts) -> None:
    scheduler, _, exits = parts
    scheduler.put(job(0))
    await until(lambda: scheduler.running == 1)
    entry = next(iter(scheduler.entries()))
    scheduler.abandon(lambda j: True)
    scheduler.requeue(entry)
    await asyncio.sleep(0.02)
    assert scheduler.queued == scheduler.running == 0 and len(exits.running) == 1


async def test_the_time_that_the_scheduler_takes_is_counted(parts: Parts) -> None:
    scheduler, _, exits = parts
    before = scheduler.seconds
    scheduler.put(job(0))
    await until(lambda: len(exits.running) == 1)
    assert 0 < scheduler.seconds - before < 1
