"""When which stream's 50 ms are over: one timer for all of them. Knows nothing of what happens then."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable

from service.delivery.attempt import Attempt

COMPANY_S = 0.002  # streams due so soon after the one that rings go along with it


class Alarms:
    """`ring(attempt, now)` is called on the loop; an attempt has one alarm at a time."""

    def __init__(self, ring: Callable[[Attempt, float], None]) -> None:
        self._ring = ring
        self._due: list[tuple[float, int, Attempt]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")

    def set(self, attempt: Attempt, due: float) -> None:
        """`due` is monotonic. The earlier of two alarms holds."""
        if attempt.timed:
            return
        attempt.timed = True
        heapq.heappush(self._due, (due, next(self._order), attempt))
        if due < self._timer_at:
            self._arm(due)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._go_off)

    def _go_off(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        now, due = time.monotonic(), self._due
        while due and due[0][0] <= now + COMPANY_S:
            attempt = heapq.heappop(due)[2]
            attempt.timed = False
            self._ring(attempt, now)
        if due:
            self._arm(due[0][0])
