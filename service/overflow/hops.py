"""Jobs whose model another pool serves: they go there once, whole, to its `overflow`; this pool is then done with them.

A status record says so here, so that a new owner of the partition does not send them again. The header `headrace-hop`
says so there: who comes by a hop is not sent on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from schemas.errors import ModelNotFound
from schemas.names import H_HOP, overflow_topic, status_topic
from schemas.records import StatusRecord
from service.deferred import Transfer, carry
from service.deferred.relay import Publisher
from service.intake.verdict import Elsewhere
from service.job import Ticket
from service.settings import Settings

log = logging.getLogger(__name__)

# A pool that cannot be reached for so long, seconds, is taken for one that is not there.
REACH_S = 30.0


class Window(Protocol):
    """The ledger, as far as it is needed here."""

    def owns(self, ticket: Ticket) -> bool: ...

    def complete(self, ticket: Ticket) -> bool: ...


class Hops:
    """`refuse(elsewhere, refusal)`: the pool is not there. `moved()`: for the metrics."""

    def __init__(
        self,
        settings: Settings,
        window: Window,
        relay: Publisher,
        refuse: Callable[[Elsewhere, ModelNotFound], None],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = settings.pool
        self._window = window
        self._relay = relay
        self._refuse = refuse
        self._moved = moved
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """What has not been sent stays where it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, elsewhere: Elsewhere) -> None:
        task = asyncio.create_task(self._send(elsewhere))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, elsewhere: Elsewhere) -> None:
        ticket, head = elsewhere.ticket, elsewhere.head
        until = time.monotonic() + REACH_S

        def left() -> float:
            return until - time.monotonic() if self._window.owns(ticket) else 0.0

        there = Transfer.of(elsewhere.record, head, overflow_topic(elsewhere.pool), starts=elsewhere.starts)
        # That pool has a partition count of its own, so the key chooses.
        there = replace(there, partition=None, headers=(*there.headers, (H_HOP, self._pool.encode())))
        if not await carry(self._relay, there, left):
            if self._window.owns(ticket):
                log.error("another pool cannot be reached pool=%s place=%s", elsewhere.pool, ticket.place)
                self._refuse(
                    elsewhere,
                    ModelNotFound(
                        f"body.model is served by pool {elsewhere.pool}, which cannot be reached from here; publish the"
                        " job there"
                    ),
                )
            return
        told = StatusRecord(
            tenant=head.tenant,
            job_id=head.job_id,
            run=head.run,
            kind="moved",
            origin=head.origin,
            place=str(ticket.place) if str(ticket.place) != head.origin else None,
            digest=head.digest,
            at=datetime.now(UTC),
        )
        value = told.model_dump_json(exclude_none=True).encode()
        note = Transfer(status_topic(self._pool), ticket.place.partition, head.origin.encode(), value, ())
        owned = self._window.owns
        if await carry(self._relay, note, lambda: 1.0 if owned(ticket) else 0.0) and self._window.complete(ticket):
            self._moved()
