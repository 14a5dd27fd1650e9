"""Every job that is here, by its place, and the memory that they take. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from service.job import Place, Ticket
from service.scheduler.entry import Entry

# Records that wait or run here, bytes; above it no more is read, until half of it has gone. A backlog of large jobs
# stays on the log, not in memory.
MAX_BYTES = 512 * 1024 * 1024


class Roster:
    """`on_load(heavy)`: the bytes here have passed their bound, or are half below it again."""

    def __init__(self, on_load: Callable[[bool], None]) -> None:
        self._entries: dict[Place, Entry] = {}
        self._bytes = 0
        self._heavy = False
        self._on_load = on_load

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def at(self, place: Place) -> Entry | None:
        return self._entries.get(place)

    def has(self, ticket: Ticket) -> bool:
        entry = self._entries.get(ticket.place)
        return entry is not None and entry.job.ticket == ticket

    def add(self, entry: Entry) -> None:
        self._entries[entry.job.place] = entry
        self._bytes += entry.job.size
        if not self._heavy and self._bytes > MAX_BYTES:
            self._heavy = True
            self._on_load(True)

    def drop(self, entry: Entry) -> None:
        """It is over, or elsewhere. Idempotent."""
        entry.gone = True
        if self._entries.get(entry.job.place) is not entry:
            return
        del self._entries[entry.job.place]
        self._bytes -= entry.job.size
        if self._heavy and self._bytes < MAX_BYTES // 2:
            self._heavy = False
            self._on_load(False)
