"""What is on its way from one partition to `overflow`: published, acknowledged, complete where it lay.

    put ──▶ waits while a write is on its way ──▶ goes with all that came meanwhile ──▶ `leave`
                                              └─▶ cannot be published ──▶ `stay`

One write at a time, as the client library has it of each partition: small ones would each cost a round trip.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from schemas.cancellation import is_asked_for
from service.deferred.relay import Publisher, Unwanted
from service.deferred.transfer import Transfer
from service.job import Job, Record, Ticket

log = logging.getLogger(__name__)

# Published together: so many, and of so many bytes.
GROUP, GROUP_BYTES = 64, 256 * 1024
# After a failure nothing is to be put here for so long, seconds.
PAUSE_S = 5.0


class Going(NamedTuple):
    """A job that waited here, or a record that nobody has judged."""

    record: Record
    ticket: Ticket
    job: Job | None = None


class Outbox:
    """Of one partition. `leave(one)`: it is on `topic`. `stay(one, wanted)`: it is not, as far as anybody knows;
    `wanted`: it may be put here again."""

    def __init__(
        self, topic: str, relay: Publisher, leave: Callable[[Going], None], stay: Callable[[Going, bool], None]
    ) -> None:
        self.paused_until = 0.0  # monotonic
        self._topic = topic
        self._relay = relay
        self._leave = leave
        self._stay = stay
        self._waiting: deque[Going] = deque()
        self._sent = 0  # and not acknowledged
        self._sending: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + self._sent

    def put(self, going: Sequence[Going], *, linger_s: float = 0.0) -> None:
        """`linger_s`: if nothing is on its way, so long it waits for others."""
        self._waiting += going
        if self._waiting and self._sending is None:
            self._sending = asyncio.create_task(self._send(linger_s))

    async def stop(self) -> None:
        """What has not gone stays where it is, and nobody is told."""
        self._waiting.clear()
        if (task := self._sending) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _send(self, linger_s: float) -> None:
        try:
            if linger_s:
                await asyncio.sleep(linger_s)
            while self._waiting:
                group = together(self._waiting)
                self._sent = len(group)
                await self._publish(group)
        finally:
            self._sent = 0
            self._sending = None

    async def _publish(self, group: Sequence[Going]) -> None:
        try:
            await self._write(group)
        except Unwanted as problem:
            if len(group) > 1:  # one of them is to blame
                for one in group:
                    await self._publish((one,))
                return
            log.error(
                "cannot be moved to overflow, waits where it is place=%s cause=%s", group[0].ticket.place, problem
            )
            self._tell(group, lambda one: self._stay(one, False))
        except asyncio.CancelledError as problem:
            if is_asked_for():
                raise
            self._failed(group, problem)
        except Exception as problem:
            self._failed(group, problem)
        else:
            self._tell(group, self._leave)

    async def _write(self, group: Sequence[Going]) -> None:
        transfers = [
            Transfer.of(one.record, one.job.head if one.job is not None else None, self._topic, starts=0)
            for one in group
        ]
        if len(transfers) == 1:
            await self._relay.publish(transfers[0])
        else:
            await self._relay.publish_together(transfers)

    def _failed(self, group: Sequence[Going], problem: BaseException) -> None:
        """They may have been written all the same: a copy on `overflow` is then known by its origin (R7)."""
        left = [*group, *self._waiting]
        self._waiting.clear()
        first = left[0].ticket.place
        log.warning("not moved to overflow, wait where they are jobs=%d first=%s: %r", len(left), first, problem)
        self.paused_until = time.monotonic() + PAUSE_S
        self._tell(left, lambda one: self._stay(one, True))

    def _tell(self, group: Sequence[Going], told: Callable[[Going], None]) -> None:
        self._sent = max(0, self._sent - len(group))
        for one in group:
            try:
                told(one)
            except Exception:  # the others of its group go on
                log.exception("a job that was to be moved to overflow place=%s", one.ticket.place)


def together(waiting: deque[Going]) -> list[Going]:
    """Takes out the first ones, for one write; there is one at least."""
    group: list[Going] = []
    size = 0
    while waiting and len(group) < GROUP:
        size += len(waiting[0].record.value or b"")
        if group and size > GROUP_BYTES:
            break
        group.append(waiting.popleft())
    return group
