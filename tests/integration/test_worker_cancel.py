"""Cancels and deadlines in whole workers with the simulated engine (R13, R14): who ends, how soon, only once."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from client import Client
from schemas.names import CANCEL
from service.cli.process import WorkerProcess
from tests.integration.delivery_kit import until
from tests.integration.simulated_kit import SimulatedPool, endless, events_of, metric, statuses
from tests.integration.worker_kit import Wire, check_numbering, job, new_id, text_of

TOLERANCE_S = 2.0  # R14
FREE_S = 1.0  # R13


@pytest.fixture(scope="module")
async def client(simulated: SimulatedPool) -> AsyncIterator[Client]:
    async with Client(simulated.bootstrap, tenant="acme", pool=simulated.name) as client:
        yield client


@pytest.fixture
async def worker(simulated: SimulatedPool) -> WorkerProcess:
    return await simulated.main()


@pytest.fixture
async def wire(simulated: SimulatedPool, worker: WorkerProcess) -> AsyncIterator[Wire]:
    async with simulated.wire() as wire:
        yield wire


async def running(wire: Wire, *ids: str) -> None:
    await until(lambda: all(events_of(wire, id, "chunk") for id in ids), f"the first chunk of {ids}")


async def filled(wire: Wire, client: Client) -> list[str]:
    """The engine is full with jobs that go on."""
    ids = [new_id("fill") for _ in range(9)]
    for id in ids:
        await wire.publish(endless(id, max_tokens=6000))
    await running(wire, *ids[:8])
    return ids


async def test_a_running_job_ends_with_what_it_has_and_the_engine_is_free_within_a_second(
    wire: Wire, client: Client, worker: WorkerProcess
) -> None:
    value = endless(new_id("running"))
    await wire.publish(value)
    await running(wire, value["id"])
    assert metric(worker, "headrace_engine_running") >= 1
    await client.cancel(value["id"])
    acknowledged = time.monotonic()
    await until(lambda: metric(worker, "headrace_engine_running") == 0, "a free engine", FREE_S)
    assert time.monotonic() - acknowledged < FREE_S
    end = await wire.ended(value["id"])
    events = wire.events(value["id"])
    assert end["type"] == "cancelled"
    assert end["partial"]["choices"][0]["text"] == text_of(events) != ""
    tokens = sum(event["tokens"] for event in events if event["type"] == "chunk")
    assert end["usage"]["completion_tokens"] == tokens > 0 and end["usage"]["prompt_tokens"] > 0
    check_numbering(events)
    wire.valid(value["id"])


async def test_many_running_jobs_are_cancelled_at_once(wire: Wire, client: Client, worker: WorkerProcess) -> None:
    ids = [new_id("many") for _ in range(8)]
    for id in ids:
        await wire.publish(endless(id, n=1))
    await running(wire, *ids)
    await asyncio.gather(*(client.cancel(id) for id in ids))
    acknowledged = time.monotonic()
    await until(lambda: metric(worker, "headrace_engine_running") == 0, "a free engine", FREE_S)
    assert time.monotonic() - acknowledged < FREE_S
    for id in ids:
        assert (await wire.ended(id))["type"] == "cancelled"


async def test_a_waiting_and_a_timed_job_get_one_event_each(
    simulated: SimulatedPool, wire: Wire, client: Client
) -> None:
    fill = await filled(wire, client)
    queued, timed, rest = new_id("queued"), new_id("timed"), new_id("rest")
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    await wire.publish(job(queued))
    await wire.publish({**job(timed), "not_before": later})
    await wire.publish(job(rest, max_tokens=2))
    await asyncio.sleep(0.2)
    for id in (queued, timed):
        await client.cancel(id)
    for id in (queued, timed):
        end = await wire.ended(id, 10)
        assert [event["type"] for event in wire.events(id)] == ["cancelled"]
        assert end["usage"]["completion_tokens"] == 0 and not end["partial"]["choices"]
        wire.valid(id)
        await until(lambda id=id: statuses(wire, simulated, id), f"the status record of {id}")
        assert [status["kind"] for status in statuses(wire, simulated, id)] == ["cancelled"]
    await asyncio.gather(*(client.cancel(id) for id in fill))
    for id in fill:
        assert (await wire.ended(id))["type"] == "cancelled"
    assert (await wire.ended(rest))["type"] == "completed"  # its neighbours' cancels left it alone
    await until(lambda: len(wire.terminals(queued)) == 1, "one end")


async def test_a_job_that_has_ended_stays_as_it_is(simulated: SimulatedPool, wire: Wire, client: Client) -> None:
    value, after = job(new_id("ended"), max_tokens=2), job(new_id("after"), max_tokens=2)
    await wire.publish(value)
    assert (await wire.ended(value["id"]))["type"] == "completed"
    await client.cancel(value["id"])
    await wire.publish(after)
    await wire.ended(after["id"])
    assert len(wire.terminals(value["id"])) == 1


async def test_a_cancel_hits_what_was_published_before_it_and_only_the_run_it_names(wire: Wire, client: Client) -> None:
    value = endless(new_id("runs"))
    for run in (0, 1):
        await wire.publish({**value, "run": run})
    await until(lambda: len(events_of(wire, value["id"], "started")) == 2, "both runs")
    await client.cancel(value["id"], run=1)
    await until(lambda: [e["run"] for e in wire.terminals(value["id"])] == [1], "the end of run 1")
    await client.cancel(value["id"])
    await until(lambda: [e["run"] for e in wire.terminals(value["id"])] == [1, 0], "the end of run 0")
    await wire.publish({**value, "run": 2, "body": {**value["body"], "max_tokens": 2}})  # younger than both
    await until(lambda: len(wire.terminals(value["id"])) == 3, "the end of run 2")
    assert [e["type"] for e in wire.terminals(value["id"])] == ["cancelled", "cancelled", "completed"]


async def test_a_copy_gets_the_cancelled_end_of_the_first_with_its_text(wire: Wire, client: Client) -> None:
    value = endless(new_id("copy"))
    await wire.publish(value)
    await running(wire, value["id"])
    await wire.publish(value)
    await asyncio.sleep(0.2)
    await client.cancel(value["id"])
    await until(lambda: len(wire.terminals(value["id"])) == 2, "both ends")
    first, second = wire.terminals(value["id"])
    assert first["type"] == "cancelled" and first["partial"]["choices"][0]["text"]
    assert second == {**first, "duplicate": True}


async def test_a_job_cancelled_before_any_worker_read_it_never_starts(
    simulated: SimulatedPool, wire: Wire, client: Client
) -> None:
    await simulated.stop("main")
    value, other = job(new_id("unread"), max_tokens=3), job(new_id("other"), max_tokens=3)
    await wire.publish(value)
    await client.cancel(value["id"])
    await wire.publish(other)
    await simulated.main()
    assert (await wire.ended(value["id"]))["type"] == "cancelled"
    assert (await wire.ended(other["id"]))["type"] == "completed"
    assert [event["type"] for event in wire.events(value["id"])] == ["cancelled"]
    again = {**value, "run": 1}
    await wire.publish(again)  # younger than the cancel, of all runs
    await until(lambda: len(wire.terminals(value["id"])) == 2, "the second run")
    assert wire.terminals(value["id"])[1]["type"] == "completed"


async def test_a_cancel_finds_its_job_on_whichever_worker_it_runs_now(
    simulated: SimulatedPool, wire: Wire, client: Client
) -> None:
    """Also one that was written before the job's partition came to that worker."""
    await simulated.start("other")
    try:
        tenants = [f"t{n}" for n in range(24)]
        jobs = {new_id("where"): key for key in tenants}
        for id, key in jobs.items():
            await wire.publish(job(id, max_tokens=400), key=key.encode())
        by_worker: dict[str, str] = {}

        def started() -> bool:
            for id in jobs:
                for event in events_of(wire, id, "started"):
                    by_worker[event["worker"]] = id
            return len(by_worker) == 2

        await until(started, "a job on each worker")
        for id in by_worker.values():
            await client.cancel(id)
        for id in by_worker.values():
            assert (await wire.ended(id, 10))["type"] == "cancelled"
        await client.cancel_all("acme")
        await simulated.stop("other", kill=True)  # perhaps with jobs that nobody ended
        await asyncio.gather(*(wire.ended(id, 60) for id in jobs))
        for id in jobs:
            assert [end["type"] for end in wire.terminals(id)] == ["cancelled"], id
            assert len(events_of(wire, id, "started")) <= 1, "a cancelled job ran again elsewhere"
    finally:
        if "other" in simulated.workers:
            await simulated.stop("other")


# -- the command


async def headrace(simulated: SimulatedPool, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service.cli", *arguments, "--bootstrap", simulated.bootstrap),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )
    out, error = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, (out + error).decode()


async def test_the_command_cancels_one_job_or_all_of_a_tenant(
    simulated: SimulatedPool, wire: Wire, worker: WorkerProcess
) -> None:
    mine = [new_id("all") for _ in range(3)]
    theirs = new_id("theirs")
    for id in mine:
        await wire.publish(endless(id))
    await wire.publish(endless(theirs, max_tokens=250) | {"tenant": "globex"}, key=b"globex")
    await running(wire, *mine, theirs)
    code, text = await headrace(simulated, "cancel", mine[0], "--tenant", "acme", "--run", "0", "--json")
    wish = json.loads(text)
    assert code == 0 and (wish["tenant"], wish["job_id"], wish["run"]) == ("acme", mine[0], 0)
    assert wish["place"]["topic"] == CANCEL
    assert (await wire.ended(mine[0]))["type"] == "cancelled"
    assert not wire.terminals(mine[1])
    code, text = await headrace(simulated, "cancel", "--tenant", "acme", "--all")
    assert code == 0 and "all jobs of acme" in text
    for id in mine:
        assert (await wire.ended(id))["type"] == "cancelled"
    assert (await wire.ended(theirs))["type"] == "completed"


# -- deadlines


def soon(seconds: float) -> tuple[str, float]:
    due = datetime.now(UTC) + timedelta(seconds=seconds)
    return due.isoformat(), due.timestamp()


async def expired(wire: Wire, id: str, due: float) -> dict[str, Any]:
    end = await wire.ended(id, 30)
    seen = time.time()
    assert end["type"] == "expired"
    assert -0.1 < seen - due < TOLERANCE_S, f"{seen - due:.2f} s after the deadline"
    wire.valid(id)
    return end


async def test_a_deadline_ends_a_running_job_with_what_it_has_and_a_copy_of_it(wire: Wire) -> None:
    at, due = soon(1.5)
    value = {**endless(new_id("late")), "deadline": at}
    await wire.publish(value)
    await running(wire, value["id"])
    await wire.publish(value)
    end = await expired(wire, value["id"], due)
    assert end["partial"]["choices"][0]["text"] and end["usage"]["completion_tokens"] > 0
    await until(lambda: len(wire.terminals(value["id"])) == 2, "the copy's end", TOLERANCE_S)
    assert time.time() - due < TOLERANCE_S
    assert wire.terminals(value["id"])[1] == {**end, "duplicate": True}


async def test_a_deadline_ends_a_job_that_waits(wire: Wire, client: Client) -> None:
    fill = await filled(wire, client)
    at, due = soon(1.0)
    queued, timed = new_id("queued"), new_id("timed")
    await wire.publish({**job(queued), "deadline": at})
    await wire.publish({**job(timed), "deadline": at, "not_before": soon(0.8)[0]})
    for id in (queued, timed):
        await expired(wire, id, due)
        assert [event["type"] for event in wire.events(id)] == ["expired"]
    await asyncio.gather(*(client.cancel(id) for id in fill))
    for id in fill:
        await wire.ended(id)
