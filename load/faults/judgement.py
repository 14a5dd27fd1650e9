"""A round's numbers, from what the witness wrote down and whom the faults hit. Pure.

lost          published and without a terminal event when the round's time was over
doubled       a reader that follows the rules would deliver two ends (contract.md §3)
suppressed    further raw terminals, which readers ignore
interrupted   between `started` and the end's last acknowledgement when a fault hit their worker, their delivery
              process, their engine or the broker, or when their partition went to another worker
reruns        announced more than once; `unexplained` are those of them that nothing interrupted
late          announced again although they had ended
gaps          numbers missing within an attempt, or a reader's stream that breaks off in the middle
torn          a result that differs from its stream, or from what was asked for
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from load.faults.breaks import Hit
from load.faults.witness import Trace
from load.group import Move
from load.tally import doubled

# An acknowledgement reaches the worker so long after the record's own time; the log's times are whole milliseconds.
ACK_S = 0.3
# How a job may end that nothing is wrong with.
GOOD = frozenset({"completed"})


@dataclass(slots=True)
class Numbers:
    """What one round, or all rounds of a fault, come to."""

    rounds: int = 0
    jobs: int = 0
    lost: int = 0
    doubled: int = 0
    suppressed: int = 0
    duplicates: int = 0  # answers to a job's second publication, which say so
    interrupted: int = 0
    reruns: int = 0
    unexplained: int = 0
    late: int = 0
    numbering_gaps: int = 0
    torn: int = 0
    failed: int = 0  # ended otherwise than they should
    crashes: int = 0  # workers that ended by themselves
    orphans: int = 0  # processes that outlived their worker
    strays: int = 0  # partition numbers that went from one survivor of a kill to another
    unsettled: int = 0  # rounds that did not come to rest in time
    settled_s: float = 0.0  # the longest time from the last fault's end to rest

    def __iadd__(self, other: Numbers) -> Numbers:
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name == "settled_s" else mine + theirs)
        return self

    @property
    def good(self) -> bool:
        wrong = (
            *(self.lost, self.doubled, self.numbering_gaps, self.torn, self.failed, self.late),
            *(self.crashes, self.orphans, self.strays, self.unsettled, self.unexplained),
        )
        return not any(wrong) and self.reruns <= self.interrupted


@dataclass(slots=True)
class Judgement:
    numbers: Numbers
    findings: list[str] = field(default_factory=list)  # one line each, of what is wrong
    kinds: Counter[str] = field(default_factory=Counter)


def strays(moves: Iterable[Move], hits: Sequence[Hit], workers: Set[str]) -> list[Move]:
    """Partition numbers that went from one survivor to another since the first hit. (Moves are read late: those of the
    workers' start may still come in when the round has begun.)"""
    since = min((hit.since for hit in hits), default=math.inf)
    survivors = workers - {hit.worker for hit in hits}
    return [m for m in moves if m.at >= since and m.old != m.new and {m.old, m.new} <= survivors]


def judge(traces: Sequence[Trace], hits: Iterable[Hit], moves: Iterable[Move]) -> Judgement:
    """Of one round. What only processes can tell (crashes, orphans, rest) is filled in by the caller."""
    found = Judgement(Numbers(rounds=1))
    numbers = found.numbers
    all_hits = [*hits, *_of_lethal(traces)]
    all_moves = list(moves)
    for trace in traces:
        if trace.failed_publish and not trace.places and not trace.terminals:
            continue  # never published, as far as anybody knows
        numbers.jobs += 1
        hit = any(_hit_by(trace, one) for one in all_hits) or any(_moved(trace, one) for one in all_moves)
        numbers.interrupted += hit
        if trace.starts > 1:
            numbers.reruns += 1
            if not hit:
                numbers.unexplained += 1
                found.findings.append(
                    f"{trace.planned.id} ran {trace.starts} times, but nothing hit it: {_told(trace)}"
                )
        _ends(trace, found)
        gaps = sum(attempt.gaps for attempt in trace.attempts.values())
        if gaps or trace.reader_gap:
            numbers.numbering_gaps += max(1, gaps)
            found.findings.append(f"{trace.planned.id} has gaps in its numbering: {_told(trace)}")
        if trace.torn:
            numbers.torn += 1
            found.findings.append(f"{trace.planned.id} is torn: {trace.torn}: {_told(trace)}")
    return found


def _ends(trace: Trace, found: Judgement) -> None:
    numbers, planned = found.numbers, trace.planned
    if not trace.terminals:
        numbers.lost += 1
        found.findings.append(f"{planned.id} is lost, published to {[*map(str, trace.places)]}: {_told(trace)}")
        return
    first = min(trace.terminals, key=lambda end: end.at)
    found.kinds[first.kind + (f" {first.code}" if first.code else "")] += 1
    further = len(trace.terminals) - 1
    numbers.duplicates += sum(end.duplicate for end in trace.terminals)
    numbers.suppressed += further
    if doubled([(end.run, end.partition) for end in trace.terminals]):
        numbers.doubled += 1
        found.findings.append(f"{planned.id} ended on two partitions: {_told(trace)}")
    if (first.kind in GOOD) == planned.lethal:
        numbers.failed += 1
        found.findings.append(f"{planned.id} ended as {first.kind} {first.code}: {_told(trace)}")
    if any(
        attempt.worker and attempt.started > first.at + ACK_S and _again(trace, first.at)
        for attempt in trace.attempts.values()
    ):
        numbers.late += 1
        found.findings.append(f"{planned.id} was started again after its end: {_told(trace)}")


def _again(trace: Trace, ended: float) -> bool:
    """Whether its end was known: acknowledged to the worker, or told by a status record."""
    return trace.settled is not None and any(
        attempt.worker and attempt.started > max(ended, trace.settled) + ACK_S for attempt in trace.attempts.values()
    )


def _of_lethal(traces: Iterable[Trace]) -> list[Hit]:
    """Each attempt of a job that kills its engine hits what runs on that worker, until the job is gone from there."""
    hits = []
    for trace in traces:
        if trace.planned.lethal:
            over = trace.settled or float("inf")
            hits += [Hit("lose-engine", a.started, over, a.worker) for a in trace.attempts.values() if a.worker]
    return hits


def _spans(trace: Trace) -> list[tuple[str, float, float]]:
    """(worker, from, to) of each announced attempt; to = when the next one began, or the end was acknowledged."""
    starts = sorted((a.started, a.worker) for a in trace.attempts.values() if a.worker)
    over = trace.settled if trace.settled is not None else float("inf")
    ends = [*(at for at, _ in starts[1:]), over][: len(starts)]  # one that was never started ran nowhere
    return [(worker, at, max(at, end)) for (at, worker), end in zip(starts, ends, strict=True)]


def _hit_by(trace: Trace, hit: Hit) -> bool:
    return any(
        (hit.worker is None or worker == hit.worker) and since <= hit.until and until >= hit.since - ACK_S
        for worker, since, until in _spans(trace)
    )


def _moved(trace: Trace, move: Move) -> bool:
    """Whether it ran on the old owner when its partition went to another."""
    if all(place.partition != move.number for place in trace.places):
        return False
    return any(
        worker == move.old and since <= move.at + ACK_S and until >= move.at - ACK_S
        for worker, since, until in _spans(trace)
    )


def _told(trace: Trace) -> str:
    """A job's life in one line, times after its publication."""

    def after(at: float) -> str:
        return f"{at - trace.published:.2f}"

    lines = [
        (a.started, f"{after(a.started)} {a.worker or '-'} {name[-6:]} {a.chunks} chunks {a.tokens} tokens")
        for name, a in trace.attempts.items()
    ]
    lines += [(end.at, f"{after(end.at)} {end.kind} {end.code} {end.attempt[-6:]}") for end in trace.terminals]
    if trace.settled is not None:
        lines.append((trace.settled, f"{after(trace.settled)} settled"))
    return "; ".join(line for _, line in sorted(lines))
