"""In which order a worker's parts start and stop (R8, R13, R18, R19): a later place would break what each waits for."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from service import topics
from service.app import Superseded, Worker
from service.engine.protocol import Capacity
from service.settings import EngineSettings, KafkaSettings, Settings

CAPACITY = Capacity(max_model_len=512, max_num_seqs=8, kv_tokens=10_000, block_size=16, model="m", version="1")


class Parts:
    """A worker whose parts only note that they were called."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        kafka = KafkaSettings(instance="pod-0")
        self.worker = Worker(Settings(state_dir=state, kafka=kafka, engine=EngineSettings(kind="simulated")))
        answers = {"engine.start": CAPACITY, "scheduler.drain": 0}
        for name, part in list(vars(self.worker).items()):  # whatever has a life of its own
            for method in ("start", "drain", "flush", "stop", "close"):
                if inspect.iscoroutinefunction(getattr(part, method, None)):
                    self._note(monkeypatch, part, name, method, answers.get(f"{name}.{method}"))
        self._note(monkeypatch, self.worker.reception.deferral, "deferral", "start")
        for starts_at_once in (self.worker.reception.copies, self.worker.reception.spill):
            monkeypatch.setattr(starts_at_once, "start", lambda: None)
        monkeypatch.setattr(self.worker.tenants, "opened", lambda: None)
        monkeypatch.setattr(topics, "require", self._called("topics", 1000.0))

    def _called(self, name: str, answer: Any) -> Any:
        async def call(*_: Any, **__: Any) -> Any:
            self.order.append(name)
            return answer

        return call

    def _note(self, monkeypatch: pytest.MonkeyPatch, part: Any, name: str, method: str, answer: Any = None) -> None:
        monkeypatch.setattr(part, method, self._called(f"{name}.{method}", answer))


@pytest.fixture
async def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(tmp_path, monkeypatch)


def before(order: list[str], *names: str) -> None:
    assert [name for name in order if name in names] == list(names)


async def test_a_worker_joins_its_group_last(parts: Parts) -> None:
    await parts.worker.start()
    # A worker of the same name must have gone; topics must be there; nobody waits for a loading engine.
    before(parts.order, "topics", "link.start", "engine.start", "consumer.start")
    # A job that was cancelled must not run meanwhile, and an elder of our static id must hear of us first.
    before(parts.order, "cancels.start", "consumer.start")
    before(parts.order, "registry.start", "consumer.start")
    before(parts.order, "namesakes.start", "consumer.start")
    assert parts.order[-1] == "consumer.start"
    assert parts.worker.intake.jobs_retention_s == 1000.0
    await parts.worker.stop(0.0)


async def test_a_worker_takes_nothing_in_before_its_last_flush_and_commits_before_delivery_ends(parts: Parts) -> None:
    await parts.worker.start()
    parts.order.clear()
    await parts.worker.stop(1.0)
    before(parts.order, "scheduler.drain", "reception.stop", "link.flush", "consumer.stop", "link.stop", "engine.close")


async def test_a_part_that_hangs_or_is_cancelled_does_not_keep_the_others_from_stopping(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    async def cancelled(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError  # as the client library does when a connection goes away

    monkeypatch.setattr("service.app.PART_STOP_S", 0.05)
    monkeypatch.setattr(parts.worker.consumer, "stop", hangs)
    monkeypatch.setattr(parts.worker.reply_topics, "stop", cancelled)
    await parts.worker.start()
    async with asyncio.timeout(2):
        await parts.worker.stop(0.0)
    assert parts.order[-2:] == ["engine.close", "health.stop"]


async def test_parts_that_all_hang_do_not_add_up(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("service.app.PARTS_STOP_S", 0.1)
    monkeypatch.setattr("service.app.LATE_PART_S", 0.02)
    await parts.worker.start()
    worker = parts.worker
    for part in (worker.cancels, worker.registry, worker.reception, worker.consumer, worker.reply_topics):
        monkeypatch.setattr(part, "stop", hangs)
    async with asyncio.timeout(2):
        await worker.stop(0.0)
    assert parts.order[-2:] == ["engine.close", "health.stop"]


async def test_who_is_superseded_drains_nothing_and_says_who_it_was(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[float] = []

    async def drain(seconds: float) -> int:
        drained.append(seconds)
        return 0

    monkeypatch.setattr(parts.worker.scheduler, "drain", drain)
    running = asyncio.create_task(parts.worker.run(lambda worker: worker._superseded("w2")))
    with pytest.raises(Superseded, match="worker w2 has taken over the static member id pod-0"):
        await running
    assert drained == [0.0]
