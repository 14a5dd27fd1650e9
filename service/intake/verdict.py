"""What intake makes of a record: a job, an answerable refusal, or a dead letter; at once or after a look-up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from schemas.errors import Refusal
from service.credentials.doubt import Doubt
from service.frames import Dead, Head
from service.job import Job, Record, Ticket

# Jobs due within so many seconds wait in memory: moving one to `deferred` costs two records and about 10 ms.
NEAR_S = 5.0


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


@dataclass(frozen=True, slots=True)
class Unverified:
    """Nobody knows who sent this: a dead letter, and one `failed` event on the common reply topic.

    The identity that it claims may be another's: nothing is to be noted under it (R7).
    """

    head: Head
    doubt: Doubt
    record: Record
    ticket: Ticket
    received: float
    dead: Dead


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another pool serves the model: the record goes there, once."""

    head: Head
    pool: str
    record: Record
    ticket: Ticket
    received: float
    starts: int


Verdict = Job | Refused | Undeliverable | Unverified | Elsewhere


class Lookup:
    """A record that needs I/O, or work too long for the event loop, before it can be judged. Finish it once."""

    __slots__ = ("_finish", "record", "ticket")

    def __init__(self, record: Record, ticket: Ticket, finish: Callable[[], Awaitable[Verdict | Early]]) -> None:
        self.record = record
        self.ticket = ticket
        self._finish = finish

    async def finish(self) -> Verdict | Early:
        """Raises nothing but CancelledError; waits as long as the broker or the store cannot answer."""
        return await self._finish()


@dataclass(frozen=True, slots=True)
class Early:
    """A job whose time is so far ahead that its input is not fetched yet (R12). All else is checked; `lookup` goes on.

    Other jobs that are early are judged whole, and come as a `Job`.
    """

    head: Head
    not_before: float  # wall clock
    starts: int
    lookup: Lookup
