"""Whether every job ended exactly once, from what lies on the logs (R17). Pure: fed with records, it gives verdicts.

    letters → per partition number: statuses, copies, jobs → terminals → report

Every job record gets one verdict; only `lost` and `doubled` are failures of the service:

    ok             answered: its terminal event lies where its status record says
    running        not ended: the group's commit calls it unfinished, or has not come to it
    lost           the group is done with it, and there is neither an answer nor a dead letter
    doubled        a reader following the rules would deliver two: terminals of one job in two reply partitions
    suppressed     answered, with further terminals behind the first in the same partition, which no reader delivers
    dead-lettered  nobody could be told; the record lies on the dead-letter topic
    unverifiable   the answer is said to lie where it can no longer be read: expired, deleted, or no rights

Memory is bounded: one `Reconciliation` holds one share of the jobs, by a hash of their ids (`share` of `shares`), and
identities as 64-bit fingerprints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec

from schemas import names
from service.job import Place
from service.ledger import Key, Snapshot
from service.places import OFFSET_BITS, Places, fingerprint, identity_of, origin_of, read_job

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired"})
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


class Terminal(NamedTuple):
    """Where an answer lies. `ran`: of an attempt that had begun, so not a refusal; `repeat`: to a further copy."""

    place: int
    ran: bool
    repeat: bool


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


class _Event(msgspec.Struct, gc=False):
    """What counts of a terminal event; all else is skipped."""

    type: str
    tenant: str
    job_id: str
    run: int
    seq: int = 0
    duplicate: bool = False


class _Where(msgspec.Struct, gc=False):
    topic: str
    partition: int
    offset: int


class _Ended(msgspec.Struct, gc=False):
    """What counts of a status record."""

    kind: str
    origin: str
    tenant: str = ""
    job_id: str = ""
    run: int = 0
    terminal: _Where | None = None
    repeat: bool = False


_EVENT = msgspec.json.Decoder(_Event)
_ENDED = msgspec.json.Decoder(_Ended)


class _Status(NamedTuple):
    kind: str
    identity: int  # 0: it has none
    stated: int  # place of the terminal; 0: none
    repeat: bool


class _Case(NamedTuple):
    """A job record that waits for its terminal."""

    origin: int
    identity: int
    status: _Status | None
    finished: bool
    answered: bool
    blind: bool


class Reconciliation:
    """One share of a pool's jobs.

    `commits`: what the group's metadata says of each partition, None where it never committed. It must have been read
    after the ends of the jobs topics, and before those of every other topic: then whatever it calls finished has its
    status record in reach.
    """

    def __init__(
        self, pool: str, commits: Mapping[Key, Snapshot | None], letters: Letters, *, share: int = 0, shares: int = 1
    ) -> None:
        self._commits = commits
        self._letters = letters
        self._share = share
        self._shares = shares
        self._status_since: dict[int, int] = {}
        self._places = letters.places
        self._statuses: dict[int, _Status] = {}  # by origin; of the partition number that is being read
        self._answered: set[int] = set()  # identities with a status record
        self._carried: set[int] = set()  # origins whose copy is unfinished; of that number
        self._cases: list[_Case] = []
        self._stated: set[int] = set()  # terminals that a status record accounts for
        self._seen: dict[int, list[Terminal]] = {}
        self._reach: dict[tuple[str, int], int] = {}  # first offset of a reply partition that can be read
        self._topics: set[str] = set()
        self._lowest: dict[tuple[str, int], int] = {}  # stated offset
        self._copies = {names.deferred_topic(pool), names.overflow_topic(pool)}

    # One partition number after the other: its status records, then its copies, then its jobs

    def begin(self) -> None:
        """The next partition number."""
        self._statuses.clear()
        self._answered.clear()
        self._carried.clear()

    def status_reaches(self, number: int, since_ms: int) -> None:
        """The status partition no longer says what happened before."""
        self._status_since[number] = since_ms

    def status(self, value: bytes | None) -> None:
        """The next record of the status partition."""
        try:
            ended = _ENDED.decode(value or b"")
            origin = self._places.pack(Place.parse(ended.origin))
        except (msgspec.DecodeError, ValueError):
            return
        identity = identity_of(ended.tenant, ended.job_id, ended.run) if ended.job_id else 0
        if identity and not self._mine(ended.job_id.encode()):
            return
        stated = 0
        if ended.terminal is not None:
            where = ended.terminal
            stated = self._places.pack(Place(where.topic, where.partition, where.offset))
            self._topics.add(where.topic)
            self._stated.add(stated)
            lowest = self._lowest.get((where.topic, where.partition), where.offset)
            self._lowest[where.topic, where.partition] = min(lowest, where.offset)
        if identity:
            self._answered.add(identity)
        # The first one holds, as the first terminal does.
        self._statuses.setdefault(origin, _Status(ended.kind, identity, stated, ended.repeat))

    def copy(self, place: Place, origin: Place | None) -> bool:
        """A record of `deferred` or `overflow`. False: it has no origin, so it is a job of its own."""
        if origin is None:
            return False
        if not self._finished(place):
            self._carried.add(self._places.pack(origin))
        return True

    def job(self, place: Place, value: bytes | None, at_ms: int) -> None:
        """A record of a jobs topic."""
        origin = self._places.pack(place)
        status = self._statuses.get(origin)
        finished = self._finished(place) and origin not in self._carried
        answered = False
        if status is not None and status.identity:
            identity = status.identity
        else:
            if status is not None and not self._mine(str(place).encode()):
                return
            job_id, identity, reply_topic = read_job(value)
            if status is None:
                if not self._mine(job_id or str(place).encode()):
                    return
                answered = identity in self._answered
                if finished and reply_topic:  # its answer, if there is one, may lie where no status record says
                    self._topics.add(reply_topic)
        blind = at_ms < self._status_since.get(place.partition, 0)
        self._cases.append(_Case(origin, identity, status, finished, answered, blind))

    def _mine(self, text: bytes) -> bool:
        return self._shares == 1 or fingerprint(text) % self._shares == self._share

    def _finished(self, place: Place) -> bool:
        told = self._commits.get(place[:2])
        return (
            told is not None
            and place.offset < told.next
            and (place.offset < told.watermark or place.offset not in told.unfinished)
        )

    # Reply topics

    @property
    def reply_topics(self) -> frozenset[str]:
        """Where the answers to these jobs are said to lie, or may lie."""
        return frozenset(self._topics | {names.REPLIES})

    def lowest(self, topic: str, partition: int) -> int | None:
        """The first offset there that a status record names."""
        return self._lowest.get((topic, partition))

    def reach(self, topic: str, partition: int, begin: int) -> None:
        """This partition can be read from `begin` on; one that is not told of cannot be read at all."""
        self._reach[topic, partition] = begin

    def event(
        self, place: Place, key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]
    ) -> None:
        """The next record of a reply topic; only terminal events count."""
        if not value or (self._shares > 1 and not self._mine(key or b"")):
            return
        for name, kind in headers:
            if name == names.H_TYPE:
                if kind is None or kind.decode("latin-1") not in TERMINAL:
                    return
                break
        try:
            event = _EVENT.decode(value)
        except (msgspec.DecodeError, ValueError):
            return
        if event.type in TERMINAL and self._mine(event.job_id.encode()):
            identity = identity_of(event.tenant, event.job_id, event.run)
            terminal = Terminal(self._places.pack(place), event.seq > 0, event.duplicate)
            self._seen.setdefault(identity, []).append(terminal)

    # Verdicts

    def report(self) -> Report:
        report = Report()
        owners = self._owners()
        for number, case in enumerate(self._cases):
            seen = self._seen.get(case.identity, []) if case.identity else []
            verdict, why = judge(self._facts(case, seen, owner=owners.get(case.identity, number) == number))
            report.counts[verdict] += 1
            if why and len(listed := report.findings.setdefault(verdict, [])) < LISTED:
                places = tuple(self._places.unpack(terminal.place) for terminal in seen)
                listed.append(Finding(verdict, self._places.unpack(case.origin), why, places))
        return report

    def _owners(self) -> dict[int, int]:
        """Identity → the one of its records that accounts for its terminals: of several copies the one that ran."""
        owners: dict[int, int] = {}
        for number, case in enumerate(self._cases):
            if not case.identity:
                continue
            former = owners.setdefault(case.identity, number)
            if former != number and not _ran(self._cases[former]) and _ran(case):
                owners[case.identity] = number
        return owners

    def _facts(self, case: _Case, seen: list[Terminal], *, owner: bool) -> Facts:
        status = case.status
        own = [terminal for terminal in seen if not terminal.repeat]
        counted = own[:1]
        if owner:
            ours = status.stated if status is not None else 0
            counted = [terminal for terminal in own if terminal.place == ours or self._counts(terminal)] or counted
        stated: Sight | None = None
        if status is not None and status.stated:
            there = any(terminal.place == status.stated for terminal in seen)
            stated = "there" if there else self._sight(status.stated)
        return Facts(
            finished=case.finished,
            status=status.kind if status is not None else None,
            stated=stated,
            terminals=len(counted),
            partitions=len({terminal.place >> OFFSET_BITS for terminal in counted}),
            letter=case.origin in self._letters.origins,
            answered=case.answered or len(seen) > len(own),
            blind=case.blind or not self._letters.readable,
        )

    def _counts(self, terminal: Terminal) -> bool:
        """A refusal that a status record accounts for answers a record of its own, whose content was another."""
        return terminal.ran or terminal.place not in self._stated

    def _sight(self, stated: int) -> Sight:
        place = self._places.unpack(stated)
        begin = self._reach.get(place[:2])
        return "out of reach" if begin is None or place.offset < begin else "missing"


def _ran(case: _Case) -> bool:
    return case.status is not None and not case.status.repeat


class Letters:
    """The origins of what lies on the dead-letter topic; shared by all shares. `readable`: whether it may be read."""

    def __init__(self) -> None:
        self.places = Places()
        self.origins: set[int] = set()
        self.readable = True

    def take(self, headers: Iterable[tuple[str, bytes | None]]) -> None:
        origin = origin_of(headers)
        if origin is not None:
            self.origins.add(self.places.pack(origin))
