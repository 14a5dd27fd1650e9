"""One admitted job, as the rooms of the worker pass it on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.frames import Dead, Head


class Place(NamedTuple):
    """Where a record lies."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Place:
        topic, partition, offset = text.rsplit("/", 2)
        return cls(topic, int(partition), int(offset))


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to complete one offset: its place, and the epoch of the assignment it was read under (R4)."""

    place: Place
    epoch: int


@dataclass(frozen=True, slots=True)
class Record:
    """A consumed record as it was on the log; kept whole until the job ends, for its dead letter (R15)."""

    place: Place
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int  # the broker's time (LogAppendTime)

    def dead(self, ticket: Ticket, origin: Place, code: str, message: str, attempts: int = 0) -> Dead:
        """This record as a dead letter, whole."""
        return Dead(
            topic=self.place.topic,
            partition=self.place.partition,
            offset=self.place.offset,
            epoch=ticket.epoch,
            key=self.key,
            value=self.value,
            headers=list(self.headers),
            origin=str(origin),
            code=code,
            message=message,
            attempts=attempts,
            at=time.time(),
        )


@dataclass(slots=True)
class Job:
    """A job that passed intake. Times are wall-clock seconds (`time.time()`) unless a name says otherwise."""

    ticket: Ticket
    record: Record
    head: Head  # what the delivery process must know of it: identity, reply address, output policy, trace
    body: dict[str, Any]  # checked against the endpoint's allow-list
    received: float
    deadline: float | None = None
    not_before: float | None = None
    conversation: str | None = None
    starts: int = 0  # unclean starts before this one (R11)
    fetched: int = 0  # bytes of a claim-checked input

    @property
    def place(self) -> Place:
        return self.ticket.place

    @property
    def origin(self) -> Place:
        return Place.parse(self.head.origin)

    @property
    def size(self) -> int:
        """Bytes it keeps in memory, about."""
        return len(self.record.value or b"") + self.fetched

    @property
    def tenant(self) -> str:
        return self.head.tenant

    @property
    def identity(self) -> tuple[str, str, int]:
        """(tenant, id, run): what makes two records the same job (contract.md §1)."""
        return (self.head.tenant, self.head.job_id, self.head.run)
