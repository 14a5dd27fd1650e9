"""Who publishes what and when: tenants and where they lie, arrivals, job records. Pure; same seed, same jobs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from schemas.keys import partition_of
from schemas.names import COMPLETIONS, REPLIES, SCHEMA_VERSION

TIER = "standard"
HEAVY = "heavy"
# Of the flood, as a multiple of what the same tenant asks for when it keeps the engine as full without a backlog.
FACTOR = 100
RARE = "rare"
RARE_WEIGHT = 0.001  # its share would be one job in minutes
CHARS_PER_TOKEN = 4  # as the simulated engine counts


@dataclass(frozen=True, slots=True)
class Shape:
    """A tenant's jobs: tokens of the prompt, and of the output (drawn evenly between two numbers)."""

    prompt: int
    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Regime:
    """Rounds of jobs under both policies, in pairs. `fitted`: on the engine of the other measurements, which is then
    what limits; else its steps take next to no time."""

    name: str
    fitted: bool
    shape: Shape
    jobs: int  # of a round
    pairs: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured, and on which engine. Times in seconds."""

    slots: int
    shape: Shape  # of everybody in the flood
    neighbours: int
    per_s: float  # jobs a second of each neighbour: under half its share of the engine
    heavy_per_s: float  # what the heavy tenant needs to keep the engine full beside them, about
    window_s: float
    warm_s: float  # before it
    rounds: int  # windows of flood, and of baseline: 1 or 2
    shares: tuple[tuple[float, Shape], ...]  # (weight, jobs) of each tenant that is backlogged
    shares_s: float  # at least 20 times a job's time in the engine
    shares_jobs: int  # of each tenant's backlog, by weight 1
    rare: Shape  # of a tenant of hardly any weight, which only ever runs because it has waited long enough
    wait_bound_s: float  # the setting that makes it run: the longest wait for anybody's next turn
    costs: tuple[Regime, ...]  # the first is what is promised of


_SHORT, _LONG = Shape(256, 16, 48), Shape(64, 32, 96)
SIMULATED = Sizes(
    slots=128,
    # Long outputs: a hundred times as many jobs a second are then still as many as one worker can read on two cores
    # that it shares with the broker and the load.
    shape=Shape(384, 96, 1824),
    neighbours=4,
    per_s=0.75,
    heavy_per_s=8.0,
    window_s=67.0,
    warm_s=20.0,
    rounds=2,
    shares=((1, _SHORT), (2, _SHORT), (4, _SHORT), (1, _LONG), (2, _LONG), (4, _LONG)),
    shares_s=40.0,
    shares_jobs=700,
    rare=_SHORT,
    wait_bound_s=6.0,
    costs=(
        Regime("fitted", fitted=True, shape=_SHORT, jobs=1600, pairs=8),
        Regime("cpu_bound", fitted=False, shape=Shape(16, 2, 2), jobs=6000, pairs=4),
    ),
)
# A real model on two cores: the direction, not a figure.
REAL = Sizes(
    slots=8,
    shape=Shape(24, 16, 32),
    neighbours=2,
    per_s=1.0,
    heavy_per_s=5.0,
    window_s=15.0,
    warm_s=5.0,
    rounds=1,
    shares=((1, Shape(24, 16, 32)), (2, Shape(24, 16, 32)), (4, Shape(24, 16, 32))),
    shares_s=20.0,
    shares_jobs=150,
    rare=Shape(24, 16, 32),
    wait_bound_s=6.0,
    costs=(),
)
ENGINES = {"simulated": SIMULATED, "vllm": REAL}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One job of a neighbour, `at_s` after the start."""

    at_s: float
    tenant: str
    tokens: int
    number: int


def neighbours(count: int, partitions: int) -> tuple[str, ...]:
    """Names of tenants: the first on the heavy one's partition, each other on one of its own."""
    taken = {partition_of(HEAVY, partitions)}
    names = [next(n for n in _names() if partition_of(n, partitions) in taken)]
    for name in _names():
        if len(names) == count:
            break
        place = partition_of(name, partitions)
        if place not in taken:
            taken.add(place)
            names.append(name)
    return tuple(names)


def apart(count: int, partitions: int) -> tuple[str, ...]:
    """Names of tenants, each on a partition of its own. Raises ValueError if there are too few."""
    if count > partitions:
        raise ValueError(f"{count} tenants do not fit on {partitions} partitions of their own")
    found: dict[int, str] = {}
    for name in _names():
        found.setdefault(partition_of(name, partitions), name)
        if len(found) == count:
            break
    return tuple(found.values())


def _names() -> Iterator[str]:
    return (f"tenant-{number:02}" for number in range(1, 1000))


def arrivals(tenants: Sequence[str], per_s: float, seconds: float, shape: Shape, seed: int) -> list[Arrival]:
    """Poisson arrivals of each tenant, in order of time."""
    found = []
    for tenant in tenants:
        chance = random.Random(f"{seed}/{tenant}")
        at, number = chance.expovariate(per_s), 0
        while at < seconds:
            found.append(Arrival(at, tenant, chance.randint(shape.low, shape.high), number))
            at += chance.expovariate(per_s)
            number += 1
    return sorted(found, key=lambda arrival: arrival.at_s)


class Writer:
    """Job records of one run. No prompt begins like another one: nothing comes from the prefix cache."""

    def __init__(self, run: str, model: str, *, stream: bool = False) -> None:
        self.run = run
        self._model = model
        self._stream = stream

    def id(self, tenant: str, number: int) -> str:
        return f"{self.run}-{tenant}-{number}"

    def value(self, tenant: str, number: int, prompt_tokens: int, tokens: int) -> bytes:
        start = f"{self.run} {tenant} {number} "
        length = max(len(start), CHARS_PER_TOKEN * prompt_tokens)
        prompt = start + (FILL * (length // len(FILL) + 1))[: length - len(start)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
        return orjson.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "id": self.id(tenant, number),
                "tenant": tenant,
                "endpoint": COMPLETIONS,
                "body": body | {"ignore_eos": True},
                "reply": {"topic": REPLIES, "stream": self._stream},
            }
        )


FILL = "river water mill wheel stone bridge bank flood source delta stream current weir gate channel turbine lake rain "


def backlog(writer: Writer, tenant: str, shape: Shape, count: int, seed: int, first: int = 0) -> Iterator[bytes]:
    """`count` records of one tenant."""
    chance = random.Random(f"{seed}/{tenant}/{first}")
    for number in range(first, first + count):
        yield writer.value(tenant, number, shape.prompt, chance.randint(shape.low, shape.high))
