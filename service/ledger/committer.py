"""The committer: the one place that commits, one commit at a time, and the lease that a commit gives (R4, R5).

    open ──revoked──▶ closed ──hand_over()──▶ closed ──assigned──▶ open
      └──────────── Evicted ──▶ closed, and not even hand_over() until the next assignment

It knows no client library: what it needs of one is `Offsets`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from service.ledger.book import Book
from service.ledger.metadata import Commit, Key
from service.settings import LEASE_MARGIN_S

log = logging.getLogger(__name__)

SLICE_BYTES = 256 * 1024  # of one request; larger ones hold up the heartbeat behind them on the same connection
LATE_S = 5.0  # a commit that takes longer is reported; it is never doubled by a second one


class Evicted(Exception):
    """The group does not take our commits any more: we are no member, or not of this generation."""


class MetadataTooLarge(Exception):
    """The broker's offset.metadata.max.bytes is below what we sent; only the partitions concerned were refused."""


class Offsets(Protocol):
    """The group's offset store, as this member sees it."""

    async def commit(self, commits: Mapping[Key, Commit]) -> None:
        """One request. Raises Evicted, MetadataTooLarge, and the client's own errors."""

    async def committed(self, keys: Collection[Key]) -> dict[Key, Commit | None]:
        """What is stored, for each of `keys`; None: never committed."""


def slices(commits: Mapping[Key, Commit], limit: int = SLICE_BYTES) -> Iterator[dict[Key, Commit]]:
    """Commits in requests of at most `limit` bytes, the topics of a partition number side by side."""
    part: dict[Key, Commit] = {}
    size = 0
    for key in sorted(commits, key=lambda key: (key[1], key[0])):
        commit = commits[key]
        cost = 2 * len(commit.metadata) + len(key[0]) + 32  # a latin-1 character is at most two bytes in UTF-8
        if part and size + cost > limit:
            yield part
            part, size = {}, 0
        part[key] = commit
        size += cost
    if part:
        yield part


class Committer:
    """Commits the book every `interval_s` seconds, changed or not, and announces the lease after each success."""

    def __init__(
        self,
        book: Book,
        offsets: Offsets,
        announce: Callable[[float], None],
        *,
        interval_s: float = 1.0,
        session_timeout_s: float = 10.0,
    ) -> None:
        self.lease_until = 0.0  # monotonic
        self.commits = 0  # whole commits stored
        self.failures = 0
        self._book = book
        self._offsets = offsets
        self._announce = announce
        self._interval_s = interval_s
        self._lease_s = session_timeout_s - LEASE_MARGIN_S
        self._open = False
        self._evicted = False
        self._begun = 0  # commits begun; a flush waits for one with a higher number than at its call
        self._began_at = 0.0
        self._flight: asyncio.Task[bool] | None = None
        self._waiters: list[tuple[int, asyncio.Future[bool]]] = []
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._run(), name="committer")

    async def stop(self) -> None:
        """Ends the loop; a commit in flight is left to `hand_over`."""
        self.close()
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait({self._loop})
            self._loop = None

    @property
    def evicted(self) -> bool:
        return self._evicted

    def open(self) -> None:
        """From the assigned callback on; commits at once, since the first commit gives the lease."""
        self._evicted = False
        self._open = True
        self._wake.set()

    def close(self) -> None:
        """From entry of the revoked callback on: no commit but `hand_over`'s."""
        self._open = False
        self._answer(None)

    def wake(self) -> None:
        """Commits soon instead of at the next tick."""
        self._wake.set()

    async def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until all that the book was told before this call is stored. False: it is not, or that is unknown."""
        if not self._open:
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._begun + 1, waiter))
        self._wake.set()
        await asyncio.wait({waiter}, timeout=timeout_s)
        if waiter.done():
            return waiter.result()
        waiter.cancel()
        return False

    async def hand_over(self, *, clean: bool, deadline_s: float) -> bool:
        """The one commit between revoked and assigned, and the last one of a stop. Never raises.

        Reads first: only over a value that this process knows, and never lower; a member whose membership lapsed while
        the group was empty could otherwise throw away what another did in between (a commit of no generation is taken
        then). `clean` writes the clean-stop mark.
        """
        self.close()
        try:
            async with asyncio.timeout(deadline_s):
                if self._flight is not None:
                    await asyncio.wait({self._flight})
                keys = self._book.keys
                if self._evicted or not keys:
                    return not keys
                stored = await self._offsets.committed(keys)
                commits = {
                    key: commit
                    for key, commit in self._book.commits(clean=clean).items()
                    if self._book.known(key, there := stored[key]) and (there is None or there.offset <= commit.offset)
                }
                began = time.monotonic()
                for part in slices(commits):
                    await self._offsets.commit(part)
                    self._book.stored(part)
                if commits:
                    self._renew(began)
                return len(commits) == len(keys)
        except Evicted as error:
            self._evicted = True
            log.warning("last commit refused, the group went on without us: %s", error)
        except TimeoutError:
            log.warning("last commit not stored within %.1f s", deadline_s)
        except Exception:
            log.exception("last commit failed")
        finally:
            await self._drop_flight()
        return False

    async def run_once(self) -> bool:
        """One commit of everything. True: stored, and the lease renewed. Never two at a time."""
        if self._flight is None:
            if not self._open:
                return False
            self._begun += 1
            self._began_at = time.monotonic()
            self._flight = asyncio.create_task(self._write(self._begun, self._began_at), name="commit")
        flight = self._flight
        await asyncio.wait({flight}, timeout=LATE_S)
        if not flight.done():
            log.warning("a commit has been on its way for %.0f s", time.monotonic() - self._began_at)
            return False
        if self._flight is flight:
            self._flight = None
        return not flight.cancelled() and flight.result()

    async def _run(self) -> None:
        while True:
            due = self._began_at + self._interval_s - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due)):
                    await self._wake.wait()
            self._wake.clear()
            if self._open or self._flight is not None:
                await self.run_once()
            else:
                await self._wake.wait()

    async def _write(self, number: int, began: float) -> bool:
        try:
            commits = self._book.commits()
            for part in slices(commits):
                if not self._open:
                    return False
                await self._offsets.commit(part)
                self._book.stored(part)
        except Evicted as error:
            self._evicted = True
            self.failures += 1
            self.close()
            log.warning("commit refused, membership lost: %s", error)
            return False
        except MetadataTooLarge:
            self.failures += 1
            size = self._book.limit
            if self._book.shrink() < size:
                self._wake.set()
            log.error(
                "the broker refuses commit metadata of %d characters; now at most %d. Finished work above the watermark"
                " may run again after a restart: set offset.metadata.max.bytes to 4096 or more",
                size,
                self._book.limit,
            )
            return False
        except Exception as error:
            self.failures += 1
            log.warning("commit failed, tried again at the next tick: %r", error)
            return False
        if commits:
            self._renew(began)
        self._answer(number)
        return True

    def _renew(self, began: float) -> None:
        self.commits += 1
        self.lease_until = max(self.lease_until, began + self._lease_s)
        try:
            self._announce(self.lease_until)
        except Exception:
            log.exception("announcing the lease failed")

    def _answer(self, stored: int | None) -> None:
        """Tells the waiting flushes: those that commit number `stored` covers, or (None) that none will come."""
        left: list[tuple[int, asyncio.Future[bool]]] = []
        for needed, waiter in self._waiters:
            if waiter.done():
                continue
            if stored is None:
                waiter.set_result(False)
            elif needed <= stored:
                waiter.set_result(True)
            else:
                left.append((needed, waiter))
        self._waiters = left

    async def _drop_flight(self) -> None:
        """A commit still in flight when its time is over must not be sent again by the client after a rebalance."""
        flight, self._flight = self._flight, None
        if flight is not None and not flight.done():
            flight.cancel()
            await asyncio.wait({flight}, timeout=1.0)
