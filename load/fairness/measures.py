"""The figures and their bounds: ratios of 95th percentiles, weighted shares, throughput lost, waits. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from load.overhead import CONFIDENCE, Interval, Round, jain, median_interval, paired

# The promises.
RATIO_MOST = 1.2
JAIN_LEAST = 0.98
COST_MOST = 0.01
# A turn that is due is taken when the next slot falls free: that is within this, with a full engine (seconds).
WAIT_SLACK_S = 1.0
RESAMPLES = 2000
# A baseline says nothing if the engine was not about as full as in the flood, or if its jobs queued (shares of the
# sequences that ran).
UNLIKE_MOST, QUEUED_MOST = 0.03, 0.02


def p95(seconds: Sequence[float]) -> float:
    """The 95th percentile, nearest rank. Raises ValueError if there is nothing to rank."""
    if not seconds:
        raise ValueError("no delays to rank")
    ordered = sorted(seconds)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def ratio(base: Sequence[float], other: Sequence[float], *, seed: int = 1) -> Interval:
    """p95 of `other` over p95 of `base`, with a bootstrap 95 % interval. Raises ValueError if one is empty."""
    chance = random.Random(seed)
    point = p95(other) / p95(base)
    drawn = sorted(
        p95(chance.choices(other, k=len(other))) / p95(chance.choices(base, k=len(base))) for _ in range(RESAMPLES)
    )
    tail = (1 - CONFIDENCE) / 2
    return Interval(point, drawn[math.floor(tail * RESAMPLES)], drawn[math.ceil((1 - tail) * RESAMPLES) - 1])


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant got in the window."""

    weight: float
    cost: float  # cost tokens
    output: int  # tokens

    @property
    def weighted(self) -> float:
        return self.cost / self.weight


def fairness(shares: Mapping[str, Share]) -> float:
    """Jain's index of the weighted shares."""
    return jain([share.weighted for share in shares.values()])


def unlike(flood: float, baseline: float, queued: float) -> str:
    """Why a baseline cannot be compared with a flood, by the sequences that ran in each and the jobs that queued in
    the baseline, on average; empty if it can.
    """
    if abs(baseline - flood) > UNLIKE_MOST * flood:
        return f"{baseline:.0f} sequences ran in the baseline, {flood:.0f} in the flood"
    if queued > QUEUED_MOST * baseline:
        return f"{queued:.0f} jobs queued in the baseline"
    return ""


def turn_wait(jobs: Iterable[tuple[float, float]], until: float | None = None) -> float:
    """The longest time that one tenant, with jobs waiting, had to wait for its next turn.

    `jobs`: (received, admitted) of each of them; `until`: when the measuring ended, if jobs were waiting then.
    """
    longest, last = 0.0, -math.inf
    for received, admitted in sorted(jobs, key=lambda job: job[1]):
        longest = max(longest, admitted - max(received, last))
        last = max(last, admitted)
    if until is not None and last > -math.inf:
        longest = max(longest, until - last)
    return longest


def cost(rounds: Sequence[Round]) -> Interval:
    """Throughput that B (fair) loses against A (FIFO), as a share; the median of the pairs."""
    lost = median_interval([1 - pair.ratio for pair in paired(rounds)])
    return Interval(lost.point, lost.low, lost.high)


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, and what was measured."""

    name: str
    value: float
    bound: float
    interval: Interval | None = None
    at_least: bool = False  # else at most

    @property
    def good(self) -> bool:
        """Held by the figure itself."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def broken(self) -> bool:
        """No part of the interval holds it; without an interval, not held."""
        if self.good or self.interval is None:
            return not self.good
        return self.interval.high < self.bound if self.at_least else self.interval.low > self.bound

    @property
    def verdict(self) -> str:
        """pass, fail, or undecided: the figure is past the bound, and its interval is on both sides."""
        return "pass" if self.good else "fail" if self.broken else "undecided"


def verdict(checks: Sequence[Check]) -> str:
    """The worst of them."""
    found = {check.verdict for check in checks}
    return next(word for word in ("fail", "undecided", "pass") if word in found or word == "pass")
