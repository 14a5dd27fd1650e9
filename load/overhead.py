"""The statistics of a comparison in ABBA pairs: ratios per pair, their median with a bootstrap interval, and a
verdict. Pure.

A is the base (the bare engine), B what is compared with it (the whole service). Rounds are run in the order A B B A A
B B A …,
so that a machine that slowly warms up or slows down is felt by both sides alike; neighbours form a pair.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Side = Literal["A", "B"]
Verdict = Literal["pass", "fail", "undecided"]

# Resamples of the bootstrap: the interval's ends move by less than a thousandth of the ratio from seed to seed.
RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Round:
    """One measured round of one side. `cpu_s` is the CPU time of the processes under comparison in it."""

    side: Side
    tokens: int
    wall_s: float
    cpu_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def cpu_us_per_token(self) -> float | None:
        return None if self.cpu_s is None else self.cpu_s / self.tokens * 1e6


@dataclass(frozen=True, slots=True)
class Pair:
    base: Round
    other: Round

    @property
    def ratio(self) -> float:
        """Throughput of B over that of A; 1 = no loss."""
        return self.other.tokens_per_s / self.base.tokens_per_s

    @property
    def added_cpu_us(self) -> float | None:
        """CPU microseconds per token that B spends more than A; None when not measured."""
        base, other = self.base.cpu_us_per_token, self.other.cpu_us_per_token
        return None if base is None or other is None else other - base


@dataclass(frozen=True, slots=True)
class Interval:
    point: float
    low: float
    high: float


def order(pairs: int) -> list[Side]:
    """The sides in the order to run them: A B, B A, A B, …"""
    sides: list[Side] = []
    for number in range(pairs):
        sides += ("A", "B") if number % 2 == 0 else ("B", "A")
    return sides


def paired(rounds: Sequence[Round]) -> list[Pair]:
    """Neighbours as pairs. Raises ValueError unless every two rounds are one of each side with work in them."""
    if len(rounds) % 2:
        raise ValueError(f"{len(rounds)} rounds are no pairs")
    pairs = []
    for first, second in zip(rounds[::2], rounds[1::2], strict=True):
        if {first.side, second.side} != {"A", "B"}:
            raise ValueError("a pair needs one round of each side")
        if min(first.tokens, second.tokens) <= 0 or min(first.wall_s, second.wall_s) <= 0:
            raise ValueError("a round without tokens or time cannot be compared")
        pairs.append(Pair(first, second) if first.side == "A" else Pair(second, first))
    return pairs


def median_interval(values: Sequence[float], *, seed: int = 1, resamples: int = RESAMPLES) -> Interval:
    """The median of `values` and its percentile-bootstrap 95 % interval. Raises ValueError for fewer than two."""
    if len(values) < 2:
        raise ValueError("an interval needs at least two pairs")
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - CONFIDENCE) / 2
    low, high = medians[math.floor(tail * resamples)], medians[math.ceil((1 - tail) * resamples) - 1]
    return Interval(statistics.median(values), low, high)


def judge(interval: Interval, threshold: float) -> Verdict:
    """`pass`: the whole interval reaches the threshold; `fail`: none of it does; `undecided`: it lies inside."""
    if interval.low >= threshold:
        return "pass"
    return "fail" if interval.high < threshold else "undecided"


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all shares are equal, 1/n when one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def summary(rounds: Sequence[Round], threshold: float, *, seed: int = 1) -> dict[str, Any]:
    """What the benchmark's last line says of a comparison, with every round in it."""
    pairs = paired(rounds)
    interval = median_interval([pair.ratio for pair in pairs], seed=seed)
    added = [pair.added_cpu_us for pair in pairs if pair.added_cpu_us is not None]
    return {
        "ratio": round(interval.point, 4),
        "ratio_ci95": [round(interval.low, 4), round(interval.high, 4)],
        "threshold": threshold,
        "verdict": judge(interval, threshold),
        "pairs": [round(pair.ratio, 4) for pair in pairs],
        "added_cpu_us_per_token": round(statistics.median(added), 2) if added else None,
        "rounds": [{**asdict(one), "tokens_per_s": round(one.tokens_per_s, 2)} for one in rounds],
    }


def added_delay_ms(base: Sequence[float], other: Sequence[float]) -> float:
    """Median of B's delays (seconds) less the median of A's, in milliseconds. Raises ValueError if one is empty."""
    if not base or not other:
        raise ValueError("no delays to compare")
    return (statistics.median(other) - statistics.median(base)) * 1e3
