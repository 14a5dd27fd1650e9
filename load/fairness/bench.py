"""`headrace bench fairness`: the three measurements, one after the other, and what is promised of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infra.progress import Progress
from load.arena import Spawn
from load.fairness import cost, measures, shares
from load.fairness.client import Client
from load.fairness.flood import Flood, Window
from load.fairness.measures import Check
from load.fairness.plan import ENGINES, FACTOR, HEAVY, RARE, RARE_WEIGHT, Sizes, apart, neighbours
from load.fairness.stage import PARTITIONS, Stage
from load.overhead import Interval

Say = Callable[[str], None]

NOTE = (
    "first-token delays are the client's: from publishing to reading the first chunk, over Kafka both ways; delivery "
    "sends a first chunk at once, later ones every 50 ms"
)


@dataclass(frozen=True, slots=True)
class Result:
    engine: str
    checks: list[Check]  # what is promised
    ratios: dict[str, Interval]  # of each neighbour, flood over baseline
    idle: dict[str, Interval]
    beside: str  # the neighbour on the flood's partition
    windows: list[Window]
    shares: shares.Shares
    costs: list[cost.Cost]
    max_wait_s: float
    wait_bound_s: float
    seconds: float

    @property
    def invalid(self) -> list[str]:
        """Why baselines do not count; empty if they all do."""
        floods = [window.running for window in self.windows if window.kind == "flood"]
        flood = sum(floods) / len(floods)
        found = [measures.unlike(flood, w.running, w.queued) for w in self.windows if w.kind == "baseline"]
        return [problem for problem in found if problem]

    @property
    def verdict(self) -> str:
        """pass, fail, undecided; or invalid: flood and baseline cannot be compared, measure again."""
        found = measures.verdict(self.checks)
        return "invalid" if self.invalid and found != "fail" else found

    @property
    def apart(self) -> Interval:
        """The worst ratio of the neighbours that share no partition with the flood."""
        return max((one for name, one in self.ratios.items() if name != self.beside), key=lambda one: one.point)

    @property
    def good(self) -> bool:
        """On the real engine of a small machine the figures are shown, not judged."""
        return self.engine != "simulated" or self.verdict not in ("fail", "invalid")

    def line(self) -> dict[str, Any]:
        """The last line of `--json`."""
        found = {check.name: check for check in self.checks}
        spent = found.get("scheduler_cost")
        windows = [*(window.line() for window in self.windows), self.shares.line()]
        windows += [one.line() for one in self.costs]
        return {
            "bench": "fairness",
            "engine": self.engine,
            "ttft_p95_ratio_worst": round(found["ttft_p95_ratio_worst"].value, 3),
            "ttft_p95_ratio_ci95": _ends(found["ttft_p95_ratio_worst"].interval),
            "ttft_p95_ratio_apart": round(self.apart.point, 3),
            "ttft_p95_ratios": {name: round(one.point, 3) for name, one in self.ratios.items()},
            "ttft_p95_ratio_idle": round(max(one.point for one in self.idle.values()), 3),
            "beside_the_flood": self.beside,
            "jain": round(found["jain"].value, 4),
            "scheduler_cost": round(spent.value, 4) if spent else None,
            "scheduler_cost_ci95": _ends(spent.interval) if spent else None,
            "scheduler_costs": {one.regime: round(measures.cost(one.rounds).point, 4) for one in self.costs},
            "max_wait_s": round(self.max_wait_s, 2),
            "wait_bound_s": self.wait_bound_s,
            "verdict": self.verdict,
            "invalid": self.invalid,
            "checks": {check.name: check.verdict for check in self.checks},
            "flood_factor": FACTOR,
            "note": NOTE,
            "windows": windows,
            "seconds": round(self.seconds, 1),
        }


async def run(spawn: Spawn, engine: str, say: Say, show: Progress, sizes: Sizes | None = None) -> Result:
    """The whole measurement. Raises ArenaFailed, WorkerStopped, KafkaError."""
    began = time.monotonic()
    sizes = sizes or ENGINES[engine]
    near = neighbours(sizes.neighbours, PARTITIONS)
    sharing = apart(len(sizes.shares), PARTITIONS)
    weights = dict.fromkeys((HEAVY, *near, *cost.names()), 1.0)
    weights |= {name: weight for name, (weight, _) in zip(sharing, sizes.shares, strict=True)} | {RARE: RARE_WEIGHT}
    stage = Stage(
        spawn, show, real=engine == "vllm", slots=sizes.slots, wait_bound_s=sizes.wait_bound_s, weights=weights
    )
    async with stage, Client(stage.bootstrap) as client:
        say(f"flood: {len(near)} neighbours, {near[0]} on the same partition as a tenant that offers {FACTOR} times …")
        flood = Flood(stage, client, sizes, near, say)
        windows = await flood.run()
        say("shares: everybody has a backlog …")
        shared = await shares.measure(stage, client, sizes, sharing, say)
        costs = []
        for regime in sizes.costs:
            say(f"cost: fair beside FIFO, {regime.name} …")
            costs.append(await cost.measure(stage, regime, say))
    base, loud, quiet = flood.delays("baseline"), flood.delays("flood"), flood.delays("idle")
    ratios = {name: measures.ratio(base[name], loud[name]) for name in near}
    worst = max(ratios.values(), key=lambda one: one.point)
    checks = [
        Check("ttft_p95_ratio_worst", worst.point, measures.RATIO_MOST, worst),
        Check("jain", shared.jain, measures.JAIN_LEAST, at_least=True),
    ]
    if costs:
        lost = measures.cost(costs[0].rounds)
        checks.append(Check("scheduler_cost", lost.point, measures.COST_MOST, lost))
    waited = max(shared.max_wait_s, *(window.max_wait_s for window in windows))
    checks.append(Check("max_wait_s", waited, sizes.wait_bound_s + measures.WAIT_SLACK_S))
    return Result(
        engine=engine,
        checks=checks,
        ratios=ratios,
        idle={name: measures.ratio(quiet[name], loud[name]) for name in near},
        beside=near[0],
        windows=windows,
        shares=shared,
        costs=costs,
        max_wait_s=waited,
        wait_bound_s=sizes.wait_bound_s,
        seconds=time.monotonic() - began,
    )


def _ends(interval: Interval | None) -> list[float] | None:
    return [round(interval.low, 4), round(interval.high, 4)] if interval else None
