"""The doors of a worker that is on its way out: whoever comes is left to the partition's next owner (R19)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.tenants import Tenant
from service.app import Worker
from service.intake.verdict import Lookup, Verdict
from service.job import Place, Record, Ticket
from service.scheduler.entry import Stage
from service.settings import EngineSettings, Settings
from tests.unit.jobs import job

PLACE = Place("inference.default.jobs.standard", 0, 7)
RECORD = Record(PLACE, b"acme", b"no job at all", (), 1)
TICKET = Ticket(PLACE, 1)


@pytest.fixture
async def worker(tmp_path: Path) -> Worker:
    return Worker(Settings(state_dir=tmp_path, engine=EngineSettings(kind="simulated")))


async def test_a_job_of_an_ordered_tenant_does_not_overtake_a_record_that_intake_still_looks_up(worker: Worker) -> None:
    """Offset 7 needs a look-up, 8 of the same key does not."""
    gate = asyncio.Event()
    worker.tenants._tenants["acme"] = Tenant(id="acme", order="tenant")
    first, second = (replace(job(n), record=replace(job(n).record, key=b"acme")) for n in (7, 8))

    async def late() -> Verdict:
        await gate.wait()
        return first

    worker.book.owns = lambda ticket: True  # type: ignore[method-assign]
    scheduler = worker.scheduler
    worker.reception._settle(Lookup(first.record, first.ticket, late))
    worker.reception._settle(second)
    assert scheduler.census.waits(scheduler.holds) == {"order": 1} and scheduler.queued_of("acme") == 1
    gate.set()
    await asyncio.gather(*worker.reception._lookups)
    assert {e.job.place.offset: e.stage for e in scheduler.entries()} == {7: Stage.QUEUED, 8: Stage.BEHIND}
    assert not worker.reception._upstream._offsets
    await worker.reception.stop()


@pytest.mark.parametrize("acknowledged", [True, False])
async def test_a_job_whose_copy_on_overflow_is_read_before_the_acknowledgement_is_not_lost(
    worker: Worker, acknowledged: bool
) -> None:
    book, reception = worker.book, worker.reception
    jobs, overflow = PLACE[:2], ("inference.default.overflow", 0)
    for key, begin in ((jobs, PLACE.offset), (overflow, 0)):
        book.take(key, None, begin, 100)
    book.settled(0, 0)
    here, there = book.register(PLACE), book.register(Place(*overflow, 0))
    assert here is not None and there is not None
    first = replace(job(7), ticket=here)
    copy = replace(first, ticket=there, record=replace(first.record, place=there.place))

    reception._settle(first)
    assert reception.take_out({first.place}) == [first]
    reception._settle(copy)
    assert book.owns(there) and not worker.scheduler.queued
    if acknowledged:
        assert book.complete(here)
        reception.moved(here)
    else:
        reception.put_back(first)
    assert [e.job for e in worker.scheduler.entries()] == [copy if acknowledged else first]
    assert (book.owns(here), book.owns(there)) == (not acknowledged, acknowledged)
    await reception.stop()


async def test_a_job_that_turns_out_to_have_ended_holds_nothing_of_its_partition_any_more(worker: Worker) -> None:
    worker.tenants._tenants["acme"] = Tenant(id="acme")
    worker.reception._settle(job(7))
    held = worker.reception.spill._partitions[PLACE[:2]].held
    assert held == {"acme": 1}
    assert worker.reception.withdraw(PLACE) and not held
    await worker.reception.stop()


def written(worker: Worker) -> int:
    """Dead letters and streams that delivery was given."""
    return len(worker.link._deads) + len(worker.link._streams)


async def test_a_record_that_is_no_job_becomes_a_dead_letter(worker: Worker) -> None:
    worker.reception.admit(RECORD, TICKET)
    assert written(worker) == 1


async def test_after_its_stop_nothing_is_refused_and_nothing_buried(worker: Worker) -> None:
    """It would be answered after the last commit, and once more by the next owner."""

    async def late() -> Verdict:
        return worker.intake.read(RECORD, TICKET)  # type: ignore[return-value]

    await worker.reception.stop()
    worker.reception.admit(RECORD, TICKET)
    worker.reception.poison(RECORD, TICKET, "broken")
    worker.reception._settle(Lookup(RECORD, TICKET, late))
    assert not written(worker) and not worker.reception._lookups
