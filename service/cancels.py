"""Which cancels are known, and which records they hit (R13). Pure: no I/O, no clock.

A cancel hits records whose broker time is not later than its own, so it can be kept as long as such a record may still
come, and it hits nothing that is published after it.
"""

from __future__ import annotations

from typing import NamedTuple

# Cancels known at a time: at most 50 MB. Beyond it the oldest are forgotten.
MOST = 200_000


class Wish(NamedTuple):
    """A cancel as it was read. No job id: all jobs of the tenant; no run: all runs."""

    tenant: str
    job_id: str | None
    run: int | None
    at_ms: int  # the broker's time


class Cancels:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        # From the one that was told last to the one told longest ago, backwards: a dict keeps its order.
        self._wishes: dict[tuple[str, str | None, int | None], int] = {}
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._wishes)

    def add(self, wish: Wish) -> None:
        """The same wish again holds from its later time."""
        key = wish[:3]
        at_ms = max(wish.at_ms, self._wishes.pop(key, wish.at_ms))
        self._wishes[key] = at_ms
        if len(self._wishes) > self._most:
            del self._wishes[next(iter(self._wishes))]
            self.forgotten += 1

    def hit(self, tenant: str, job_id: str, run: int, broker_ms: int) -> bool:
        """Whether a record of that broker time is hit."""
        wishes = self._wishes
        if not wishes:
            return False
        for key in ((tenant, job_id, run), (tenant, job_id, None), (tenant, None, None)):
            at_ms = wishes.get(key)
            if at_ms is not None and broker_ms <= at_ms:
                return True
        return False
