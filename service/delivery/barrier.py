"""When a barrier is answered: once nothing is in flight, or when its time is over (R5). Holds nothing back itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BARRIER_S = 1.0  # what is in flight may take so long; the revoked callback waits for it


class BarrierClock:
    """`is_quiet()`: nothing is in flight. `answer(number)`: what is in flight from now on will be held back."""

    def __init__(self, is_quiet: Callable[[], bool], answer: Callable[[int], None]) -> None:
        self._is_quiet = is_quiet
        self._answer = answer
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, number: int) -> None:
        self.stop()
        self._number = number
        self._timer = asyncio.get_running_loop().call_later(BARRIER_S, self._done)
        self.check()

    def check(self) -> None:
        """Something has landed."""
        if self._timer is not None and self._is_quiet():
            self._done()

    def stop(self) -> None:
        """It is over, or another one takes its place: no answer any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _done(self) -> None:
        self.stop()
        self._answer(self._number)
