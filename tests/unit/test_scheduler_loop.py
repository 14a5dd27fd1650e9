from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from schemas.errors import Expired, InvalidRequest, Refusal
from service.engine.protocol import Capacity, EngineLost, Prepared
from service.job import Job, Ticket
from service.scheduler import roster
from service.scheduler.scheduler import WAITING_FIRST_S, WINDOW, Entry, Scheduler
from tests.unit.jobs import job

CAPACITY = Capacity(max_model_len=512, max_num_seqs=4, kv_tokens=10_000, block_size=16, model="m", version="1")


class Rendering:
    """Renders at once, or when a test says so."""

    def __init__(self) -> None:
        self.refuse: Callable[[Job], Refusal | None] = lambda job: None
        self.lost = 0
        self.max_tokens = 8
        self.gates: dict[str, asyncio.Event] = {}

    async def prepare(self, job: Job) -> Prepared:
        if gate := self.gates.get(job.head.job_id):
            await gate.wait()
        if self.lost:
            self.lost -= 1
            raise EngineLost("away")
        if refusal := self.refuse(job):
            raise refusal
        return Prepared(prompt_tokens=10, max_tokens=self.max_tokens, n=int(job.body.get("n", 1)))


class Exits:
    """Keeps jobs running until the test ends them."""

    def __init__(self) -> None:
        self.running: list[Job] = []
        self.refused: list[tuple[Job, Refusal]] = []
        self.told: list[tuple[Job, str]] = []

    async def run(self, entry: Entry) -> None:
        self.running.append(entry.job)

    def refuse(self, job: Job, refusal: Refusal) -> None:
        self.refused.append((job, refusal))

    def waiting(self, job: Job, reason: str, since: float) -> None:
        self.told.append((job, reason))


@pytest.fixture
async def parts() -> AsyncIterator[tuple[Scheduler, Rendering, Exits]]:
    rendering, exits = Rendering(), Exits()
    scheduler = Scheduler(rendering)
    scheduler.exits = exits
    scheduler.start(CAPACITY)
    yield scheduler, rendering, exits
    await scheduler.stop()


async def until(condition: Callable[[], bool], deadline_s: float = 5.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


Parts = tuple[Scheduler, Rendering, Exits]


async def test_never_more_sequences_than_the_engine_takes(parts: Parts) -> None:
    scheduler, _, exits = parts
    for n in range(10):
        scheduler.put(job(n))
    await until(lambda: scheduler.running == 4)
    assert scheduler.queued == 6
    for n in range(10):
        scheduler.release(exits.running[n].ticket)
        await until(lambda n=n: len(exits.running) == min(10, n + 5))
    assert scheduler.running == 0


async def test_an_end_frees_its_place_once(parts: Parts) -> None:
    scheduler, _, exits = parts
    for n in range(6):
        scheduler.put(job(n))
    await until(lambda: scheduler.running == 4)
    ticket = exits.running[0].ticket
    scheduler.release(ticket)
    scheduler.release(ticket)
    await until(lambda: len(exits.running) == 5)
    await asyncio.sleep(0)
    assert scheduler.running == 4


async def test_tenants_take_turns_though_one_came_first(parts: Parts) -> None:
    scheduler, _, exits = parts
    scheduler.hold("test")
    for n in range(WINDOW * 3):
        scheduler.put(job(n, tenant="flood"))
    for n in range(5):
        scheduler.put(job(1000 + n, tenant="small"))
    scheduler.unhold("test")
    done = 0
    while done < WINDOW + 20:
        await until(lambda: len(exits.running) > done)
        scheduler.release(exits.running[done].ticket)
        done += 1
    assert sum(j.tenant == "small" for j in exits.running[: WINDOW + 20]) == 5


async def test_a_slow_rendering_holds_up_nobody(parts: Parts) -> None:
    scheduler, rendering, exits = parts
    gate = rendering.gates["job-0"] = asyncio.Event()
    scheduler.put(job(0))
    scheduler.put(job(1))
    await until(lambda: [j.head.job_id for j in exits.running] == ["job-1"])
    gate.set()
    await until(lambda: len(exits.running) == 2)


async def test_a_refused_job_ends_and_the_next_goes_on(parts: Parts) -> None:
    scheduler, rendering, exits = parts
    rendering.refuse = lambda j: InvalidRequest("no") if j.head.job_id == "job-0" else None
    scheduler.put(job(0))
    scheduler.put(job(1))
    await until(lambda: len(exits.refused) == 1 and len(exits.running) == 1)
    assert exits.refused[0][1].message == "no"
    assert scheduler.queued == 0


async def test_rendering_is_tried_again_after_the_engine_came_back(parts: Parts) -> None:
    scheduler, rendering, exits = parts
    rendering.lost = 2
    scheduler.put(job(0))
    await until(lambda: len(exits.running) == 1)
    assert not exits.refused


async def test_holds_stop_admission_until_all_are_lifted(parts: Parts) -> None:
    scheduler, _, exits = parts
    scheduler.hold("engine")
    scheduler.hold("memory")
    scheduler.put(job(0))
    scheduler.unhold("engine")
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert not exits.running
    scheduler.unhold("memory")
    await until(lambda: len(exits.running) == 1)


async def test_a_deadline_ends_a_waiting_job(parts: Parts) -> None:
    scheduler, _, exits = parts
    scheduler.hold("test")
    scheduler.put(job(0, deadline=time.time() + 100))
    scheduler.put(job(1))
    scheduler.run_alarms(time.time() + 101)
    assert [(j.head.job_id, type(r)) for j, r in exits.refused] == [("job-0", Expired)]
    assert scheduler.queued == 1


async def test_a_timed_job_waits_for_its_time(parts: Parts) -> None:
    scheduler, _, exits = parts
    scheduler.put(job(0, not_before=time.time() + 100))
    await asyncio.sleep(0.05)
    assert not exits.running and scheduler.queued == 1
    scheduler.run_alarms(time.time() + 101)
    scheduler.unhold("")
    await until(lambda: len(exits.running) == 1)


async def test_a_job_that_asked_is_told_why_it_waits_and_a_running_one_is_not(parts: Parts) -> None:
    scheduler, _, exits = parts
    scheduler.hold("engine")
    scheduler.put(job(0, progress=True))
    scheduler.put(job(1))
    now = time.time()
    scheduler.run_alarms(now + WAITING_FIRST_S + 1)
    scheduler.run_alarms(now + WAITING_FIRST_S + 2)
    assert [(j.head.job_id, why) for j, why in exits.told] == [("job-0", "engine")]
    scheduler.unhold("engine")
    await until(lambda: len(exits.running) == 2)
    scheduler.run_alarms(now + 100)
    assert len(exits.told) == 1


async def test_lost_partitions_leave_nothing_behind(parts: Parts) -> None:
    scheduler, _, _ = parts
    for n in range(8):
        scheduler.put(job(n, partition=n % 2))
    await until(lambda: scheduler.running == 4)
    scheduler.abandon(lambda j: j.place.partition == 0)
    await until(lambda: scheduler.running == 4 and scheduler.queued == 0)
    assert {e.job.place.partition for e in scheduler.entries()} == {1}


async def test_a_drain_ends_when_the_last_job_has_ended(parts: Parts) -> None:
    scheduler, _, exits = parts
    scheduler.put(job(0))
    await until(lambda: scheduler.running == 1)
    assert await scheduler.drain(0.02) == 1
    draining = asyncio.create_task(scheduler.drain(5))
    await asyncio.sleep(0)
    scheduler.release(exits.running[0].ticket)
    assert await draining == 0


async def test_jobs_are_taken_out_wherever_they_wait_and_never_once_they_have_begun(parts: Parts) -> None:
    scheduler, rendering, exits = parts
    for n in range(4):
        scheduler.put(job(n))
    await until(lambda: scheduler.running == 4)
    rendering.gates["job-4"] = asyncio.Event()
    scheduler.put(job(4))  # being rendered
    scheduler.put(job(5))  # rendered
    scheduler.put(job(6, not_before=time.time() + 100))  # timed
    for n in range(7, 10):  # the window's rest, or queued
        scheduler.put(job(n))
    places = {job(n).place for n in (0, 4, 5, 6, 9)}
    assert {j.head.job_id for j in scheduler.take(places)} == {"job-4", "job-5", "job-6", "job-9"}
    assert scheduler.queued == 2 and scheduler.begun(job(0).place) is not None
    assert scheduler.begun(job(5).place) is None
    rendering.gates["job-4"].set()
    for n in range(4):
        scheduler.release(exits.running[n].ticket)
    await until(lambda: len(exits.running) == 6)
    assert {j.head.job_id for j in exits.running[4:]} == {"job-7", "job-8"}
    scheduler.run_alarms(time.time() + 101)
    assert scheduler.queued == 0 and not exits.refused


async def test_a_deadline_that_passed_while_the_job_ran_holds_when_it_comes_back(parts: Parts) -> None:
    scheduler, _, exits = parts
    scheduler.put(job(0, deadline=time.time() + 100))
    await until(lambda: scheduler.running == 1)
    scheduler.run_alarms(time.time() + 100.1)
    assert not exits.refused  # the runner's, as long as it runs
    scheduler.hold("engine")
    scheduler.requeue(next(iter(scheduler.entries())))
    scheduler.run_alarms(time.time() + 101)
    assert [type(refusal) for _, refusal in exits.refused] == [Expired]


async def test_alarms_of_jobs_that_ended_are_not_kept(parts: Parts) -> None:
    scheduler, _, exits = parts
    for n in range(1500):
        scheduler.put(job(n, deadline=time.time() + 3600))
        await until(lambda n=n: len(exits.running) == n + 1)
        scheduler.release(exits.running[n].ticket)
    assert len(scheduler._alarms) < 1100 and not scheduler.queued


async def test_a_rendering_that_its_engine_cancelled_is_tried_again(parts: Parts) -> None:
    scheduler, rendering, exits = parts
    real, calls = rendering.prepare, 0

    async def cancelled_once(job: Job) -> Prepared:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise asyncio.CancelledError
        return await real(job)

    rendering.prepare = cancelled_once  # type: ignore[method-assign]
    scheduler.put(job(0))
    await until(lambda: len(exits.running) == 1)


async def test_a_task_that_raises_ends_its_job_and_frees_its_place(parts: Parts) -> None:
    scheduler, _, exits = parts

    async def broken(entry: Entry) -> None:
        raise KeyError("bug")

    exits.run = broken  # type: ignore[method-assign]
    scheduler.put(job(0))
    await until(lambda: len(exits.refused) == 1)
    assert scheduler.running == 0 and exits.refused[0][1].code == "internal"


async def test_a_release_under_another_epoch_frees_nothing(parts: Parts) -> None:
    scheduler, _, exits = parts
    scheduler.put(job(0))
    await until(lambda: scheduler.running == 1)
    ticket = exits.running[0].ticket
    scheduler.release(Ticket(ticket.place, ticket.epoch + 1))
    assert scheduler.running == 1


async def test_reading_stops_while_too_many_bytes_wait(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _, exits = parts
    monkeypatch.setattr(roster, "MAX_BYTES", 1000)  # a test job has 200
    told: list[bool] = []
    scheduler.on_load = told.append
    for n in range(8):
        scheduler.put(job(n))
    assert told == [True]
    for n in range(8):
        await until(lambda n=n: len(exits.running) > n)
        scheduler.release(exits.running[n].ticket)
    assert told == [True, False]
