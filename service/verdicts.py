"""Verdicts on job records: from what the logs tell of one, its verdict and why; and many of them added up. Pure.

Every job record gets one verdict; only `lost` and `doubled` are failures of the service:

    ok             answered: its terminal event lies where its status record says
    running        not ended: the group's commit calls it unfinished, or has not come to it
    lost           the group is done with it, and there is neither an answer nor a dead letter
    doubled        a reader following the rules would deliver two: terminals of one job in two reply partitions
    suppressed     answered, with further terminals behind the first in the same partition, which no reader delivers
    dead-lettered  nobody could be told; the record lies on the dead-letter topic
    unverifiable   the answer is said to lie where it can no longer be read: expired, deleted, or no rights
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from service.job import Place

DEAD = frozenset({"dead", "undeliverable"})

# Findings listed one by one, of each verdict; all are counted.
LISTED = 1_000


class Verdict(StrEnum):
    OK = "ok"
    RUNNING = "running"
    LOST = "lost"
    DOUBLED = "doubled"
    SUPPRESSED = "suppressed"
    DEAD_LETTERED = "dead-lettered"
    UNVERIFIABLE = "unverifiable"


# What is worth a line of its own, worst first.
WORTH_TELLING = (Verdict.LOST, Verdict.DOUBLED, Verdict.UNVERIFIABLE, Verdict.SUPPRESSED)
FAILURES = frozenset({Verdict.LOST, Verdict.DOUBLED})

# Where a stated terminal is: there, gone with what no longer can be read, or not where it must be.
Sight = Literal["there", "out of reach", "missing"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the logs tell of one job record. Of several copies of a job one accounts for all its terminals."""

    finished: bool  # by the group's commits, its copies on `deferred` and `overflow` included
    status: str | None  # `kind` of its status record
    stated: Sight | None  # of the terminal that the status record names
    terminals: int  # of its identity, wherever they lie; answers to further copies, and refusals of such, left out
    partitions: int  # reply partitions that a reader would find one in
    letter: bool  # its record lies on the dead-letter topic
    answered: bool  # by its identity alone: another record's status, or an answer to a further copy
    blind: bool  # the logs that would tell more do not reach back so far, or may not be read


def judge(facts: Facts) -> tuple[Verdict, str]:
    """The verdict on one job record, and why."""
    if facts.partitions > 1:
        return Verdict.DOUBLED, f"terminals in {facts.partitions} reply partitions"
    if facts.status is None:
        if not facts.finished:
            return Verdict.RUNNING, ""
        if facts.terminals or facts.answered:
            return _answered(facts)
        if facts.letter:
            return Verdict.DEAD_LETTERED, ""
        if facts.blind:
            return Verdict.UNVERIFIABLE, "no status record, and the logs do not reach back to its time"
        return Verdict.LOST, "committed as ended, without status record, terminal or dead letter"
    if facts.status in DEAD:
        if facts.letter:
            return Verdict.DEAD_LETTERED, ""
        if facts.blind:
            return Verdict.UNVERIFIABLE, "said to be a dead letter, which can no longer be read"
        return Verdict.LOST, "said to be a dead letter, and is none"
    if facts.stated == "there" or facts.terminals:
        return _answered(facts)
    if facts.stated == "out of reach":
        return Verdict.UNVERIFIABLE, "its terminal lies where it can no longer be read"
    return Verdict.LOST, "its terminal does not lie where its status record says"


def _answered(facts: Facts) -> tuple[Verdict, str]:
    if facts.terminals > 1:
        return Verdict.SUPPRESSED, f"{facts.terminals} terminals, of which readers take the first"
    return Verdict.OK, ""


class Finding(NamedTuple):
    verdict: Verdict
    origin: Place
    why: str
    places: tuple[Place, ...] = ()  # of its terminals


@dataclass
class Report:
    """Verdicts of a share, or of all shares added up."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    findings: dict[Verdict, list[Finding]] = field(default_factory=dict)

    @property
    def jobs(self) -> int:
        return self.counts.total()

    @property
    def good(self) -> bool:
        return not any(self.counts[verdict] for verdict in FAILURES)

    def add(self, other: Report) -> None:
        self.counts += other.counts
        for verdict, found in other.findings.items():
            listed = self.findings.setdefault(verdict, [])
            listed += found[: max(0, LISTED - len(listed))]

    def listed(self) -> Iterable[Finding]:
        for verdict in WORTH_TELLING:
            yield from self.findings.get(verdict, ())
