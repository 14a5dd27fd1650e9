"""Cancels and deadlines of a job that has begun, wherever it is on its way through the runner (R13, R14)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from schemas.errors import Refusal
from service import runner as runner_module
from service.engine.protocol import EngineFault, EngineLost, Finished, Output, Prepared
from service.frames import Usage
from service.job import Job
from service.ledger.book import Book
from service.runner import Runner
from service.scheduler.scheduler import Entry
from service.settings import Settings
from service.telemetry.metrics import Metrics
from tests.unit.test_runner import HELLO, LO, Delivery, Scheduler, entry


class Engine:
    """Plays one script an attempt; `cancel` ends an attempt that waits, unless it is `deaf`."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.stopped: dict[str, asyncio.Event] = {}
        self.running = 0
        self.deaf = False
        self.rendering: asyncio.Event | None = None

    async def prepare(self, job: Job) -> Prepared:
        if self.rendering is not None:
            await self.rendering.wait()
        return Prepared(prompt_tokens=3, max_tokens=8, n=1)

    async def cancel(self, attempt: str) -> None:
        if not self.deaf and attempt in self.stopped:
            self.stopped[attempt].set()

    async def run(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
        stopped = self.stopped[attempt] = asyncio.Event()
        self.running += 1
        try:
            for step in self.scripts.pop(0):
                if isinstance(step, BaseException):
                    raise step
                if step is WAIT:
                    await stopped.wait()
                else:
                    yield step
            yield Finished(Usage(prompt=3, completion=1, cached=2))
        finally:
            self.running -= 1


WAIT = object()


class Stage:
    def __init__(self, *scripts: list[Any]) -> None:
        self.engine, self.delivery, self.scheduler = Engine(*scripts), Delivery(), Scheduler()
        settings = Settings()
        self.committing: asyncio.Event | None = None
        self.runner = Runner(
            self.engine,  # type: ignore[arg-type]
            self.delivery,
            self.scheduler,  # type: ignore[arg-type]
            Book.of(settings),
            Metrics(settings),
            self._commit,
        )

    async def _commit(self) -> bool:
        if self.committing is not None:
            await self.committing.wait()
        return True

    def go(self, entry: Entry) -> asyncio.Task[None]:
        entry.task = asyncio.create_task(self.runner.run(entry))
        return entry.task

    @property
    def end(self) -> Any:
        """kind, usage, timing, error, dead letter of the last stream."""
        return self.delivery.streams[-1].ended


async def until(condition: Callable[[], Any], deadline_s: float = 5.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.001)


async def test_a_running_job_ends_cancelled_with_what_it_has_and_frees_the_engine() -> None:
    stage, one = Stage([HELLO, WAIT]), entry()
    task = stage.go(one)
    await until(lambda: stage.delivery.streams and stage.delivery.streams[0].deltas)
    assert stage.runner.cancel(one)
    await task
    kind, usage, _, error, dead = stage.end
    assert (kind, usage.completion, usage.cached, error, dead) == ("cancelled", 1, 2, None, None)
    assert stage.engine.running == 0 and stage.delivery.kinds == ["cancelled"] and not stage.scheduler.learnt


async def test_a_job_that_has_ended_is_not_cancelled() -> None:
    stage, one = Stage([HELLO, LO]), entry()
    await stage.go(one)
    assert not stage.runner.cancel(one)
    assert stage.delivery.kinds == ["completed"]


async def test_a_job_whose_last_token_came_with_the_cancel_is_completed() -> None:
    stage, one = Stage([HELLO, LO, WAIT]), entry()
    task = stage.go(one)
    await until(lambda: stage.delivery.streams and len(stage.delivery.streams[0].deltas) == 2)
    stage.runner.cancel(one)
    await task
    assert stage.delivery.kinds == ["completed"]


async def test_an_engine_that_does_not_answer_is_left_after_half_a_second() -> None:
    stage, one = Stage([HELLO, WAIT]), entry()
    stage.engine.deaf = True
    task = stage.go(one)
    await until(lambda: stage.delivery.streams and stage.delivery.streams[0].deltas)
    began = time.monotonic()
    stage.runner.cancel(one)
    await task
    assert time.monotonic() - began < 1.0
    assert stage.engine.running == 0 and stage.delivery.kinds == ["cancelled"] and stage.end[1].completion == 1


async def test_a_job_between_two_attempts_is_cancelled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "BACKOFF_S", 60.0)
    stage, one = Stage([HELLO, EngineFault("x")]), entry()
    task = stage.go(one)
    await until(lambda: stage.delivery.kinds == ["abandoned"])
    stage.runner.cancel(one)
    await asyncio.wait_for(task, 0.4)
    assert stage.delivery.kinds == ["abandoned", "cancelled"]


async def test_a_job_that_is_rendered_again_is_cancelled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "BACKOFF_S", 0.0)
    stage, one = Stage([HELLO, EngineFault("x")]), entry()
    stage.engine.rendering = asyncio.Event()
    task = stage.go(one)
    await until(lambda: stage.delivery.kinds == ["abandoned"])
    await asyncio.sleep(0.01)
    stage.runner.cancel(one)
    await asyncio.wait_for(task, 0.4)
    assert stage.delivery.kinds == ["abandoned", "cancelled"]


async def test_a_job_that_has_not_had_its_first_turn_is_cancelled() -> None:
    stage, one = Stage([WAIT]), entry()
    task = stage.go(one)
    stage.runner.cancel(one)
    await asyncio.wait_for(task, 2.0)
    assert stage.delivery.kinds == ["cancelled"]


async def test_a_job_whose_start_is_being_committed_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, one = Stage([WAIT]), entry()
    monkeypatch.setattr(Book, "careful", lambda self, ticket: True)
    stage.committing = asyncio.Event()
    task = stage.go(one)
    await asyncio.sleep(0.01)
    stage.runner.cancel(one)
    await asyncio.wait_for(task, 0.4)
    assert stage.delivery.kinds == ["cancelled"]


async def test_a_cancelled_job_whose_engine_dies_ends_cancelled_and_does_not_run_again() -> None:
    stage, one = Stage([HELLO, WAIT, EngineLost("gone")]), entry()
    task = stage.go(one)
    await until(lambda: stage.delivery.streams and stage.delivery.streams[0].deltas)
    stage.runner.cancel(one)
    await task
    assert stage.delivery.kinds == ["cancelled"] and not stage.scheduler.requeued


async def test_a_cancelled_job_whose_partition_is_lost_ends_nothing() -> None:
    stage, one = Stage([HELLO, WAIT]), entry()
    stage.engine.deaf = True
    task = stage.go(one)
    await until(lambda: stage.delivery.streams and stage.delivery.streams[0].deltas)
    stage.runner.cancel(one)
    one.gone = True
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.delivery.kinds == ["abandoned"]


async def test_a_job_stopped_for_memory_between_attempts_goes_back_to_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "BACKOFF_S", 60.0)
    stage, one = Stage([HELLO, EngineFault("x")]), entry()
    task = stage.go(one)
    await until(lambda: stage.delivery.kinds == ["abandoned"])
    one.interrupted = True
    task.cancel()
    await asyncio.wait_for(task, 1.0)
    assert stage.scheduler.requeued == [one]


async def test_a_deadline_between_two_attempts_ends_the_job_within_the_tolerance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "BACKOFF_S", 60.0)
    stage = Stage([HELLO, EngineFault("x")])
    one = entry(deadline=time.time() + 0.1)
    began = time.monotonic()
    await asyncio.wait_for(stage.go(one), 5.0)
    assert 0.1 <= time.monotonic() - began < 2.1
    assert stage.delivery.kinds == ["abandoned", "expired"]


async def test_an_engines_own_timeout_is_not_the_jobs_deadline() -> None:
    stage = Stage([HELLO, TimeoutError()])
    await stage.go(entry(deadline=time.time() + 60))
    assert stage.delivery.kinds == ["failed"]


async def test_a_refusal_between_attempts_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "BACKOFF_S", 0.0)
    stage = Stage([HELLO, EngineFault("x")])

    async def refuse(job: Job) -> Prepared:
        raise Refusal("invalid_request", "no")  # type: ignore[arg-type]

    stage.engine.prepare = refuse  # type: ignore[method-assign]
    await stage.go(entry())
    assert stage.delivery.kinds == ["abandoned", "failed"]
