"""What intake makes of a record: a job, an answerable refusal, or a dead letter; at once or after a look-up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from schemas.errors import Refusal
from service.frames import Dead, Head
from service.job import Job, Record, Ticket


@dataclass(frozen=True, slots=True)
class Refused:
    """The caller can be told: one `failed` (or `expired`) event goes to the reply address in `head`."""

    head: Head
    refusal: Refusal
    record: Record
    ticket: Ticket
    received: float


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """Nobody can be told: the record becomes a dead letter, whole."""

    dead: Dead
    record: Record
    ticket: Ticket


Verdict = Job | Refused | Undeliverable


class Lookup:
    """A record that needs I/O, or work too long for the event loop, before it can be judged. Finish it once."""

    __slots__ = ("_finish", "record", "ticket")

    def __init__(self, record: Record, ticket: Ticket, finish: Callable[[], Awaitable[Verdict]]) -> None:
        self.record = record
        self.ticket = ticket
        self._finish = finish

    async def finish(self) -> Verdict:
        """Raises nothing but CancelledError; waits as long as the broker or the store cannot answer."""
        return await self._finish()
