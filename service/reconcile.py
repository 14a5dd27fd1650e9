"""Whether every job ended exactly once, from what lies on the logs (R17). Pure: fed with records, it gives facts to
judge (verdicts.py).

    letters → per partition number: statuses, copies, jobs → terminals → report

Memory is bounded: one `Reconciliation` holds one share of the jobs, by a hash of their ids (`share` of `shares`), and
identities as 64-bit fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from schemas import names
from schemas.events import TERMINAL
from service.job import Place
from service.ledger import Key, Snapshot
from service.places import OFFSET_BITS, Places, fingerprint, identity_of, origin_of, read_job
from service.verdicts import LISTED, Facts, Finding, Report, Sight, judge


class Terminal(NamedTuple):
    """Where an answer lies. `ran`: of an attempt that had begun, so not a refusal; `repeat`: to a further copy."""

    place: int
    ran: bool
    repeat: bool


# A status record's kind: the job went to another pool, which serves its model.
MOVED = "moved"


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
    place: str | None = None  # its last one, if it was moved


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
        self, commits: Mapping[Key, Snapshot | None], letters: Letters, *, share: int = 0, shares: int = 1
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
        # Of records that went to another partition number (spread): these are told of when theirs is read.
        self._afar: dict[int, _Status] = {}
        self._strays: set[int] = set()  # origins whose copy is unfinished there, or in another pool
        self._cases: list[_Case] = []
        self._stated: set[int] = set()  # terminals that a status record accounts for
        self._seen: dict[int, list[Terminal]] = {}
        self._reach: dict[tuple[str, int], int] = {}  # first offset of a reply partition that can be read
        self._topics: set[str] = set()
        self._lowest: dict[tuple[str, int], int] = {}  # stated offset

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
            first = Place.parse(ended.origin)
            afar = ended.place is not None and Place.parse(ended.place).partition != first.partition
            origin = self._places.pack(first)
        except (msgspec.DecodeError, ValueError):
            return
        if ended.kind == MOVED:  # its answer comes from another pool
            self._strays.add(origin)
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
        known = self._afar if afar else self._statuses
        known.setdefault(origin, _Status(ended.kind, identity, stated, ended.repeat))

    def copy(self, place: Place, origin: Place | None) -> bool:
        """A record of `deferred` or `overflow`. False: it has no origin, so it is a job of its own."""
        if origin is None:
            return False
        if not self._finished(place):
            carried = self._carried if origin.partition == place.partition else self._strays
            carried.add(self._places.pack(origin))
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
        if self._afar or self._strays:
            self._cases = [self._with_news_from_afar(case) for case in self._cases]
        owners = self._owners()
        for number, case in enumerate(self._cases):
            seen = self._seen.get(case.identity, []) if case.identity else []
            verdict, why = judge(self._facts(case, seen, owner=owners.get(case.identity, number) == number))
            report.counts[verdict] += 1
            if why and len(listed := report.findings.setdefault(verdict, [])) < LISTED:
                places = tuple(self._places.unpack(terminal.place) for terminal in seen)
                listed.append(Finding(verdict, self._places.unpack(case.origin), why, places))
        return report

    def _with_news_from_afar(self, case: _Case) -> _Case:
        status = case.status or self._afar.get(case.origin)
        identity = case.identity or (status.identity if status is not None else 0)
        return case._replace(status=status, identity=identity)

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
            finished=case.finished and (bool(counted) or case.origin not in self._strays),
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
