"""An engine without weights: vLLM's timing, queueing and KV accounting in one timer callback. For tests and scale.

Owns the timing model. Never claims to be a model: its name is
`simulated:<served name>` in every reply. A step takes `base + per_seq x running + per_prefill_token x tokens` seconds;
steps follow each other on the engine's own clock, so a late event loop finds several tokens waiting, as with vLLM.

What a job says, and the faults that tests may ask for, are in `script.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from service.engine import pace, script
from service.engine.bounds import queue_bound
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

BLOCK = 16  # tokens per KV block
DEFAULT_CONTEXT = 8192  # tokens, when the settings name none
CATCH_UP_STEPS = 32  # steps applied in one turn of a late loop, so that other callbacks get their turn


@dataclass(slots=True, eq=False)
class _Sequence:
    """One choice: a slot of the engine while it runs."""

    request: _Request
    index: int
    prefill: int  # tokens still to be computed before the next output token
    limit: int  # output tokens at which something happens: the end, or the fault
    interval: int
    produced: int = 0
    sent: int = 0
    chunk: int = 0  # prefill tokens in the step under way
    finished: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    attempt: str
    prepared: Prepared
    script: Script
    priority: int
    arrival: float  # on the engine's clock
    sequences: list[_Sequence] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None
    ready: bool = False
    open: int = 0  # choices not finished
    cancelled: bool = False
    error: Exception | None = None
    scheduled: float | None = None  # wall clock
    first_token: float | None = None
    last_token: float | None = None
    preemptions: int = 0

    def wake(self) -> None:
        self.ready = True
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)


class SimulatedEngine:
    """The `Engine` protocol on a timer. All requests share one callback; a token costs well under a microsecond."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.engine
        self._state = EngineState.STARTING
        self._names = (settings.engine.served_name, f"simulated:{settings.engine.served_name}")
        self._context = settings.engine.max_model_len or DEFAULT_CONTEXT
        self._bound = queue_bound(settings.engine.max_num_seqs)
        self._requests: dict[str, _Request] = {}
        self._waiting: list[tuple[int, float, int, _Sequence]] = []  # heap: priority, arrival, tie breaker
        self._prefilling: list[_Sequence] = []
        self._decoding: list[_Sequence] = []
        self._order = itertools.count()
        self._kv = 0  # tokens held by the running sequences
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
            kv_tokens=self._settings.sim_kv_tokens,
            block_size=BLOCK,
            model=self._names[1],
            version="simulated",
        )

    # ------------------------------------------------------------------ prepare

    async def prepare(self, job: Job) -> Prepared:
        return script.read(job.head.endpoint, job.body, self._names, self._context, self._settings.max_prompt_chars)

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
                usage=Usage(prepared.prompt_tokens, sum(s.sent for s in request.sequences)),
                scheduled=request.scheduled,
                first_token=request.first_token,
                last_token=request.last_token,
                preemptions=request.preemptions,
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
        stats = self._stats
        stats.running = len(self._decoding) + len(self._prefilling)
        stats.waiting = self._sequences - stats.running
        stats.kv_usage = self._kv / self._settings.sim_kv_tokens
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
        request = _Request(attempt, prepared, told, priority, now, open=prepared.n)
        limit = told.fault_after if told.fault else prepared.max_tokens
        every = pace.interval(job, self._settings.stream_interval)
        for index in range(prepared.n):
            # Choices after the first find the prompt in the prefix cache, but for its last token.
            prefill = prepared.prompt_tokens if index == 0 else 1
            sequence = _Sequence(request, index, prefill, limit, every)
            request.sequences.append(sequence)
            heapq.heappush(self._waiting, (priority, now, next(self._order), sequence))
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
        request.sequences = []  # breaks the reference cycle: nothing is left for the garbage collector

    def _remove(self, request: _Request) -> None:
        """Frees the slots and KV of the choices that have not ended; idempotent."""
        if not request.open:
            return
        for sequence in request.sequences:
            if sequence.finished:
                continue
            sequence.finished = True
            self._sequences -= 1
            for group in (self._decoding, self._prefilling):
                if sequence in group:
                    group.remove(sequence)
                    self._kv -= self._held(sequence)
        request.open = 0

    @staticmethod
    def _held(sequence: _Sequence) -> int:
        """KV tokens of a running sequence; later choices share the prompt of the first."""
        return sequence.produced + (sequence.request.prepared.prompt_tokens if sequence.index == 0 else 0)

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
        self._waiting.clear()

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
        """Admits what fits and sets the end of the step that starts at `at`; idle when there is nothing to do."""
        settings = self._settings
        waiting, prefilling, decoding = self._waiting, self._prefilling, self._decoding
        while waiting and len(decoding) + len(prefilling) < settings.max_num_seqs:
            sequence = waiting[0][3]
            if sequence.finished:
                heapq.heappop(waiting)
                continue
            held = self._held(sequence)
            alone = not decoding and not prefilling
            if not alone and self._kv + held + len(decoding) > settings.sim_kv_tokens:
                break
            heapq.heappop(waiting)
            self._kv += held
            prefilling.append(sequence)
            if sequence.request.scheduled is None:
                sequence.request.scheduled = time.time()
        budget = max(1, settings.max_num_batched_tokens - len(decoding))
        prefill = 0
        for sequence in prefilling:
            sequence.chunk = min(sequence.prefill, budget - prefill)
            prefill += sequence.chunk
        running = len(decoding) + len(prefilling)
        if not running:
            self._step_end = None
            return
        self._step_end = at + (
            settings.sim_step_base_s
            + settings.sim_step_per_seq_s * running
            + settings.sim_step_per_prefill_token_s * prefill
        )

    def _finish_step(self) -> bool:
        """One token for each decoding sequence and for each whose prefill ended. False = no step follows."""
        started = [s for s in self._prefilling if s.prefill <= s.chunk]
        for sequence in self._prefilling:
            sequence.prefill -= sequence.chunk
        if started:
            self._prefilling = [s for s in self._prefilling if s.prefill > 0]
            self._decoding.extend(started)
        decoding = self._decoding
        self._kv += len(decoding)
        self._stats.generated += len(decoding)
        ended: list[_Sequence] | None = None
        for sequence in decoding:
            produced = sequence.produced = sequence.produced + 1
            if produced >= sequence.limit:
                (ended := ended or []).append(sequence)
            elif produced - sequence.sent >= sequence.interval or produced == 1:
                request = sequence.request
                if not request.ready:
                    request.wake()
        if started:
            now = time.time()
            for sequence in started:
                if sequence.request.first_token is None:
                    sequence.request.first_token = now
        if ended is not None and not self._end(ended):
            return False
        if self._kv > self._settings.sim_kv_tokens and len(self._decoding) > 1:
            self._preempt()
        return True

    def _end(self, sequences: list[_Sequence]) -> bool:
        now = time.time()
        for sequence in sequences:
            request = sequence.request
            if sequence.finished:
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
                    sequence.finished = True
                    self._sequences -= 1
                    self._kv -= self._held(sequence)
            request.wake()
        self._decoding = [s for s in self._decoding if not s.finished]
        return True

    def _preempt(self) -> None:
        """Out of KV blocks: the worst priority, then the newest, goes back and is computed again later."""
        victim = max(self._decoding, key=lambda s: (s.request.priority, s.request.arrival, s.index))
        request = victim.request
        self._decoding.remove(victim)
        self._kv -= self._held(victim)
        victim.prefill = request.prepared.prompt_tokens + victim.produced
        request.preemptions += 1
        self._stats.preemptions += 1
        heapq.heappush(self._waiting, (request.priority, request.arrival, next(self._order), victim))


def _take(request: _Request) -> list[Delta]:
    """What each choice has produced since the last look, one delta a choice."""
    deltas = []
    for sequence in request.sequences:
        produced, sent = sequence.produced, sequence.sent
        if produced == sent:
            continue
        sequence.sent = produced
        text = request.script.text(sequence.index, sent, produced)
        delta = Delta(sequence.index, text, produced - sent)
        if sequence.finished and produced >= sequence.limit and not request.cancelled:
            delta.finish_reason = "length" if request.script.capped else "stop"
        deltas.append(delta)
    return deltas
