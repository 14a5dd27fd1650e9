"""What the consumers call: admission, and the worker's side of the delivery process. Declared where it is used."""

from __future__ import annotations

from typing import Protocol

from service.job import Record, Ticket
from service.ledger import Key


class Reception(Protocol):
    """Where new records go."""

    def admit(self, record: Record, ticket: Ticket) -> None:
        """Takes a registered record; returns at once."""

    def poison(self, record: Record, ticket: Ticket, message: str) -> None:
        """A record that could not be admitted: a dead letter, which completes it. `message` echoes no input."""

    def abandon(self, lost: set[Key]) -> None:
        """Everything of these partitions stops now: another worker owns them, or will be given them again."""


class Outlet(Protocol):
    """What leaves the worker, as far as the right to send depends on the group (R5)."""

    def lease(self, until_monotonic: float) -> None:
        """Terminals and chunks may go out until then."""

    async def barrier(self) -> None:
        """Holds terminals and chunks; returns once everything acknowledged was reported to the book."""

    def release(self, lost: set[Key]) -> None:
        """Ends the barrier; what belongs to `lost` is dropped, the rest goes out."""
