"""Whether events of attempts may go out now: the lease and the barrier of R5. Pure.

Without it a worker that froze, or that ends jobs between its last commit and the new assignment, ends them beside the
partition's new owner.
"""

from __future__ import annotations


class Gate:
    """Closed until the first lease. All times are CLOCK_MONOTONIC, the same clock in both processes."""

    __slots__ = ("barrier", "until")

    def __init__(self) -> None:
        self.until = float("-inf")
        self.barrier: int | None = None

    def open(self, now: float) -> bool:
        return self.barrier is None and now < self.until

    def lease(self, until: float) -> None:
        """The newest lease holds, even if it is shorter: the worker knows best."""
        self.until = until

    def close(self, number: int) -> None:
        self.barrier = number

    def release(self, number: int) -> bool:
        """Ends barrier `number` (or an earlier one that a later replaced). False if a newer one still holds."""
        if self.barrier is not None and number >= self.barrier:
            self.barrier = None
        return self.barrier is None
