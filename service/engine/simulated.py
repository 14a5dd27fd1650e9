"""An engine without weights: vLLM's timing, queueing and KV accounting in one timer callback. For tests and scale.

Owns the requests and the clock; the scheduling and the length of a step are `batch.py`'s. Never claims to be a model:
its name is `simulated:<served name>` in every reply. Steps follow each other on the engine's own clock, so a late event
loop finds several tokens waiting, as with vLLM.

What a job says, and the faults that tests may ask for, are in `script.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from service.engine import pace, profiles, script
from service.engine.batch import Batch, Sequence
from service.engine.bounds import queue_bound
from service.engine.prefixes import BLOCK
from service.engine.protocol import (
    Capacity,
    EngineAway,
    EngineFault,
    EngineLost,
    EngineState,
    EngineStats,
    Finished,
    Output,
    Overloaded,
    Prepared,
)
from service.engine.script import Script
from service.frames import Delta, Usage
from service.job import Job
from service.settings import Settings

DEFAULT_CONTEXT = 8192  # tokens, when the settings name none
CATCH_UP_STEPS = 32  # steps applied in one turn of a late loop, so that other callbacks get their turn


@dataclass(slots=True, eq=False, kw_only=True)
class _Choice(Sequence):
    request: _Request
    index: int
    interval: int  # tokens per output
    sent: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    attempt: str
    prepared: Prepared
    script: Script
    choices: list[_Choice] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None
    ready: bool = False
    open: int = 0  # choices not finished
    cancelled: bool = False
    error: Exception | None = None
    scheduled: float | None = None  # wall clock
    first_token: float | None = None
    last_token: float | None = None

    def wake(self) -> None:
        self.ready = True
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)


class SimulatedEngine:
    """The `Engine` protocol on a timer. All requests share one callback; a token costs well under a microsecond."""

    def __init__(self, settings: Settings, salt: Callable[[str], str] = str) -> None:
        """`salt` gives a tenant's prefix-cache salt: by default its name."""
        self._settings = settings.engine
        self._salt = salt
        self._state = EngineState.STARTING
        self._names = (settings.engine.served_name, f"simulated:{settings.engine.served_name}")
        self._context = settings.engine.max_model_len or DEFAULT_CONTEXT
        self._bound = queue_bound(settings.engine.max_num_seqs)
        self._requests: dict[str, _Request] = {}
        profile = profiles.chosen(settings.engine)
        self._kv_tokens = profile.kv_tokens
        self._batch: Batch[_Choice] = Batch(
            settings.engine.max_num_seqs, settings.engine.max_num_batched_tokens, profile.kv_tokens, profile.time
        )
        self._sequences = 0  # accepted and not ended
        self._step_end: float | None = None  # None = idle
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()  # no request in the engine
        self._stats = EngineStats()

    @property
    def state(self) -> EngineState:
        stalled = self._state is EngineState.READY and self._requests and self._step_end is not None
        if stalled and time.monotonic() - self._stats.last_step > self._settings.stall_s:
            return EngineState.STALLED
        return self._state

    async def start(self) -> Capacity:
        await asyncio.sleep(self._settings.sim_start_s)
        self._loop = asyncio.get_running_loop()
        self._stats.last_step = time.monotonic()
        self._state = EngineState.READY
        return Capacity(
            max_model_len=self._context,
            max_num_seqs=self._settings.max_num_seqs,
            kv_tokens=self._kv_tokens,
            block_size=BLOCK,
            model=self._names[1],
            version="simulated",
        )

    # ------------------------------------------------------------------ prepare

    async def prepare(self, job: Job) -> Prepared:
        salt, most = self._salt(job.tenant), self._settings.max_prompt_chars
        return script.read(job.head.endpoint, job.body, self._names, self._context, most, salt)

    # ------------------------------------------------------------------ run

    async def run(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
        if self._state is not EngineState.READY or self._loop is None:
            raise EngineAway(f"the engine is {self._state}")
        if self._sequences + prepared.n > self._bound:
            raise Overloaded(f"{self._sequences} sequences are in the engine already")
        request = self._enter(job, prepared, attempt, priority)
        loop = self._loop
        try:
            while True:
                if not request.ready:
                    request.waiter = loop.create_future()
                    await request.waiter
                request.ready = False
                if request.error is not None:
                    raise request.error
                deltas = _take(request)
                if deltas:
                    yield deltas
                if not request.open or request.cancelled:
                    break
            yield Finished(
                usage=Usage(
                    prepared.prompt_tokens,
                    sum(c.sent for c in request.choices),
                    min((c.cached for c in request.choices if c.cached is not None), default=0),
                ),
                scheduled=request.scheduled,
                first_token=request.first_token,
                last_token=request.last_token,
                preemptions=sum(c.preemptions for c in request.choices),
            )
        finally:
            self._leave(request)

    async def cancel(self, attempt: str) -> None:
        request = self._requests.get(attempt)
        if request is not None:
            request.cancelled = True
            self._remove(request)
            request.wake()

    def stats(self) -> EngineStats:
        stats, batch = self._stats, self._batch
        stats.running = batch.running
        stats.waiting = self._sequences - stats.running
        stats.kv_usage = batch.kv / self._kv_tokens
        stats.preemptions, stats.generated = batch.preemptions, batch.generated
        stats.prefix_queries, stats.prefix_hits = batch.prefixes.queries, batch.prefixes.found
        return stats

    async def close(self, drain_s: float = 0.0) -> None:
        if drain_s > 0 and self._requests and self._state is EngineState.READY:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
        self._lose(EngineState.CLOSED, "the engine was closed")

    # ------------------------------------------------------------------ requests in and out

    def _enter(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> _Request:
        told: Script = prepared.request
        now = time.monotonic()
        request = _Request(attempt, prepared, told, open=prepared.n)
        limit = told.fault_after if told.fault else prepared.max_tokens
        every = pace.interval(job, self._settings.stream_interval)
        for index in range(prepared.n):
            choice = _Choice(
                priority=priority,
                arrival=now,
                prompt=prepared.prompt_tokens,
                blocks=told.blocks,
                limit=limit,
                request=request,
                index=index,
                interval=every,
            )
            request.choices.append(choice)
            self._batch.add(choice)
        self._requests[attempt] = request
        self._idle.clear()
        self._sequences += prepared.n
        if self._step_end is None:
            self._stats.last_step = now
            self._begin(now)
            self._arm()
        return request

    def _leave(self, request: _Request) -> None:
        if self._requests.get(request.attempt) is request:
            del self._requests[request.attempt]
            if not self._requests:
                self._idle.set()
        self._remove(request)
        request.choices = []  # breaks the reference cycle: nothing is left for the garbage collector

    def _remove(self, request: _Request) -> None:
        """Frees the slots and KV of the choices that have not ended; idempotent."""
        if not request.open:
            return
        for choice in request.choices:
            if not choice.finished:
                self._sequences -= 1
                self._batch.drop(choice)
        request.open = 0

    def _lose(self, state: EngineState, reason: str) -> None:
        self._state = state
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._step_end = None
        for request in list(self._requests.values()):
            request.error = EngineLost(reason)
            self._remove(request)
            request.wake()
        self._batch.clear()

    # ------------------------------------------------------------------ steps

    def _arm(self) -> None:
        if self._step_end is not None and self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, self._step_end - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        for _ in range(CATCH_UP_STEPS):
            end = self._step_end
            if end is None or end > now:
                break
            if not self._finish_step():
                return  # dead or hanging: no further step
            self._begin(end)
        self._stats.last_step = now
        self._arm()

    def _begin(self, at: float) -> None:
        """Sets the end of the step that starts at `at`; idle when there is nothing to do."""
        seconds = self._batch.begin()
        self._step_end = None if seconds is None else at + seconds
        if self._batch.admitted:
            now = time.time()
            for choice in self._batch.admitted:
                if choice.request.scheduled is None:
                    choice.request.scheduled = now

    def _finish_step(self) -> bool:
        """Takes in what the step made. False = no step follows."""
        step = self._batch.finish()
        if step.started:
            now = time.time()
            for choice in step.started:
                if choice.request.first_token is None:
                    choice.request.first_token = now
        ended: list[_Choice] | None = None
        for choice in step.told:
            if choice.produced >= choice.limit:
                (ended := ended or []).append(choice)
            elif not choice.request.ready:
                choice.request.wake()
        return ended is None or self._end(ended)

    def _end(self, choices: list[_Choice]) -> bool:
        now = time.time()
        done: list[_Choice] = []
        for choice in choices:
            request = choice.request
            if choice.finished:
                continue  # another choice of its job has failed in this very step
            match request.script.fault:
                case "fault":
                    request.error = EngineFault("a fault was asked for in the prompt (simulated engine)")
                    self._remove(request)
                case "lost":
                    self._lose(EngineState.DEAD, "the simulated engine was told to die")
                    return False
                case "hang":
                    return False
                case _:
                    request.last_token = now
                    request.open -= 1
                    self._sequences -= 1
                    done.append(choice)
            request.wake()
        self._batch.retire(done)
        return True


def _take(request: _Request) -> list[Delta]:
    """What each choice has produced since the last look, one delta a choice."""
    deltas = []
    for choice in request.choices:
        produced, sent = choice.produced, choice.sent
        if produced == sent:
            continue
        choice.sent = produced
        choice.tell_at = min(choice.limit, produced + choice.interval)
        text = request.script.text(choice.index, sent, produced)
        delta = Delta(choice.index, text, produced - sent)
        if choice.finished and produced >= choice.limit and not request.cancelled:
            delta.finish_reason = "length" if request.script.capped else "stop"
        deltas.append(delta)
    return deltas
