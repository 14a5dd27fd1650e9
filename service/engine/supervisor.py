"""Keeps one engine alive: sees its death or hang, ends what ran, and builds it again in this process.

Owns the engine in use, when it is replaced, and the news of it. Never decides what happens to the jobs: those that ran
get EngineLost, and the scheduler waits for `ready`. Rule R11 counts what was present at a death; that is the runner's.

States as told to `on_change`: starting → ready → (dead | stalled) → starting → ready … → closed. `closed` without
`close()` having been called means that it gave up: `reason` says why, in one line, and the worker should exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import cast

from service.engine.protocol import (
    Capacity,
    Engine,
    EngineAway,
    EngineLost,
    EngineState,
    EngineStats,
    Output,
    Prepared,
    StartFailure,
)
from service.job import Job
from service.settings import EngineSettings

log = logging.getLogger(__name__)

CHECK_S = 0.5  # how often the engine's state is looked at
# A hang must be seen at this many checks in a row: after the worker itself was frozen the first look comes before the
# engine's outputs of that time are read.
STALL_CHECKS = 2
CLOSE_S = 30.0  # a dead engine that takes longer to clear away is left behind
# Wait before rebuild k + 1 in a row: 1 s x 2^(k-1), i.e. 1, 2, 4, 8 … at most 30 s. The first comes at once.
BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0


def backoff(failures: int) -> float:
    """Seconds to wait after `failures` failed rebuilds in a row."""
    return min(BACKOFF_MAX_S, BACKOFF_S * 2 ** (failures - 1)) if failures else 0.0


class Supervisor:
    """An `Engine` that outlives the engines it is made of.

    `factory` makes a fresh engine that is not started. `on_change` is called on the event loop with every new state,
    before any job learns that the engine is lost, so that nothing new is admitted in between.
    """

    def __init__(
        self,
        factory: Callable[[], Engine],
        settings: EngineSettings,
        on_change: Callable[[EngineState], None] | None = None,
    ) -> None:
        self._factory = factory
        self._settings = settings
        self._on_change = on_change
        self._engine = factory()
        self._state = EngineState.STARTING
        self._capacity: Capacity | None = None
        self._watch: asyncio.Task[None] | None = None
        self._trip = asyncio.Event()  # wakes the watch before its next check
        self.ready = asyncio.Event()  # for those who wait for a rebuilt engine: tests and benchmarks
        self.rebuilds = 0
        self.reason = ""  # of the last death, hang or failed start

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def current(self) -> Engine:
        """The engine in use; benchmarks run it bare."""
        return self._engine

    @property
    def capacity(self) -> Capacity:
        """As the engine in use reported it; a rebuilt one may have another."""
        if self._capacity is None:
            raise RuntimeError("the engine has not started yet")
        return self._capacity

    @property
    def reported(self) -> Capacity | None:
        """The same, None before the first start."""
        return self._capacity

    async def start(self) -> Capacity:
        """The first start is not repeated: whoever starts a worker is there to read why it failed."""
        self._become(EngineState.STARTING)
        try:
            self._capacity = await self._engine.start()
        except StartFailure as failure:
            self.reason = str(failure)
            self._become(EngineState.CLOSED)
            raise
        self._become(EngineState.READY)
        self._watch = asyncio.create_task(self._keep(), name="engine-supervisor")
        return self._capacity

    async def prepare(self, job: Job) -> Prepared:
        if self._state is not EngineState.READY:
            raise EngineLost(f"the engine is {self._state}")
        return await self._engine.prepare(job)

    async def run(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
        if self._state is not EngineState.READY:
            raise EngineAway(f"the engine is {self._state}")
        engine = self._engine
        outputs = cast(AsyncGenerator[Output, None], engine.run(job, prepared, attempt, priority))
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        except EngineLost as lost:
            if engine is self._engine and self._state is EngineState.READY:
                self._lost(EngineState.DEAD, str(lost))
            raise

    async def cancel(self, attempt: str) -> None:
        await self._engine.cancel(attempt)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def close(self, drain_s: float = 0.0) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        await self._engine.close(drain_s)
        self._become(EngineState.CLOSED)

    # ------------------------------------------------------------------ watching

    async def _keep(self) -> None:
        stalled = 0
        while self._state is not EngineState.CLOSED:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes as the event is set.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._trip.wait()
            self._trip.clear()
            if self._state is EngineState.READY:
                state = self._engine.state
                stalled = stalled + 1 if state is EngineState.STALLED else 0
                if stalled >= STALL_CHECKS:
                    self._lost(state, f"no step for {self._settings.stall_s:g} s although requests run")
                elif state is EngineState.DEAD or state is EngineState.CLOSED:
                    self._lost(EngineState.DEAD, "the engine died")
            if self._state is EngineState.DEAD or self._state is EngineState.STALLED:
                stalled = 0
                await self._rebuild()

    def _lost(self, state: EngineState, reason: str) -> None:
        self.reason = reason
        log.error("engine lost state=%s reason=%s", state, reason)
        self._become(state)
        self._trip.set()

    async def _rebuild(self) -> None:
        failures = 0
        while failures < self._settings.start_attempts:
            await self._clear_away()
            await asyncio.sleep(backoff(failures))
            self._become(EngineState.STARTING)
            try:
                self._engine = self._factory()
                self._capacity = await self._engine.start()
            except Exception as failure:  # whatever it is: without a next try nobody would ever look again
                failures += 1
                self.reason = str(failure) or type(failure).__name__
                log.error(
                    "engine did not start attempt=%d reason=%s",
                    failures,
                    self.reason,
                    exc_info=not isinstance(failure, StartFailure),
                )
                continue
            self.rebuilds += 1
            log.warning("engine rebuilt count=%d", self.rebuilds)
            self._become(EngineState.READY)
            return
        await self._clear_away()
        log.critical("engine given up after %d starts in a row: %s", failures, self.reason)
        self._become(EngineState.CLOSED)

    async def _clear_away(self) -> None:
        """Ends the jobs that wait on the lost engine with EngineLost, and its processes."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._engine.close()
        except Exception:
            log.exception("the lost engine could not be cleared away")

    def _become(self, state: EngineState) -> None:
        if state is self._state and state is not EngineState.STARTING:
            return
        self._state = state
        if state is EngineState.READY:
            self.ready.set()
        else:
            self.ready.clear()
        if self._on_change is not None:
            try:
                self._on_change(state)
            except Exception:
                log.exception("on_change failed state=%s", state)
