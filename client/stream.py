"""One job's events on their way to one consumer: the rules for readers applied, then a bounded buffer.

A consumer that is too slow loses chunks, never the result: its buffer is dropped and the stream becomes result-only, so
that it holds up neither memory nor the other streams of the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from client.errors import ResultTimeout
from client.reader import Reader, Step
from client.result import Chunk, Event, ResultOnly, Started, Waiting, is_chunk_object

SLOW = "the reader was too slow"
GAP = "chunks are missing on the reply topic"
JOINED_LATE = "joined after the attempt began"


class Stream:
    """`limit` is the number of events that may wait for the consumer before chunks are dropped.

    With `streaming` False only the terminal event matters, and chunks need not even be parsed by whoever feeds it.
    `content` is the digest of what was published; None when that is not known here.
    """

    def __init__(
        self,
        tenant: str,
        job_id: str,
        run: int,
        *,
        partition: int,
        offset: int,
        limit: int,
        streaming: bool,
        content: bytes | None = None,
    ) -> None:
        self.tenant = tenant
        self.job_id = job_id
        self.partition = partition  # of the reply topic
        self.next_offset = offset  # records before it have been seen, or are older than the job
        self.seen = False  # any event of the job at all
        self.streaming = streaming
        self.content = content
        self.published_run = run
        self._limit = limit
        self._reader = Reader(run)
        self._items: deque[Event] = deque()
        self._first = True  # the next chunk is the first of its attempt
        self.result_only = False  # chunks of the current attempt were lost to this reader
        self._wake = asyncio.Event()
        self._end: asyncio.Future[tuple[Mapping[str, Any], int]] = asyncio.get_running_loop().create_future()
        # A failure that nobody awaits is not an error of the event loop's.
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())

    @property
    def run(self) -> int:
        return self._reader.run

    @property
    def attempt(self) -> str | None:
        """The current attempt; None before the first, and while the stream is result-only for want of its beginning."""
        return self._reader.attempt

    @property
    def wants_chunks(self) -> bool:
        return self.streaming and not self.result_only

    @property
    def ended(self) -> bool:
        return self._end.done()

    def feed(self, event: Mapping[str, Any], offset: int) -> bool:
        """Takes the next event on the job's partition in offset order; True when the job has ended."""
        if offset < self.next_offset or event["tenant"] != self.tenant:
            return False
        self.next_offset = offset + 1
        self.seen = True
        late = self._reader.attempt is None and event["run"] == self._reader.run
        try:
            step = self._reader.feed(event)
        except (KeyError, TypeError):  # lacks what the contract promises: not an event
            return False
        match step:
            case Step.CHUNK:
                self._chunk(event)
            case Step.END:
                if not self._end.done():
                    self._end.set_result((event, offset))
                self._wake.set()
                return True
            case Step.STARTED:
                # Chunks of the former attempt that nobody has taken yet are void.
                self._items = deque(item for item in self._items if isinstance(item, Waiting))
                self._first = True
                self.result_only = False
                self._put(
                    Started(
                        attempt=event["attempt"],
                        model=event.get("model"),
                        worker=event.get("worker"),
                        trace_id=event.get("trace_id"),
                        prompt_tokens=event.get("prompt_tokens"),
                    )
                )
            case Step.WAITING:
                self._put(Waiting(event.get("reason", ""), event.get("since")))
            case Step.GAP:
                self._drop(GAP)
            case Step.IGNORED:
                if late and event["type"] == "chunk":
                    self._drop(JOINED_LATE)
        return False

    def fail(self, error: Exception) -> None:
        """No more events will come: who waits, or asks for more, gets `error` at once. Nothing after the job's end."""
        if not self._end.done():
            self._items.clear()
            self._end.set_exception(error)
        self._wake.set()

    async def end(self, timeout_s: float | None = None) -> tuple[Mapping[str, Any], int]:
        """The terminal event and its offset. Raises ResultTimeout, or what the stream failed with."""
        await asyncio.wait((self._end,), timeout=timeout_s)
        if not self._end.done():
            raise ResultTimeout(
                f"job {self.job_id} has not ended within {timeout_s:g} s; it goes on, ask again or cancel it"
            )
        return self._end.result()

    async def take(self, until: float | None = None) -> Event | None:
        """The next event; None when the job has ended and everything was taken.

        Raises ResultTimeout at the monotonic time `until`, or what the stream failed with.
        """
        while not self._items:
            if self._end.done():
                self._end.result()
                return None
            self._wake.clear()
            if until is None:
                await self._wake.wait()
                continue
            try:
                async with asyncio.timeout(until - time.monotonic()):  # wait_for may swallow a cancellation (3.11)
                    await self._wake.wait()
            except TimeoutError:
                raise ResultTimeout(f"job {self.job_id} has not ended in the time given; it goes on") from None
        return self._items.popleft()

    def _chunk(self, event: Mapping[str, Any]) -> None:
        if not self.wants_chunks:
            return
        if len(self._items) >= self._limit:
            self._drop(SLOW)
            return
        data = event.get("chunk")
        if not is_chunk_object(data):
            self._drop(GAP)
            return
        self._put(
            Chunk(
                attempt=event["attempt"],
                seq=event["seq"],
                offset=event["offset"],
                tokens=event["tokens"],
                data=data,
                first=self._first,
            )
        )
        self._first = False

    def _drop(self, reason: str) -> None:
        """Chunks are lost to this reader until a new attempt begins."""
        if not self.wants_chunks:
            return
        self._items.clear()
        self.result_only = True
        self._put(ResultOnly(reason))

    def _put(self, item: Event) -> None:
        if len(self._items) < self._limit:
            self._items.append(item)
            self._wake.set()
