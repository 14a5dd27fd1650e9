from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.errors import InvalidRequest
from service import runner as runner_module
from service.engine.protocol import EngineFault, EngineLost, Finished, Output, Prepared
from service.frames import Dead, Delta, Error, Head, Timing, Usage
from service.job import Job, Record
from service.ledger.book import Book
from service.runner import MAX_ATTEMPTS, Runner
from service.scheduler.scheduler import Entry
from service.settings import Settings
from service.telemetry.metrics import Metrics
from tests.unit.jobs import job


class Stream:
    def __init__(self) -> None:
        self.attempt = "01J0000000000000000000000A"
        self.deltas: list[Delta] = []
        self.ended: tuple[str, Usage, Timing, Error | None, Dead | None] | None = None

    def send(self, deltas: list[Delta]) -> None:
        assert self.ended is None, "nothing may follow an end"
        self.deltas += deltas

    def end(
        self, kind: str, usage: Usage, timing: Timing, error: Error | None = None, dead: Dead | None = None
    ) -> None:
        assert self.ended is None, "an attempt ends once"
        self.ended = (kind, usage, timing, error, dead)


class Delivery:
    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def open(
        self, head: Head, *, announce: bool, prompt_tokens: int, number: int = 1, record: Record | None = None
    ) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @property
    def kinds(self) -> list[str]:
        return [s.ended[0] if s.ended else "open" for s in self.streams]


class Scheduler:
    def __init__(self) -> None:
        self.requeued: list[Entry] = []
        self.learnt: list[int] = []

    def requeue(self, entry: Entry) -> None:
        self.requeued.append(entry)

    def learn(self, job: Job, completion_tokens: int, n: int) -> None:
        self.learnt.append(completion_tokens)


class Engine:
    """Plays one script an attempt: outputs, or an exception to raise."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.closed = 0

    async def prepare(self, job: Job) -> Prepared:
        return Prepared(prompt_tokens=3, max_tokens=8, n=1)

    async def run(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
        script = self.scripts.pop(0)
        try:
            for step in script:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                yield step
        finally:
            self.closed += 1


HELLO = [Delta(index=0, text="hel", tokens=1)]
LO = [Delta(index=0, text="lo", tokens=2, finish_reason="stop")]
FINISHED = Finished(Usage(prompt=3, completion=3, cached=0), scheduled=1.0, first_token=2.0, last_token=3.0)


def build(*scripts: list[Any]) -> tuple[Runner, Delivery, Scheduler, Engine]:
    settings = Settings()
    delivery, scheduler, engine = Delivery(), Scheduler(), Engine(*scripts)

    async def commit() -> bool:
        return True

    runner = Runner(engine, delivery, scheduler, Book.of(settings), Metrics(settings), commit)  # type: ignore[arg-type]
    return runner, delivery, scheduler, engine


def entry(**kwargs: Any) -> Entry:
    return Entry(job(**kwargs), time.time(), prepared=Prepared(3, 8, 1), admitted=time.time())


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "BACKOFF_S", 0.0)


async def test_a_job_that_ends_well_is_completed_with_its_usage() -> None:
    runner, delivery, scheduler, _ = build([HELLO, LO, FINISHED])
    await runner.run(entry())
    (stream,) = delivery.streams
    assert stream.ended is not None
    kind, usage, timing, error, dead = stream.ended
    assert (kind, usage.completion, error, dead) == ("completed", 3, None, None)
    assert (timing.first_token, timing.last_token) == (2.0, 3.0)
    assert "".join(d.text for d in stream.deltas) == "hello"
    assert scheduler.learnt == [3]


async def test_a_fault_is_tried_again_in_place_under_a_new_attempt() -> None:
    runner, delivery, _, _ = build([HELLO, EngineFault("x")], [HELLO, LO, FINISHED])
    await runner.run(entry())
    assert delivery.kinds == ["abandoned", "completed"]


async def test_a_job_that_fails_always_ends_failed_with_a_dead_letter() -> None:
    runner, delivery, _, _ = build(*([EngineFault("x")] for _ in range(MAX_ATTEMPTS)))
    await runner.run(entry())
    assert delivery.kinds == ["abandoned"] * (MAX_ATTEMPTS - 1) + ["failed"]
    ended = delivery.streams[-1].ended
    assert ended is not None and ended[3] is not None and ended[4] is not None
    assert (ended[3].code, ended[3].retriable, ended[4].code) == ("engine_failed", True, "engine_failed")
    assert ended[4].value == b"x" * 200


async def test_a_lost_engine_sends_the_job_back_to_the_queue() -> None:
    runner, delivery, scheduler, _ = build([HELLO, EngineLost("gone")])
    e = entry()
    await runner.run(e)
    assert delivery.kinds == ["abandoned"]
    assert scheduler.requeued == [e]


async def test_a_refusal_by_the_engine_is_never_tried_again() -> None:
    runner, delivery, _, _ = build([InvalidRequest("seed: too large")])
    await runner.run(entry())
    assert delivery.kinds == ["failed"]
    ended = delivery.streams[0].ended
    assert ended is not None and ended[3] == Error("invalid_request", "seed: too large", False)


async def test_a_deadline_ends_a_running_job_as_expired_with_what_it_has() -> None:
    runner, delivery, _, engine = build([HELLO, asyncio.Event()])
    await runner.run(entry(deadline=time.time() + 0.05))
    assert delivery.kinds == ["expired"]
    ended = delivery.streams[0].ended
    assert ended is not None and ended[1].completion == 1 and ended[3] is None
    assert engine.closed == 1


async def test_our_own_error_ends_the_job_with_a_dead_letter_instead_of_silence() -> None:
    runner, delivery, _, _ = build([HELLO, KeyError("bug")])
    await runner.run(entry())
    ended = delivery.streams[0].ended
    assert ended is not None and ended[0] == "failed" and ended[3] is not None and ended[4] is not None
    assert ended[3].code == "internal"


async def test_a_stopped_job_is_abandoned_and_frees_the_engine() -> None:
    runner, delivery, scheduler, engine = build([HELLO, asyncio.Event()])
    task = asyncio.create_task(runner.run(entry()))
    while not (delivery.streams and delivery.streams[0].deltas):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert delivery.kinds == ["abandoned"] and engine.closed == 1 and not scheduler.requeued


async def test_a_job_stopped_for_memory_goes_back_to_the_queue() -> None:
    runner, delivery, scheduler, _ = build([HELLO, asyncio.Event()])
    e = entry()
    task = asyncio.create_task(runner.run(e))
    while not (delivery.streams and delivery.streams[0].deltas):
        await asyncio.sleep(0)
    e.interrupted = True
    task.cancel()
    await task
    assert delivery.kinds == ["abandoned"] and scheduler.requeued == [e]
