"""The supervisor replaces a dead or hanging engine in place, and its callers hear of it. On the simulated engine."""

from __future__ import annotations

import asyncio

import pytest

from service.engine import build, supervisor
from service.engine.protocol import Capacity, Engine, EngineLost, EngineState, StartFailure
from service.engine.simulated import SimulatedEngine
from service.engine.supervisor import Supervisor, backoff
from tests.unit.test_engine_simulated import ask, job_of, settings_of, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CHECK_S", 0.02)
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)


async def test_a_death_is_followed_by_a_rebuild_and_the_news_in_order() -> None:
    settings = settings_of()
    seen: list[EngineState] = []
    engine = Supervisor(lambda: build(settings, str), settings.engine, seen.append)
    capacity = await engine.start()
    assert engine.capacity == capacity and engine.ready.is_set()
    with pytest.raises(EngineLost):
        await ask(engine, job_of("[[sim:lost]]"))
    assert engine.state is EngineState.DEAD and not engine.ready.is_set(), "known before the job can come again"
    with pytest.raises(EngineLost):
        await engine.prepare(job_of())
    await asyncio.wait_for(engine.ready.wait(), 5)
    assert seen == [EngineState.STARTING, EngineState.READY, EngineState.DEAD, EngineState.STARTING, EngineState.READY]
    assert engine.rebuilds == 1
    _, end = await ask(engine, job_of(max_tokens=5))
    assert end.usage.completion == 5
    await engine.close()
    assert seen[-1] is EngineState.CLOSED


async def test_a_death_while_nothing_runs_is_seen_too() -> None:
    settings = settings_of()
    engine = Supervisor(lambda: build(settings, str), settings.engine)
    await engine.start()
    engine.current._lose(EngineState.DEAD, "killed")  # type: ignore[attr-defined]
    await until(lambda: engine.rebuilds == 1)
    await engine.close()


async def test_a_hang_ends_its_jobs_and_is_followed_by_a_rebuild() -> None:
    settings = settings_of(stall_s=0.05)
    seen: list[EngineState] = []
    engine = Supervisor(lambda: build(settings, str), settings.engine, seen.append)
    await engine.start()
    with pytest.raises(EngineLost):
        await asyncio.wait_for(ask(engine, job_of("[[sim:hang]]")), 5)
    await asyncio.wait_for(engine.ready.wait(), 5)
    assert EngineState.STALLED in seen
    assert engine.rebuilds == 1
    await engine.close()


async def test_one_look_at_a_stalled_engine_is_not_enough() -> None:
    """After a freeze of the whole worker the first look comes before the outputs of that time are read."""
    settings = settings_of()

    class Blinking(SimulatedEngine):
        looks = 0

        @property
        def state(self) -> EngineState:
            self.looks += 1
            return EngineState.STALLED if self.looks % 2 else super().state

    engine = Supervisor(lambda: Blinking(settings), settings.engine)
    await engine.start()
    await asyncio.sleep(0.2)
    assert engine.rebuilds == 0
    await engine.close()


class Failing(SimulatedEngine):
    async def start(self) -> Capacity:
        raise StartFailure("the model folder is gone: put it back")


async def test_after_so_many_failed_starts_in_a_row_it_gives_up_and_says_why() -> None:
    settings = settings_of(start_attempts=3)
    made: list[Engine] = []

    def factory() -> Engine:
        made.append(Failing(settings) if made else SimulatedEngine(settings))
        return made[-1]

    engine = Supervisor(factory, settings.engine)
    await engine.start()
    with pytest.raises(EngineLost):
        await ask(engine, job_of("[[sim:lost]]"))
    await until(lambda: engine.state is EngineState.CLOSED)
    assert len(made) == 1 + 3
    assert engine.reason == "the model folder is gone: put it back"
    assert not engine.ready.is_set()
    await engine.close()


async def test_a_start_that_fails_now_and_then_is_repeated() -> None:
    settings = settings_of(start_attempts=3)
    made: list[Engine] = []

    def factory() -> Engine:
        made.append(Failing(settings) if len(made) in (1, 2) else SimulatedEngine(settings))
        return made[-1]

    engine = Supervisor(factory, settings.engine)
    await engine.start()
    with pytest.raises(EngineLost):
        await ask(engine, job_of("[[sim:lost]]"))
    await asyncio.wait_for(engine.ready.wait(), 5)
    assert (len(made), engine.rebuilds) == (4, 1)
    await engine.close()


async def test_the_first_start_is_not_repeated() -> None:
    settings = settings_of()
    engine = Supervisor(lambda: Failing(settings), settings.engine)
    with pytest.raises(StartFailure, match="model folder"):
        await engine.start()
    assert engine.state is EngineState.CLOSED


async def test_close_in_the_middle_of_a_rebuild_ends_it() -> None:
    settings = settings_of(sim_start_s=0.0)
    slow = settings_of(sim_start_s=60.0)
    made: list[Engine] = []

    def factory() -> Engine:
        made.append(SimulatedEngine(slow if made else settings))
        return made[-1]

    engine = Supervisor(factory, settings.engine)
    await engine.start()
    with pytest.raises(EngineLost):
        await ask(engine, job_of("[[sim:lost]]"))
    await until(lambda: len(made) == 2)
    await asyncio.wait_for(engine.close(), 2)
    assert engine.state is EngineState.CLOSED


async def test_a_listener_that_fails_does_not_stop_the_rebuild() -> None:
    settings = settings_of()

    def broken(state: EngineState) -> None:
        raise RuntimeError(state)

    engine = Supervisor(lambda: build(settings, str), settings.engine, broken)
    await engine.start()
    with pytest.raises(EngineLost):
        await ask(engine, job_of("[[sim:lost]]"))
    await asyncio.wait_for(engine.ready.wait(), 5)
    await engine.close()


def test_backoff_starts_at_once_and_doubles_up_to_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 1.0)
    assert [backoff(failures) for failures in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
