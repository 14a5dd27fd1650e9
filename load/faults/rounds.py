"""Rounds: jobs flow, something breaks, everything must come to rest; then the numbers. `run` does many of them.

A round depends on its seed and its faults alone, so that a failing one can be run again by one command.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from infra.progress import Progress
from load.arena import Arena, Spawn
from load.faults import jobs as plans
from load.faults.breaks import AWAY, FAULTS, FROZEN, SOLITARY, Fault, Scene
from load.faults.judgement import Judgement, Numbers, judge, strays
from load.faults.witness import Witness

POOL = "faults"
PARTITIONS = 12
# Seconds over which a round's jobs come; faults begin in its first half and last up to 25 s.
FLOW_S = 14.0
FAULT_BEGINS_S = (1.5, 7.0)
# From the end of flow and faults: a session of 10 s, a worker's start, a rebalance, and the jobs themselves.
REST_S = 90.0
# After the last job's end its offset is committed once a second; orphans have 3 s of flushing and 10 s of grace.
POLL_S = 0.2
ORPHAN_S = 15.0
# A worker's own stop may take as long as its drain.
DRAIN_S = 4.0
START_TOLERANCE = 1.5  # a rebuilt engine against a measured start

KILL = "kill-worker"

COUNT = {"simulated": 200, "vllm": 100}
# Output tokens: of a real engine on two cores a fraction, or a round takes minutes.
SCALE = {"simulated": 1.0, "vllm": 0.1}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    seed: int
    workers: int
    engine: str = "simulated"
    only: tuple[str, ...] = ()  # the faults of every round; empty = drawn


@dataclass(slots=True)
class Report:
    """What the command prints."""

    total: Numbers = field(default_factory=Numbers)
    by_fault: dict[str, Numbers] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    start_s: float = 0.0  # of the first worker, engine included
    rebuilt_s: list[float] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.total.rounds > 0 and self.total.good and not self.failures

    def line(self, options: Options, took_s: float) -> dict[str, Any]:
        total = asdict(self.total)
        return {
            "bench": "faults",
            "engine": options.engine,
            "seed": options.seed,
            "workers": options.workers,
            **total,
            "settled_s": round(self.total.settled_s, 1),
            "ended": dict(self.kinds),
            "engine_start_s": round(self.start_s, 2),
            "engine_rebuilt_s": [round(one, 2) for one in self.rebuilt_s],
            "faults": {
                name: {**asdict(numbers), "settled_s": round(numbers.settled_s, 1)}
                for name, numbers in self.by_fault.items()
            },
            "failures": self.failures,
            "took_s": round(took_s, 1),
            "verdict": "pass" if self.good else "fail",
        }


def draw(options: Options, number: int) -> tuple[int, tuple[str, ...]]:
    """Seed and faults of a round: from seed 1 on each fault alone once, then as many rounds with two at a time."""
    seed = options.seed + number
    if options.only:
        return seed, options.only
    known = list(FAULTS[options.engine])
    turn = (seed - 1) % (2 * len(known))
    if turn < len(known):
        return seed, (known[turn],)
    chance = random.Random(f"faults/{seed}")
    while True:
        pair = tuple(chance.sample(known, 2))
        if not any(group >= set(pair) for group in SOLITARY):
            return seed, pair


def command(options: Options, seed: int, faults: Sequence[str]) -> str:
    """The one command that runs this round again."""
    return (
        f"uv run headrace bench faults --rounds 1 --seed {seed} --only {'+'.join(faults)}"
        f" --engine {options.engine} --workers {options.workers}"
    )


async def run(spawn: Spawn, options: Options, say: Say, show: Progress) -> Report:
    """All rounds on one stack. Raises what the stack or the first workers raise."""
    real = options.engine == "vllm"
    environment = {
        "HEADRACE_ENGINE__KIND": options.engine,
        "HEADRACE_DRAIN_S": str(DRAIN_S),
        # Few slots: jobs queue, and the ledger's bounds are felt.
        "HEADRACE_ENGINE__MAX_NUM_SEQS": "8" if real else "16",
    }
    report = Report()
    async with Arena(spawn, POOL, partitions=PARTITIONS, show=show, environment=environment, real_engine=real) as arena:
        await asyncio.gather(*(arena.start(f"w{n}") for n in range(1, options.workers + 1)))
        report.start_s = arena.start_s
        say(f"{options.workers} workers ready after {arena.start_s:.1f} s; logs in {arena.folder / 'logs'}")
        async with Witness(arena.bootstrap, POOL, PARTITIONS) as witness:
            for number in range(options.rounds):
                await _round(arena, witness, options, number, report, say)
                if report.failures:
                    arena.keep = True
    return report


async def _round(arena: Arena, witness: Witness, options: Options, number: int, report: Report, say: Say) -> None:
    seed, names = draw(options, number)
    began = time.monotonic()
    say(f"round {number + 1} of {options.rounds}: {' + '.join(names)} (seed {seed})")
    known = FAULTS[options.engine]
    flow = Flow(COUNT[options.engine], scale=SCALE[options.engine])
    round_ = Round(arena, witness, {name: known[name] for name in names}, seed, flow, say)
    judgement = await round_.run()
    numbers = judgement.numbers
    report.rebuilt_s += round_.scene.rebuilt_s
    for rebuilt in round_.scene.rebuilt_s:
        if rebuilt > START_TOLERANCE * report.start_s:
            judgement.findings.append(f"engine rebuilt after {rebuilt:.1f} s, started in {report.start_s:.1f} s")
    report.total += numbers
    report.by_fault.setdefault(names[0] if len(names) == 1 else "two at once", Numbers()).__iadd__(numbers)
    report.kinds += judgement.kinds
    say(
        f"  {numbers.jobs} jobs, lost {numbers.lost}, doubled {numbers.doubled}, suppressed {numbers.suppressed}, "
        f"interrupted {numbers.interrupted}, reruns {numbers.reruns}, gaps {numbers.numbering_gaps}, "
        f"at rest {numbers.settled_s:.1f} s after the last fault, {time.monotonic() - began:.0f} s in all"
    )
    if not numbers.good or judgement.findings:
        again = command(options, seed, names)
        report.failures.append({"seed": seed, "faults": names, "replay": again, "findings": judgement.findings})
        for finding in judgement.findings:
            say(f"  ! {finding}")
        say(f"  ! failed; once more: {again}")
    if numbers.unsettled:  # fresh workers, so that the next round is judged for itself
        for name in list(arena.workers):
            await arena.kill(name)
        await asyncio.gather(*(arena.start(f"w{n}-{seed}") for n in range(1, options.workers + 1)))


@dataclass(frozen=True, slots=True)
class Flow:
    """The jobs of a round, and how long things stay broken."""

    count: int
    over_s: float = FLOW_S
    scale: float = 1.0
    begins: tuple[float, float] = FAULT_BEGINS_S
    frozen: tuple[float, float] = FROZEN
    away: tuple[float, float] = AWAY


class Round:
    """One round on an arena whose workers run. `faults` by name."""

    def __init__(
        self, arena: Arena, witness: Witness, faults: Mapping[str, Fault], seed: int, flow: Flow, say: Say
    ) -> None:
        self._arena = arena
        self._witness = witness
        self._faults = faults
        self._seed = seed
        self._flow = flow
        self._chance = random.Random(f"round/{seed}")
        self._run = f"f{seed}-{time.time_ns() // 1_000_000 % 10_000_000}"
        self._model = arena.settings.engine.served_name
        self._findings: list[str] = []
        self._began = 0.0
        self.scene = Scene(
            arena,
            self._chance,
            lambda line: say(f"  {self._clock()} {line}"),
            self._publish_lethal,
            flow.frozen,
            flow.away,
        )

    async def run(self) -> Judgement:
        witness, flow = self._witness, self._flow
        witness.traces.clear()
        witness.group.owners.moves.clear()
        before = set(self._arena.workers)
        planned = plans.plan(
            self._run, self._chance, count=flow.count, over_s=flow.over_s, model=self._model, scale=flow.scale
        )
        begins = [self._chance.uniform(*flow.begins) for _ in self._faults]
        self._began = time.monotonic()
        flowing = asyncio.create_task(witness.publish(planned, self._began))
        breaking = [
            asyncio.create_task(self._break(name, fault, begin))
            for (name, fault), begin in zip(self._faults.items(), begins, strict=True)
        ]
        await asyncio.gather(flowing, *breaking)
        over = time.monotonic()
        rested = await self._rest(over + REST_S)
        judgement = judge([*witness.traces.values()], self.scene.hits, witness.group.owners.moves)
        numbers = judgement.numbers
        numbers.settled_s = time.monotonic() - over
        numbers.crashes = await self._replace_crashed()
        numbers.orphans = await self._orphans()
        numbers.unsettled = not rested
        if set(self._faults) == {KILL}:  # nothing else gives a survivor a reason to lose one
            moved = strays(witness.group.owners.moves, self.scene.hits, before)
            numbers.strays = len(moved)
            self._findings += [f"partition {move.number} went from {move.old} to {move.new}" for move in moved]
        judgement.findings[:0] = self._findings
        return judgement

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:5.1f} s"

    async def _publish_lethal(self) -> None:
        """At once, whatever its time says."""
        one = plans.lethal(f"{self._run}-lethal", 0.0, self._model)
        await self._witness.publish([one], self._began)

    async def _break(self, name: str, fault: Fault, begin: float) -> None:
        await asyncio.sleep(begin)
        own = replace(self.scene, chance=random.Random(f"{self._seed}/{name}"))  # whatever the others draw meanwhile
        try:
            await fault(own)
        except Exception as problem:
            self._findings.append(f"{name}: {type(problem).__name__}: {problem}")

    async def _rest(self, deadline: float) -> bool:
        """Until every job has ended and is committed."""
        traces = self._witness.traces.values()
        behind: list[str] = ["nobody has answered yet"]
        while time.monotonic() < deadline:
            if all(trace.terminals or trace.failed_publish for trace in traces):
                try:
                    behind = await self._witness.behind()
                except Exception as problem:
                    behind = [repr(problem)]
                if not behind:
                    return True
            await asyncio.sleep(POLL_S)
        waiting = [trace.planned.id for trace in traces if not trace.terminals]
        self._findings.append(
            f"not at rest after {REST_S:.0f} s: {len(waiting)} jobs without an end; {'; '.join(behind[:4])}"
        )
        return False

    async def _replace_crashed(self) -> int:
        """Workers that ended by themselves; each is replaced for the next round."""
        gone = [name for name, worker in self._arena.workers.items() if worker.process.returncode is not None]
        for name in gone:
            worker = self._arena.workers.pop(name)
            lines = worker.log.read_text(errors="replace").splitlines()
            self._findings.append(
                f"worker {name} ended by itself with {worker.process.returncode}; {worker.log} ends with: "
                f"{' / '.join(lines[-3:])}"
            )
            await self._arena.start(self.scene.fresh(name[:2]))
        return len(gone)

    async def _orphans(self) -> int:
        deadline = time.monotonic() + ORPHAN_S
        while (orphans := self._arena.orphans()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if orphans:
            self._findings.append(f"processes {orphans} outlived their worker")
        return len(orphans)
