"""Order modes: of an ordered key one job at a time, in the order of the log (tenancy.md §3). Pure.

The others of the key wait here, outside every queue, so that they are in nobody's way. The next one goes on when the
former's terminal is acknowledged, or when the former is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from schemas.tenants import Tenant
from service.job import Job, Place, Ticket

T = TypeVar("T")

Key = tuple[str, str | None]


def order_key(job: Job, tenant: Tenant | None) -> Key | None:
    """Jobs of one key run one after the other; None = this one minds nobody."""
    if tenant is None or tenant.order == "none":
        return None
    if tenant.order == "tenant":
        return (job.tenant, None)
    return None if job.conversation is None else (job.tenant, job.conversation)


@dataclass(slots=True)
class _Line(Generic[T]):
    holder: T | None = None
    waiting: list[tuple[Place, T]] = field(default_factory=list)


class Order(Generic[T]):
    """`ready(item)`: no earlier record of its key is still on its way through intake."""

    def __init__(self, ready: Callable[[T], bool] = lambda item: True) -> None:
        self.ready = ready
        self._lines: dict[Hashable, _Line[T]] = {}
        self._open: set[Hashable] = set()  # keys without a holder: whose first one is not ready
        self._size = 0

    def __len__(self) -> int:
        """Items that wait behind another one."""
        return self._size

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for _, item in line.waiting)

    def firsts(self) -> Iterator[T]:
        """The first that waits of each key."""
        return (line.waiting[0][1] for line in self._lines.values() if line.waiting)

    def enter(self, key: Hashable, place: Place, item: T) -> bool:
        """True: it holds the key, and may go. False: it waits here."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        at = len(line.waiting)
        while at and place[:2] == line.waiting[at - 1][0][:2] and place[2] < line.waiting[at - 1][0][2]:
            at -= 1  # its input took longer than a later one's
        if line.holder is None and at == 0 and self.ready(item):
            line.holder = item
            self._open.discard(key)
            return True
        line.waiting.insert(at, (place, item))
        self._size += 1
        if line.holder is None:
            self._open.add(key)
        return False

    def leave(self, key: Hashable, item: T) -> T | None:
        """The item is over, or gone. Returns the one that holds the key now, if that changed."""
        line = self._lines.get(key)
        if line is None:
            return None
        if line.holder is item:
            line.holder = None
            return self._advance(key, line)
        for at, (_, waiting) in enumerate(line.waiting):
            if waiting is item:
                del line.waiting[at]
                self._size -= 1
                return self._advance(key, line) if line.holder is None else None
        return None

    def retry(self) -> list[T]:
        """Intake got on: returns those that may go now."""
        return [item for key in list(self._open) if (item := self._advance(key, self._lines[key])) is not None]

    def _advance(self, key: Hashable, line: _Line[T]) -> T | None:
        self._open.discard(key)
        if not line.waiting:
            del self._lines[key]
            return None
        if not self.ready(line.waiting[0][1]):
            self._open.add(key)
            return None
        self._size -= 1
        line.holder = line.waiting.pop(0)[1]
        return line.holder


class Upstream:
    """Records that intake still looks something up for, so that a later one of their key does not overtake them."""

    def __init__(self) -> None:
        self._offsets: dict[tuple[str, int, bytes | None], set[int]] = {}

    def add(self, ticket: Ticket, key: bytes | None) -> None:
        place = ticket.place
        self._offsets.setdefault((place.topic, place.partition, key), set()).add(place.offset)

    def remove(self, ticket: Ticket, key: bytes | None) -> None:
        place = ticket.place
        offsets = self._offsets.get((place.topic, place.partition, key))
        if offsets is not None:
            offsets.discard(place.offset)
            if not offsets:
                del self._offsets[place.topic, place.partition, key]

    def before(self, job: Job) -> bool:
        """Whether an earlier record with the job's record key is on its way."""
        place = job.place
        offsets = self._offsets.get((place.topic, place.partition, job.record.key)) if self._offsets else None
        return offsets is not None and min(offsets) < place.offset
