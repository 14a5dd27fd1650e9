"""vLLM's scheduling in numbers: slots, token budget, waiting list, KV blocks, a step's length. Pure; has no clock.

Owns the timing model of the simulated engine. A step takes

    base + per_seq x sequences + per_prefill_token x prompt tokens + per_kv_token x tokens of context that are read

seconds. As with vLLM's `scheduling_policy="priority"`: running sequences first, each one token; then prompts, in chunks
as far as the step's token budget goes; the waiting list by lowest priority value, then arrival. When the KV cache is
full, the running sequence of highest value is put back and computed again.

Steps are planned one ahead (vLLM's async scheduling): what arrives, and a slot that falls free, while one step runs
counts from the step after the next. So a first token waits for up to two steps of others before its own.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from service.engine.prefixes import BLOCK, Prefixes


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds, as in the formula above."""

    base: float
    per_seq: float
    per_prefill_token: float
    per_kv_token: float

    def seconds(self, sequences: int, prefill: int, context: int) -> float:
        return self.base + self.per_seq * sequences + self.per_prefill_token * prefill + self.per_kv_token * context


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: a slot of the engine while it runs."""

    priority: int
    arrival: float  # any clock; later = after
    prompt: int  # tokens
    blocks: tuple[int, ...]  # names of the prompt's full blocks, for the prefix cache
    limit: int  # output tokens at which something happens: the end, or a fault
    produced: int = 0
    tell_at: int = 1  # output tokens at which its owner wants to know
    prefill: int = 0  # tokens still to be computed before the next output token
    chunk: int = 0  # of them in the step under way
    shared: int = 0  # leading blocks of the prompt that lie in the prefix cache
    cached: int | None = None  # prompt tokens found there when it was first scheduled
    preemptions: int = 0
    finished: bool = False

    @property
    def own(self) -> int:
        """KV tokens that it shares with nobody."""
        return self.prompt + self.produced - self.shared * BLOCK


S = TypeVar("S", bound=Sequence)


@dataclass(slots=True)
class Step(Generic[S]):
    """What a step brought: first tokens, and those whose owner wanted to know of this one."""

    started: list[S] = field(default_factory=list)
    told: list[S] = field(default_factory=list)


class Batch(Generic[S]):
    def __init__(self, slots: int, token_budget: int, kv_tokens: int, time: StepTime) -> None:
        self.admitted: list[S] = []  # by the last `begin`
        self.preemptions = 0
        self.generated = 0  # output tokens
        self.prefixes = Prefixes(kv_tokens)
        self._slots = slots
        self._budget = token_budget
        self._kv_tokens = kv_tokens
        self._time = time
        self._fresh: list[S] = []  # came while the step under way was planned
        self._waiting: list[tuple[int, float, int, S]] = []
        self._prefilling: list[S] = []
        self._decoding: list[S] = []
        self._own = 0  # KV tokens of running sequences, shared blocks left out
        self._context = 0  # tokens that a step of the decoding sequences reads
        self._occupied = 0  # slots, when the step under way began
        self._serial = 0

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def kv(self) -> int:
        """Tokens of KV cache in use."""
        return self._own + self.prefixes.used

    def add(self, sequence: S) -> None:
        self._fresh.append(sequence)

    def drop(self, sequence: S) -> None:
        """Takes out a sequence that has not finished, wherever it is."""
        sequence.finished = True
        for group in (self._decoding, self._prefilling):
            if sequence in group:
                group.remove(sequence)
                self._free(sequence, decoding=group is self._decoding)

    def clear(self) -> None:
        self._waiting.clear()
        self._fresh.clear()

    # ------------------------------------------------------------------ steps

    def begin(self) -> float | None:
        """Admits what fits; the seconds that the step takes, None if there is nothing to do."""
        decoding, prefilling = self._decoding, self._prefilling
        while len(decoding) > 1 and self.kv + len(decoding) > self._kv_tokens:
            self._preempt()
        budget = limit = max(1, self._budget - len(decoding))
        for sequence in prefilling:
            sequence.chunk = min(sequence.prefill, budget)
            budget -= sequence.chunk
        self.admitted = []
        waiting, running = self._waiting, len(decoding) + len(prefilling)
        if not running:  # nothing was planned: what is here may run at once
            self._occupied = 0
            self._line_up()
        free = self._slots - max(running, self._occupied)
        while waiting and budget > 0 and free > 0:
            sequence = waiting[0][3]
            if sequence.finished:
                heapq.heappop(waiting)
                continue
            if not self._place(sequence):
                break
            heapq.heappop(waiting)
            sequence.chunk = min(sequence.prefill, budget)
            budget -= sequence.chunk
            free -= 1
            prefilling.append(sequence)
            self.admitted.append(sequence)
        self._line_up()
        self._occupied = len(decoding) + len(prefilling)
        if not self._occupied:
            return None
        return self._time.seconds(self._occupied, limit - budget, self._context)

    def finish(self) -> Step[S]:
        """One token for each decoding sequence and for each whose prompt is computed. `retire` follows."""
        step: Step[S] = Step()
        started = step.started
        if self._prefilling:
            for sequence in self._prefilling:
                sequence.prefill -= sequence.chunk
                if not sequence.prefill:
                    started.append(sequence)
                    self._context += sequence.prompt + sequence.produced
            if started:
                self._prefilling = [s for s in self._prefilling if s.prefill]
                self._decoding.extend(started)
        count = len(self._decoding)
        self._own += count
        self._context += count
        self.generated += count
        told = step.told
        for sequence in self._decoding:
            produced = sequence.produced = sequence.produced + 1
            if produced >= sequence.tell_at:
                told.append(sequence)
        return step

    def retire(self, finished: list[S]) -> None:
        """These have all their tokens: their slots and KV are free."""
        for sequence in finished:
            sequence.finished = True
            self._free(sequence, decoding=True)
        self._decoding = [s for s in self._decoding if not s.finished]

    def _line_up(self) -> None:
        for sequence in self._fresh:
            self._serial += 1
            heapq.heappush(self._waiting, (sequence.priority, sequence.arrival, self._serial, sequence))
        self._fresh.clear()

    # ------------------------------------------------------------------ KV

    def _place(self, sequence: S) -> bool:
        """Gives it KV for its prompt; False = there is none. An empty engine takes any sequence."""
        hits = self.prefixes.hits(sequence.blocks, sequence.prompt)
        wanted = sequence.prompt + sequence.produced - hits * BLOCK
        alone = not self._decoding and not self._prefilling
        if not alone and self.kv + wanted + len(self._decoding) > self._kv_tokens:
            return False
        sequence.prefill = wanted
        if sequence.cached is None:
            sequence.cached = hits * BLOCK
            self.prefixes.count(sequence.prompt, sequence.cached)
        self.prefixes.take(sequence.blocks)
        sequence.shared = len(sequence.blocks)
        self._own += sequence.own
        self.prefixes.evict(self._own)
        return True

    def _free(self, sequence: S, *, decoding: bool) -> None:
        self._own -= sequence.own
        if decoding:
            self._context -= sequence.prompt + sequence.produced
        self.prefixes.give(sequence.blocks)
        sequence.shared = 0

    def _preempt(self) -> None:
        """The worst priority, then the newest, goes back and is computed again later."""
        victim = max(self._decoding, key=lambda s: (s.priority, s.arrival))
        self._decoding.remove(victim)
        self._free(victim, decoding=True)
        victim.preemptions += 1
        self.preemptions += 1
        self.add(victim)
