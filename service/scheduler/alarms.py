"""What is due when: a heap of moments, each of one job. Pure; has no clock and no opinion of what is to be done."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from enum import Enum, auto

from service.job import Ticket

# Alarms of jobs that ended long before are kept until they are three quarters of all, and so many at least.
SLACK = 1024


class Alarm(Enum):
    DUE = auto()  # not_before has come
    DEADLINE = auto()
    NOTICE = auto()  # time for a `waiting` event


class Alarms:
    """`here(ticket)`: whether the job is still here."""

    def __init__(self, here: Callable[[Ticket], bool]) -> None:
        self._here = here
        self._heap: list[tuple[float, int, Alarm, Ticket]] = []  # (due, tie-break, what, whose)
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, due: float, what: Alarm, ticket: Ticket, jobs: int) -> None:
        """`jobs`: how many are here."""
        self._serial += 1
        heapq.heappush(self._heap, (due, self._serial, what, ticket))
        if len(self._heap) > SLACK and len(self._heap) > 4 * jobs:
            self._heap = [alarm for alarm in self._heap if self._here(alarm[3])]
            heapq.heapify(self._heap)

    def ring(self, now: float) -> Iterator[tuple[Alarm, Ticket]]:
        """Those that are due, of jobs that are here. Alarms may be set meanwhile, for later."""
        while self._heap and self._heap[0][0] <= now:
            _, _, what, ticket = heapq.heappop(self._heap)
            if self._here(ticket):
                yield what, ticket
