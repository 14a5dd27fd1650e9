"""A job that was published or resumed: what a caller awaits, iterates over and cancels."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from client.errors import ClientError, Closed, ended
from client.result import BlobRef, Chunk, Event, Result, ResumeToken
from client.stream import Stream


class Place(NamedTuple):
    """Where a record lies."""

    topic: str
    partition: int
    offset: int


class Submitted:
    """`async for chunk in submitted` yields the current attempt's chunks; `await submitted.result()` the final output.

    Both may be used, in any order; one consumer iterates at a time. `token` finds the job again after a restart.
    """

    def __init__(
        self,
        stream: Stream,
        token: ResumeToken,
        *,
        close: Callable[[Stream], None],
        cancel: Callable[[str, str, int | None], Awaitable[Place]],
        fetch: Callable[[BlobRef], Awaitable[bytes]] | None,
        place: Place | None = None,
        trace_id: str | None = None,
    ) -> None:
        self.id = token.id
        self.tenant = token.tenant
        self.token = token
        self.place = place  # of the job's record; None for a resumed job
        self.trace_id = trace_id  # 32 hex digits; None when the application traces nothing
        self._stream = stream
        self._close = close
        self._cancel = cancel
        self._fetch = fetch
        self._result: Result | None = None

    @property
    def run(self) -> int:
        """The run whose events are shown: the one asked for, or a later one that has taken its place."""
        return self._stream.run

    @property
    def attempt(self) -> str | None:
        """The current attempt; None before the first."""
        return self._stream.attempt

    @property
    def result_only(self) -> bool:
        """Whether chunks of the current attempt were dropped (slow reader, joined late, gap); the result is whole."""
        return self._stream.result_only

    @property
    def done(self) -> bool:
        """Whether the job's terminal event has arrived."""
        return self._stream.ended

    async def result(self, timeout_s: float | None = None, *, download: bool | None = None) -> Result:
        """The completed job's result. `download`: fetch a stored response now; by default when the client has a store.

        Raises JobFailed, JobCancelled, JobExpired; ResultTimeout after `timeout_s` seconds (the job goes on);
        Closed, ResumeExpired; StoreError, DigestMismatch for a stored response.
        """
        began = time.monotonic()
        event, offset = await self._stream.end(timeout_s)
        error = ended(event)
        if error is not None:
            raise error
        if self._result is None:
            place = (self.token.topic, self.token.partition, offset)
            try:
                self._result = Result.of(event, place, self._fetch)
            except (KeyError, TypeError, ValueError) as error:
                raise ClientError(f"job {self.id} ended by an event that is none of the contract's: {error}") from None
        if download or (download is None and self._fetch is not None):
            await self._result.download(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began)))
        return self._result

    async def events(self, timeout_s: float | None = None) -> AsyncIterator[Event]:
        """Waiting, Started, Chunk and ResultOnly as they come, until the job has completed.

        `Started` says that what was shown before is void; `ResultOnly` that no more chunks of this attempt will come.
        Raises JobFailed, JobCancelled, JobExpired at the end; ResultTimeout when the job has not ended after
        `timeout_s` seconds (it goes on); Closed, ResumeExpired.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (item := await self._stream.take(until)) is not None:
            yield item
        event, _ = await self._stream.end()
        error = ended(event)
        if error is not None:
            raise error

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async for item in self.events():
            if isinstance(item, Chunk):
                yield item

    async def cancel(self) -> None:
        """Asks the service to stop this job; its terminal event, as a rule `cancelled`, still comes.

        Raises UnknownTopic, PublishFailed, Closed.
        """
        await self._cancel(self.id, self.tenant, None)

    def close(self) -> None:
        """Gives up on this job's events, for whoever waits too (Closed); the job itself goes on. Not needed once it has
        ended, and then it takes nothing back.
        """
        self._close(self._stream)
        self._stream.fail(Closed(f"close() gave up on job {self.id}; resume(job.token) finds it again"))
