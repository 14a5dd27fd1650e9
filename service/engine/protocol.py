"""What the worker asks of an engine, and what it gets. Implementations: `vllm` and `simulated`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from service.frames import Delta, Usage
from service.job import Job


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"  # requests run, no step for N seconds
    DEAD = "dead"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine reported of itself when it had started."""

    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int
    kv_tokens: int  # tokens that fit into the KV cache
    block_size: int  # tokens per KV block
    model: str  # served name; the simulated engine's begins with "simulated:"
    version: str


@dataclass(slots=True)
class Prepared:
    """A job rendered and checked: ready to run once."""

    prompt_tokens: int
    max_tokens: int  # output budget of one choice
    n: int
    request: Any = None  # the implementation's own: engine input, sampling parameters, parser


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt's last event, after the last delta of every choice. Times are wall-clock seconds."""

    usage: Usage
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    preemptions: int = 0


Output = list[Delta] | Finished


@dataclass(slots=True)
class EngineStats:
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    preemptions: int = 0
    generated: int = 0  # output tokens since start
    last_step: float = 0.0  # monotonic time of the last step
    extra: dict[str, float] = field(default_factory=dict)


class EngineFault(Exception):
    """This request failed inside the engine, which lives on: retry with back-off, a limited number of times."""


class EngineLost(Exception):
    """The engine died or hangs; every running request ends with this. Retry after it is rebuilt."""


class EngineAway(EngineLost):
    """The engine was dead or not there yet when it was asked: the request cannot have killed it (R11)."""


class Overloaded(Exception):
    """The engine's own queue is full: try again when something has ended."""


class StartFailure(Exception):
    """The engine did not start. The message is one line saying what to change."""


class Engine(Protocol):
    @property
    def state(self) -> EngineState: ...

    async def start(self) -> Capacity:
        """Loads and warms up, off the event loop. Raises StartFailure."""

    async def prepare(self, job: Job) -> Prepared:
        """Renders, tokenises and checks the body, off the event loop. Raises Refusal."""

    def run(self, job: Job, prepared: Prepared, attempt: str, priority: int) -> AsyncIterator[Output]:
        """Lists of deltas as they come, then one Finished. A `Prepared` is used once.

        Closing the iterator (or cancelling the task) frees the engine's slot.
        Raises Refusal, EngineFault, EngineLost, EngineAway, Overloaded.
        """

    async def cancel(self, attempt: str) -> None:
        """Stops an attempt; idempotent, unknown ids are ignored. Its iterator ends with a Finished."""

    def stats(self) -> EngineStats: ...

    async def close(self, drain_s: float = 0.0) -> None:
        """Ends what runs (after up to `drain_s` seconds) and frees everything, off the event loop."""
