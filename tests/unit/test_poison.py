"""A job that the engine dies of is found by running it alone, and nobody who ran beside it pays for it (R11)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from schemas.errors import ErrorCode
from service.engine.protocol import Capacity, EngineAway, EngineLost, Finished, Output, Prepared
from service.frames import Dead, Delta, Error, Head, Timing, Usage
from service.job import Job, Record
from service.ledger.book import Book
from service.ledger.metadata import Commit, encode, pack
from service.runner import ALONE_DEATHS, ALONE_STARTS, COMPANY, MAX_STARTS, Runner
from service.scheduler.scheduler import Entry, Scheduler
from service.settings import Settings
from service.telemetry.metrics import Metrics
from tests.unit.jobs import job

TOPIC = ("inference.default.jobs.standard", 0)
CAPACITY = Capacity(max_model_len=512, max_num_seqs=8, kv_tokens=10_000, block_size=16, model="m", version="1")
OVER = (["completed"], ["failed"])
TEXT = [Delta(index=0, text="hi", tokens=1, finish_reason="stop")]


class Stream:
    attempt = "01J0000000000000000000000A"

    def __init__(self, head: Head) -> None:
        self.head = head
        self.ended: tuple[str, Error | None, Dead | None] | None = None

    def send(self, deltas: list[Delta]) -> None:
        pass

    def end(
        self, kind: str, usage: Usage, timing: Timing, error: Error | None = None, dead: Dead | None = None
    ) -> None:
        self.ended = (kind, error, dead)


class Mortal:
    """An engine that dies of one job, with everything that it runs, and is there again at once."""

    def __init__(self, lethal: set[str]) -> None:
        self.lethal = lethal
        self.running: dict[str, asyncio.Future[None]] = {}
        self.beside: list[frozenset[str]] = []  # what ran at each death
        self.together: list[frozenset[str]] = []  # what ran after each beginning

    async def prepare(self, job: Job) -> Prepared:
        return Prepared(prompt_tokens=3, max_tokens=8, n=1)

    async def run(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
        name = job.head.job_id
        died = self.running[name] = asyncio.get_running_loop().create_future()
        self.together.append(frozenset(self.running))
        try:
            await asyncio.sleep(0.005)
            if name in self.lethal:
                self.beside.append(frozenset(self.running))
                for one in self.running.values():
                    if not one.done():
                        one.set_exception(EngineLost("died"))
            await asyncio.sleep(0.005)
            if died.done():
                died.result()
            yield TEXT
            yield Finished(Usage(prompt=3, completion=1))
        finally:
            died.cancel()
            if died.done() and not died.cancelled():
                died.exception()
            del self.running[name]


class Room:
    """Scheduler, runner and book as in a worker; what delivery acknowledges at once."""

    def __init__(self, engine: Any, starts: dict[int, int] | None = None) -> None:
        settings = Settings()
        self.book = Book.of(settings)
        entries, following = pack(0, 100, sorted((starts or {}).items()), 4000) if starts else (b"", 0)
        self.book.take(TOPIC, Commit(0, encode(0, following, 0, entries, clean=True)), 0, 1000)
        self.streams: list[Stream] = []
        self.scheduler = Scheduler(engine)
        self.scheduler.exits = self

        async def commit() -> bool:
            return True

        metrics = Metrics(settings)
        self.runner = Runner(engine, self, self.scheduler, self.book, metrics, commit)
        self.scheduler.start(CAPACITY)

    def put(self, number: int) -> None:
        one = job(number)
        ticket = self.book.register(one.place)
        assert ticket is not None
        one.ticket = ticket
        self.scheduler.put(one, company=self.runner.company(one))

    # the scheduler's exits

    async def run(self, entry: Entry) -> None:
        await self.runner.run(entry)
        ended = [s for s in self.streams if s.head.job_id == entry.job.head.job_id and s.ended]
        if ended and ended[-1].ended is not None and ended[-1].ended[0] != "abandoned":
            self.book.complete(entry.job.ticket)
            self.scheduler.release(entry.job.ticket)

    def refuse(self, job: Job, refusal: Any) -> None:
        raise AssertionError(refusal)

    def waiting(self, job: Job, reason: str, since: float) -> None:
        pass

    def open(
        self, head: Head, *, announce: bool, prompt_tokens: int, number: int = 1, record: Record | None = None
    ) -> Stream:
        self.streams.append(Stream(head))
        return self.streams[-1]

    def ends(self, number: int) -> list[str]:
        return [s.ended[0] if s.ended else "open" for s in self.streams if s.head.job_id == f"job-{number}"]

    def error(self, number: int) -> Error | None:
        (last,) = [s.ended for s in self.streams if s.head.job_id == f"job-{number}"][-1:]
        assert last is not None
        return last[1]


Make = Callable[..., Room]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    rooms: list[Room] = []

    def build(engine: Any, starts: dict[int, int] | None = None) -> Room:
        rooms.append(Room(engine, starts))
        return rooms[-1]

    yield build
    for room in rooms:
        await room.scheduler.stop()


async def until(condition: Callable[[], object], deadline_s: float = 5.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


async def test_who_ran_beside_a_lethal_job_completes_and_the_lethal_one_is_a_dead_letter(make: Make) -> None:
    engine = Mortal({"job-3"})
    room = make(engine)
    for number in range(6):
        room.put(number)
    await until(lambda: all(room.ends(n)[-1:] not in ([], ["open"], ["abandoned"]) for n in range(6)))
    for number in (0, 1, 2, 4, 5):
        assert room.ends(number)[-1] == "completed"
        assert len(room.ends(number)) <= ALONE_DEATHS + 1, "it ran more often than the deaths it was present at"
    assert room.ends(3) == ["abandoned"] * ALONE_DEATHS + ["failed"]
    error = room.error(3)
    assert error is not None and error.code == ErrorCode.POISON_JOB and not error.retriable
    letter = next(s.ended[2] for s in room.streams if s.ended and s.ended[2])
    assert letter.code == ErrorCode.POISON_JOB and letter.attempts == ALONE_DEATHS + 1
    assert engine.beside[-1] == {"job-3"}, "it was not alone when it was found out"
    assert len(engine.beside) == ALONE_DEATHS + 1


async def test_a_suspect_waits_for_what_runs_and_what_comes_waits_for_it(make: Make) -> None:
    engine = Mortal(set())
    room = make(engine, {1: 0, 2: 0, 3: ALONE_STARTS, 4: 0, 5: ALONE_STARTS, 6: 0, 7: 0})
    for number in range(1, 8):
        room.put(number)
        await asyncio.sleep(0.003)  # each begins, if it may, while the one before it runs
    await until(lambda: all(room.ends(n) == ["completed"] for n in range(1, 8)))
    suspects = [together for together in engine.together if together & {"job-3", "job-5"}]
    assert suspects == [{"job-3"}, {"job-5"}], "something ran beside a suspect"
    assert any(len(together) > 1 for together in engine.together), "nothing else ran side by side either"


async def test_who_was_there_when_workers_were_killed_runs_in_groups_beside_others(make: Make) -> None:
    engine = Mortal(set())
    room = make(engine, {**dict.fromkeys(range(1, 9), 2), **dict.fromkeys(range(9, 13), 0)})
    for number in range(1, 13):
        room.put(number)
    await until(lambda: all(room.ends(n) == ["completed"] for n in range(1, 13)))
    suspects = {f"job-{n}" for n in range(1, 9)}
    assert max(len(together & suspects) for together in engine.together) == CAPACITY.max_num_seqs * COMPANY[2]
    assert any(together & suspects and together - suspects for together in engine.together), "others waited for them"


@pytest.mark.parametrize("culprit", [1, 12, 24])
async def test_a_job_that_kills_its_worker_is_found_and_the_others_complete(make: Make, culprit: int) -> None:
    class Killer(Mortal):
        """The whole worker dies: nobody in it learns of it."""

        async def run(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
            with contextlib.suppress(EngineLost):
                async for output in super().run(job, prepared, attempt, priority):
                    if self.beside:
                        break
                    yield output
            if self.beside:
                await asyncio.Event().wait()

    starts = dict.fromkeys(range(1, 25), 0)
    rooms: list[Room] = []
    while starts:
        assert len(rooms) <= MAX_STARTS, "it was not found"
        engine = Killer({f"job-{culprit}"})
        room = make(engine, starts)
        rooms.append(room)
        for number in starts:
            room.put(number)

        await until(lambda: engine.beside or all(room.ends(n)[-1:] in OVER for n in starts))
        killed = {name for beside in engine.beside for name in beside}
        starts = {n: count + (f"job-{n}" in killed) for n, count in starts.items() if room.ends(n) not in OVER}
    for number in range(1, 25):
        (error,) = [room.error(number) for room in rooms if room.ends(number) in OVER]
        assert (error is not None and error.code == ErrorCode.POISON_JOB) == (number == culprit)


async def test_a_job_that_killed_too_many_workers_is_not_run_again(make: Make) -> None:
    room = make(Mortal(set()), {5: MAX_STARTS})
    room.put(5)
    await until(lambda: room.ends(5) == ["failed"])
    error = room.error(5)
    assert error is not None and error.code == ErrorCode.POISON_JOB


async def test_an_engine_that_was_away_already_counts_against_nobody(make: Make) -> None:
    class Away(Mortal):
        refused = 0

        async def run(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
            if self.refused <= MAX_STARTS:
                self.refused += 1
                raise EngineAway("the engine is starting")
            async for output in super().run(job, prepared, attempt, priority):
                yield output

    room = make(Away(set()), {5: ALONE_STARTS})
    room.put(5)
    await until(lambda: room.ends(5)[-1:] == ["completed"])
