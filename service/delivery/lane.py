"""One partition's queue of records: batches of our own, one in flight, so that order survives and failures are known.

aiokafka's `send` costs a future and a header check a record; a lane fills a batch builder (2 µs a record) and gets one
future a batch. A record leaves the queue only when its batch is acknowledged or has failed, so that what was queued
behind a failed chunk of the same attempt can still be taken back (R9).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.errors import MessageSizeTooLargeError, RecordListTooLargeError

log = logging.getLogger(__name__)

# Bytes queued beyond which streams keep their tokens in their own buffer instead: one full batch waits while one flies.
ROOM_BYTES = 256 * 1024


class Owner(Protocol):
    """The attempt a record belongs to."""

    def broken(self) -> None:
        """A numbered record could not be sent: the attempt is over (R9)."""

    def refused(self, letter: Letter) -> None:
        """The broker will never take this record of the attempt: it is over the topic's limit."""


Acknowledged = Callable[[int, int], None]  # (partition, offset)


class Letter:
    """One record on its way. With `done` it is sent again byte for byte until acknowledged; without, its failure
    breaks its owner, or goes unnoticed if it has none."""

    __slots__ = ("done", "headers", "key", "owner", "size", "value")

    def __init__(
        self,
        value: bytes | None,
        key: bytes | None,
        headers: list[tuple[str, bytes]] | list[tuple[str, bytes | None]],
        owner: Owner | None = None,
        done: Acknowledged | None = None,
    ) -> None:
        self.value = value
        self.key = key
        self.headers = headers
        self.owner = owner
        self.done = done
        self.size = len(value or b"") + len(key or b"") + 64


class Post(Protocol):
    """What a lane asks of its surroundings."""

    @property
    def producer(self) -> AIOKafkaProducer: ...

    def may_send(self, lane: Lane) -> bool: ...

    def settled(self, lane: Lane, size: int) -> None:
        """Records of `size` bytes are acknowledged, taken back or given up."""

    def launched(self, lane: Lane) -> None:
        """A batch is in flight on this lane now."""

    def landed(self, lane: Lane) -> None:
        """Nothing is in flight on this lane now."""

    def failed(self, lane: Lane, error: BaseException) -> None:
        """A batch failed; the lane is down until `up()`."""

    def roomy(self, lane: Lane) -> None:
        """There is room again for those that found none."""


class Lane:
    """Records of one topic partition, in order. `gated`: they need a lease (R5)."""

    def __init__(self, post: Post, topic: str, partition: int, *, gated: bool) -> None:
        self.topic = topic
        self.partition = partition
        self.gated = gated
        self.down = False
        self.in_flight = False
        self.dirty = False  # waits for the linger timer
        self.queued = 0  # bytes
        self.users = 0  # attempts that hold this lane
        self.used = time.monotonic()
        self._post = post
        self._queue: deque[Letter] = deque()
        self._due = False  # send as soon as the batch in flight is settled
        self._single = False  # the broker refused a batch as too large: one record at a time
        self._task: asyncio.Task[None] | None = None

    @property
    def room(self) -> bool:
        """Whether a stream should put its next chunk here, rather than let its own buffer grow."""
        return not self.down and self.queued < ROOM_BYTES

    @property
    def idle(self) -> bool:
        return not self._queue and not self.in_flight

    def put(self, letter: Letter) -> None:
        self._queue.append(letter)
        self.queued += letter.size

    def flush(self) -> None:
        """Sends what is queued now, or as soon as the batch in flight is settled."""
        self.dirty = False
        if self.in_flight:
            self._due = True
        elif self._queue and not self.down and self._post.may_send(self):
            self.in_flight = True
            self._post.launched(self)
            self._task = asyncio.get_running_loop().create_task(self._send())

    def up(self) -> None:
        self.down = False
        self.flush()
        self._post.roomy(self)

    def withdraw(self, letter: Letter) -> bool:
        """Takes one record back; False if it is in flight or gone already."""
        if letter not in self._queue:
            return False
        self._remove([letter])
        return True

    def clear(self) -> None:
        """Empties the queue: the topic is gone."""
        self._remove(list(self._queue))

    def _remove(self, letters: list[Letter]) -> None:
        gone = set(map(id, letters))
        self._queue = deque(letter for letter in self._queue if id(letter) not in gone)
        self._give_up(letters)

    def _give_up(self, letters: list[Letter]) -> None:
        size = sum(letter.size for letter in letters)
        self.queued -= size
        self._post.settled(self, size)

    async def _send(self) -> None:
        """Batch after batch while there is reason to; always leaves `in_flight` false."""
        try:
            while True:
                self._due = False
                builder, batch = self._take()
                try:
                    future = await self._post.producer.send_batch(builder, self.topic, partition=self.partition)
                    offset = (await future).offset
                except Exception as error:
                    self._fail(batch, error)
                else:
                    self._acknowledge(batch, offset)
                if not (self._due and self._queue and not self.down and self._post.may_send(self)):
                    break
        finally:
            self.in_flight = False
            self.used = time.monotonic()
            self._post.landed(self)
        if not self.down:
            self._post.roomy(self)

    def _take(self) -> tuple[Any, list[Letter]]:
        """The next batch. Its bytes count as queued until it is settled."""
        builder = self._post.producer.create_batch()
        queue, batch = self._queue, []
        now = int(time.time() * 1000)
        while queue:
            letter = queue[0]
            if builder.append(timestamp=now, key=letter.key, value=letter.value, headers=letter.headers) is None:
                self._due = True  # full
                break
            batch.append(queue.popleft())
            if self._single:
                break
        self._due = self._due or self._single
        builder.close()
        return builder, batch

    def _acknowledge(self, batch: list[Letter], offset: int) -> None:
        partition = self.partition
        size = 0
        for place, letter in enumerate(batch):
            size += letter.size
            if letter.done is not None:
                letter.done(partition, offset + place)
        self.queued -= size
        self._single = self._single and bool(self._queue)
        self._post.settled(self, size)

    def _fail(self, batch: list[Letter], error: Exception) -> None:
        if isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError):
            self._too_large(batch)
            return
        self.down = True
        broken = {letter.owner for letter in batch if letter.done is None and letter.owner is not None}
        again = [letter for letter in batch if letter.done is not None and letter.owner not in broken]
        kept = set(map(id, again))
        self._give_up([letter for letter in batch if id(letter) not in kept])
        self._remove([letter for letter in self._queue if letter.owner in broken])
        self._queue.extendleft(reversed(again))
        for owner in broken:
            owner.broken()
        self._post.failed(self, error)

    def _too_large(self, batch: list[Letter]) -> None:
        """Over the topic's limit: once more one by one; a record that is too large alone goes back to its sender."""
        self._due = True
        if len(batch) > 1:
            self._queue.extendleft(reversed(batch))
            self._single = True
            return
        letter = batch[0]
        self._give_up(batch)
        log.error("record too large for its topic topic=%s bytes=%d", self.topic, letter.size)
        if letter.owner is not None:
            self._remove([other for other in self._queue if other.owner is letter.owner])
            letter.owner.refused(letter)
        elif letter.done is not None:
            letter.done(self.partition, -1)
