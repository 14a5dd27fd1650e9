"""Whether a service that is called over the network is away, told by how its calls go. Pure; makes no calls."""

from __future__ import annotations

import itertools

# A call without an answer for so long, and nothing else answered meanwhile: it is away. Seconds; longer than an upload
# of tens of megabytes takes, shorter than a client's read timeout (30 s), which a frozen server would run out.
SILENT_S = 10.0


class Outage:
    """Away from the first call that fails for its sake to the first that is answered. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._cause: str | None = None
        self._calls: dict[int, float] = {}  # under way, since when; oldest first
        self._answered = float("-inf")
        self._numbers = itertools.count()

    def began(self, now: float) -> int:
        """A call's number, for its end."""
        number = next(self._numbers)
        self._calls[number] = now
        return number

    def answered(self, number: int, now: float) -> None:
        """It did what was asked, or refused it for reasons of the call."""
        self._calls.pop(number, None)
        self._answered = now
        self._cause = None

    def failed(self, number: int, cause: str) -> None:
        """No connection, no answer, or an answer that says that it cannot serve now."""
        self._calls.pop(number, None)
        self._cause = cause

    def left(self, number: int, now: float) -> None:
        """Nobody waits for it any more."""
        self._cause = self.cause(now)  # a silence does not end by that
        self._calls.pop(number, None)

    def cause(self, now: float) -> str | None:
        """Why it counts as away; None: it does not."""
        if self._cause is not None:
            return self._cause
        oldest = next(iter(self._calls.values()), now)
        silent = now - max(oldest, self._answered)
        return f"no answer for {silent:.0f} s" if silent >= SILENT_S else None
