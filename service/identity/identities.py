"""The copies of each job that are here: who runs, who waits on it, who is refused (R7). Pure: no I/O, no clock.

    first of its identity ──▶ leader: queued, running, or being refused
    same origin           ──▶ the same record once more (through `deferred` or `overflow`): nothing to do; unless the
                              leader is on its way there: the broker may hand the copy out before it acknowledges it
    same content          ──▶ follower: holds no place at the engine, gets the leader's end
    other content         ──▶ conflict: refused; if its reader is the leader's reader too, after the leader's end, since
                              the first terminal event of an identity is the one that counts

Followers are bounded by the ledger: each is an unfinished record of its partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from schemas.errors import Refusal
from service.frames import Head
from service.identity.window import Identity
from service.job import Job, Place, Record, Ticket

Key = tuple[str, int]  # topic, partition


@dataclass(slots=True, eq=False)
class Arrival:
    """A record that intake has judged: a job, or a refusal that can be answered. One of the two is there."""

    head: Head
    record: Record
    ticket: Ticket
    received: float  # wall clock
    job: Job | None = None
    refusal: Refusal | None = None
    since: float = 0.0  # follower since, wall clock
    notice: float = 0.0  # when the next `waiting` event is due; 0 = never

    @classmethod
    def of(cls, job: Job) -> Arrival:
        return cls(job.head, job.record, job.ticket, job.received, job=job)

    @property
    def identity(self) -> Identity:
        return (self.head.tenant, self.head.job_id, self.head.run)

    @property
    def place(self) -> Place:
        return self.ticket.place


class Standing(Enum):
    """What an arrival is to those that are here."""

    LEADER = auto()
    SAME_RECORD = auto()
    FOLLOWER = auto()
    CONFLICT = auto()


@dataclass(slots=True, eq=False)
class Group:
    """A leader and those that wait on it: copies, and conflicts that must not be told before its end."""

    leader: Arrival
    followers: list[Arrival] = field(default_factory=list)
    leaving: bool = False  # the leader is being published elsewhere: its copy there waits until that is certain

    def is_its_copy(self, arrival: Arrival) -> bool:
        """Whether this is the leader's own record once more."""
        return arrival.head.origin == self.leader.head.origin


class Identities:
    """All live records of this worker that have an identity."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], dict[int, Group]] = {}  # by tenant and job id, then by run
        self._leading: dict[Place, Group] = {}
        self._following: dict[Place, Group] = {}

    def __len__(self) -> int:
        return len(self._leading) + len(self._following)

    def group(self, identity: Identity) -> Group | None:
        tenant, job_id, run = identity
        runs = self._groups.get((tenant, job_id))
        return runs.get(run) if runs else None

    def enter(self, arrival: Arrival) -> Standing:
        """A leader and a follower are registered, the others are not."""
        group = self.group(arrival.identity)
        if group is None:
            tenant, job_id, run = arrival.identity
            group = Group(arrival)
            self._groups.setdefault((tenant, job_id), {})[run] = group
            self._leading[arrival.place] = group
            return Standing.LEADER
        head, leader = arrival.head, group.leader.head
        rivals = group.followers if group.leaving else (group.leader, *group.followers)
        if any(head.origin == other.head.origin for other in rivals):
            return Standing.SAME_RECORD
        if head.digest != leader.digest and not _same_reader(head, leader):
            return Standing.CONFLICT
        group.followers.append(arrival)
        self._following[arrival.place] = group
        return Standing.FOLLOWER

    def ended(self, ticket: Ticket) -> Group | None:
        """The record's end is acknowledged, or it went elsewhere: its group, if it led one, which is no more."""
        group = self._led(ticket)
        if group is not None:
            self._dissolve(group)
        return group

    def depart(self, ticket: Ticket) -> None:
        """The leader is being published elsewhere; `ended` or `stay` follows."""
        if (group := self._led(ticket)) is not None:
            group.leaving = True

    def stay(self, ticket: Ticket) -> list[Arrival]:
        """It was not, or nobody knows. Returns copies of it that came all the same, which are no followers any more."""
        group = self._led(ticket)
        if group is None:
            return []
        group.leaving = False
        copies = [f for f in group.followers if group.is_its_copy(f)]
        for copy in copies:
            self.leave(copy)
        return copies

    def leave(self, arrival: Arrival) -> bool:
        """A follower goes by itself (cancelled, expired). False: it is none."""
        group = self._following.get(arrival.place)
        if group is None or arrival not in group.followers:
            return False
        group.followers.remove(arrival)
        del self._following[arrival.place]
        return True

    def lose(self, lost: set[Key]) -> list[Arrival]:
        """Partitions went to another worker. Returns followers that stay although their leader went with them."""
        for group in [g for g in self._following.values() if any(f.place[:2] in lost for f in g.followers)]:
            for follower in [f for f in group.followers if f.place[:2] in lost]:
                self.leave(follower)
        return self._orphans(group for group in self._leading.values() if group.leader.place[:2] in lost)

    def forsaken(self, owns: Callable[[Ticket], bool]) -> list[Arrival]:
        """Followers whose leader is not this worker's any more, without an end (it was published elsewhere)."""
        waiting = {id(group): group for group in self._following.values()}
        return self._orphans(group for group in waiting.values() if not owns(group.leader.ticket))

    def hit(self, tenant: str, job_id: str | None, run: int | None) -> Iterator[Group]:
        """The groups that a cancel names; no job id: all of the tenant, no run: all runs."""
        if job_id is None:
            groups = [g for (whose, _), runs in self._groups.items() if whose == tenant for g in runs.values()]
        else:
            runs = self._groups.get((tenant, job_id), {})
            groups = [g for number, g in runs.items() if run is None or number == run]
        yield from groups

    def followers(self) -> list[Arrival]:
        """All but the copies of a leader that is on its way to them: they are about to be that leader."""
        groups = {id(group): group for group in self._following.values()}.values()
        return [f for g in groups for f in g.followers if not (g.leaving and g.is_its_copy(f))]

    def _led(self, ticket: Ticket) -> Group | None:
        group = self._leading.get(ticket.place)
        return group if group is not None and group.leader.ticket == ticket else None

    def _orphans(self, groups: Iterable[Group]) -> list[Arrival]:
        orphans: list[Arrival] = []
        for group in list(groups):
            self._dissolve(group)
            orphans += group.followers
        return orphans

    def _dissolve(self, group: Group) -> None:
        tenant, job_id, run = group.leader.identity
        runs = self._groups[tenant, job_id]
        del runs[run]
        if not runs:
            del self._groups[tenant, job_id]
        del self._leading[group.leader.place]
        for follower in group.followers:
            del self._following[follower.place]


def _same_reader(one: Head, other: Head) -> bool:
    """Whether events of both may meet in one reply partition; without a number the partition follows from the key."""
    if one.reply_topic != other.reply_topic:
        return False
    return one.reply_partition == other.reply_partition or None in (one.reply_partition, other.reply_partition)
