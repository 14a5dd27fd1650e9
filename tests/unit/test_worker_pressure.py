"""What the worker makes of delivery's reports: when nothing new may start, and when what runs is given back (R10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.app import Worker
from service.frames import Pressure
from service.settings import EngineSettings, Settings


@pytest.fixture
async def worker(tmp_path: Path) -> Worker:
    return Worker(Settings(state_dir=tmp_path, engine=EngineSettings(kind="simulated")))


def report(store: str | None = None, unacknowledged: int = 0) -> Pressure:
    return Pressure(unacknowledged=unacknowledged, counters={}, store=store)


async def test_nothing_starts_while_the_store_is_away(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for _ in range(3):
            worker.link.heard([report(store="NewConnectionError")])
        assert worker.scheduler.holds == {"store"}
        worker.link.heard([report()])
    assert worker.scheduler.holds == frozenset()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]  # once each, not every 0.5 s


async def test_output_that_nobody_takes_stops_admission_and_at_twice_the_bound_what_runs(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = worker.settings.delivery.max_unacknowledged_bytes
    stopped: list[int] = []
    monkeypatch.setattr(worker.scheduler, "interrupt", lambda: stopped.append(worker.link.unacknowledged))
    worker.link.heard([report(unacknowledged=limit)])
    assert worker.scheduler.holds == frozenset()
    worker.link.heard([report(unacknowledged=limit + 1)])
    assert worker.scheduler.holds == {"memory"} and not stopped
    worker.link.heard([report(unacknowledged=2 * limit + 1)])
    assert stopped == [2 * limit + 1]
    worker.link.heard([report(unacknowledged=limit)])
    assert worker.scheduler.holds == frozenset() and len(stopped) == 1
