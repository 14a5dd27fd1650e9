"""Who waits, for what, and who runs: for operators. Reads the turns, changes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from service.scheduler.entry import Entry, Stage
from service.scheduler.roster import Roster
from service.scheduler.tier import WEIGHTS
from service.scheduler.turns import Turns


class Standing(NamedTuple):
    """One tenant in one tier: jobs, and the part of the engine that is due to it now."""

    tier: str
    tenant: str
    running: int
    waiting: int
    share: float


class Census:
    def __init__(self, roster: Roster, turns: Turns) -> None:
        self._roster = roster
        self._turns = turns

    def oldest(self) -> dict[str, float]:
        """Seconds the oldest waiting job of each tier has waited; under plain FIFO of the oldest one's tier only."""
        now, oldest = time.time(), dict.fromkeys(WEIGHTS, 0.0)
        for entry in self._firsts():
            tier = entry.job.head.tier
            oldest[tier] = max(oldest[tier], now - entry.queued)
        return oldest

    def standings(self) -> list[Standing]:
        """Tenants with jobs here, by tier."""
        counts: dict[tuple[str, str], list[int]] = {}
        for entry in self._roster:
            count = counts.setdefault((entry.job.head.tier, entry.job.tenant), [0, 0])
            count[entry.stage is not Stage.RUNNING] += 1
        return [Standing(*key, running, waiting, self._share(*key)) for key, (running, waiting) in counts.items()]

    def _share(self, tier: str, tenant: str) -> float:
        """0 under plain FIFO, which does not tell tenants apart, and for those without a job that could run."""
        found = self._turns.tiers.get(tier)
        flow = found.queue.flows.get(tenant) if found is not None else None
        return self._turns.share(found, flow) if found is not None and flow is not None and found.active else 0.0

    def waits(self, holds: frozenset[str]) -> dict[str, int]:
        """How many jobs wait for what."""
        return Counter(reason(entry, holds) for entry in self._roster if entry.stage is not Stage.RUNNING)

    def _firsts(self) -> Iterator[Entry]:
        for tier in self._turns.tiers.values():
            yield from tier.window
            yield from (flow.lane.oldest() for flow in tier.queue.flows.values() if flow.lane)
        yield from self._turns.order.firsts()


def reason(entry: Entry, holds: frozenset[str]) -> str:
    """Why a job waits, in the words of the contract."""
    if entry.stage is Stage.TIMED:
        return "not_before"
    if "engine" in holds:
        return "engine"
    if entry.stage is Stage.BEHIND:
        return "order"
    limited = entry.parked or (entry.stage is Stage.QUEUED and entry.flow is not None and entry.flow.blocked)
    return "quota" if limited else "capacity"
