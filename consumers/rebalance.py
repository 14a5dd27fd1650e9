"""The rebalance listener: what happens between losing partitions and reading them again (R4, R5).

    revoked   gate closed → barrier (≤ 1 s) → one commit → return
    assigned  pause all → drop what is lost → [read committed → drop what another wrote → end of barrier → gate open
              → log bounds → take → read the status topic to its end → settle → seek → resume]

A topic that was deleted takes no partition from us that another could have: what runs of it goes on to its end. Made
again, it is read from its start, whatever was committed for its name.

The part in brackets is a task of its own: no heartbeat is sent while the assigned callback runs, so it waits for the
task only a while; partitions stay paused until their turn, and the next revoked callback ends the task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from aiokafka import AIOKafkaConsumer
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.structs import TopicPartition

from consumers.offsets import is_member
from consumers.ports import Outlet, Reception
from consumers.status import LogReader
from schemas.cancellation import is_asked_for
from service.job import Place
from service.ledger import Book, Commit, Committer, Key, Offsets
from service.ledger.metadata import decode
from service.settings import KafkaSettings

log = logging.getLogger(__name__)

BARRIER_S = 1.0  # R5; all members stand still meanwhile
COMMIT_S = 3.0  # of the revoked callback's own commit
STATUS_S = 20.0  # reading the status topic; after that what it would have told runs again
RETRY_S = 0.5
BUDGET = 0.4  # share of the session timeout that the assigned callback may take


class Rebalance(ConsumerRebalanceListener):
    """`apply(keys)` lets the consumer pause or resume partitions as the book has it now.

    `former_lease_s`: with a static member id (R18), how long a process that had it before may still end jobs. The group
    gives its partitions to its successor at once, where others wait for a session timeout, which outlasts every lease.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        status_topic: str,
        *,
        book: Book,
        committer: Committer,
        offsets: Offsets,
        reception: Reception,
        outlet: Outlet,
        consumer: Callable[[], AIOKafkaConsumer],
        apply: Callable[[Iterable[Key]], None],
        recall: Callable[[frozenset[int]], Awaitable[None]] | None = None,
        topic_ids: Callable[[Iterable[str]], Awaitable[Mapping[str, bytes]]] | None = None,
        former_lease_s: float = 0.0,
    ) -> None:
        self.joined = False  # from knowing what is ours of an assignment to the next revoked callback
        self.count = 0  # assignments so far
        self.assignment: frozenset[Key] = frozenset()
        self._settings = settings
        self._status_topic = status_topic
        self._book = book
        self._committer = committer
        self._offsets = offsets
        self._reception = reception
        self._outlet = outlet
        self._consumer = consumer
        self._apply = apply
        self._recall = recall
        self._topic_ids = topic_ids
        self._known: dict[str, bytes] = {}  # topic → the id it had when its partitions were taken
        self._anew: set[Key] = set()  # to be taken whatever is committed for the name
        self._former_lease_s = former_lease_s
        self._lapsed = True  # somebody else may have been us
        self._taking: asyncio.Task[None] | None = None
        self._handing = asyncio.Lock()
        self._prepared = False  # the next revoked callback has nothing left to do
        self._barred = False  # a barrier waits for its release
        self._lost: set[Key] = set()  # lost since that barrier

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        async with self._handing:
            if not self._prepared:
                await self._hand_over()
            self._prepared = False

    async def seen(self, ids: Mapping[str, bytes]) -> None:
        """The topics that there are now. Partitions of one that was made again meanwhile are taken anew."""
        if not any(self._known.get(topic, found) != found for topic, found in ids.items()):
            return
        await self.halt()
        if self.joined:  # else the next assignment does it
            self._consumer().pause(*(TopicPartition(*key) for key in self.assignment))
            self._taking = asyncio.create_task(self._take_over(self.assignment), name="take-partitions")

    async def prepare(self) -> None:
        """What the revoked callback does, before a change of subscription: then commits are still possible."""
        async with self._handing:
            await self._hand_over()
            self._prepared = True

    async def _hand_over(self) -> None:
        self._committer.close()
        self.joined = False
        if self._former_lease_s and not is_member(self._consumer()):
            self._lapsed = True
        await self.halt()
        self._part(self._gone(self._book.keys))
        if self._book.keys:
            await self.barrier()
            await self._committer.hand_over(clean=True, deadline_s=COMMIT_S)

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        self._consumer().pause(*assigned)  # before any await: records would flow from the committed offset
        await self.halt()
        keys = frozenset((tp.topic, tp.partition) for tp in assigned)
        self.assignment = keys
        self.count += 1
        self._part(self._gone(self._book.keys - keys))
        self._let_go(self._book.keys - keys)
        self._taking = asyncio.create_task(self._take_over(keys), name="take-partitions")
        await asyncio.wait({self._taking}, timeout=BUDGET * self._settings.session_timeout_ms / 1000)

    async def barrier(self) -> None:
        """Delivery holds what it has and reports what is acknowledged. Never raises, never longer than a second."""
        self._barred = True
        try:
            async with asyncio.timeout(BARRIER_S):
                await self._outlet.barrier()
        except TimeoutError:
            log.warning("no answer to the barrier within %.1f s", BARRIER_S)
        except Exception:
            log.exception("barrier failed")

    async def halt(self) -> None:
        """Ends the taking over of partitions, if it is still going on."""
        task, self._taking = self._taking, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)

    async def _take_over(self, keys: frozenset[Key]) -> None:
        while True:
            try:
                return await self._take(keys)
            except asyncio.CancelledError:
                if is_asked_for():
                    raise
                log.warning("taking over partitions was interrupted, begun again")
            except Exception:
                # Partitions would stay paused for ever.
                log.exception("taking over partitions failed, begun again")
                await asyncio.sleep(RETRY_S)

    async def _take(self, keys: frozenset[Key]) -> None:
        since = time.monotonic()
        stored = await self._committed(keys)
        if self._lapsed and self._former_lease_s and _unclean(stored, keys - self._book.keys):
            log.info("waiting %.1f s: whoever had this static member id may still end jobs", self._former_lease_s)
            await asyncio.sleep(self._former_lease_s)
            stored = await self._committed(keys)
        self._lapsed = False
        await self._compare(keys)
        # A value that is not ours means that somebody owned the partition in between, and ended jobs of it.
        self._let_go({key for key in self._book.keys if not self._book.known(key, stored[key])})
        if self._barred:
            self._barred = False
            lost, self._lost = self._lost, set()
            self._call(self._outlet.release, lost)
        kept = self._book.keys
        for key in kept:
            self._consumer().seek(TopicPartition(*key), self._book.position(key))
        self._apply(kept)
        self._committer.open()
        self.joined = True
        fresh = keys - kept
        recalling = self._remember(frozenset(number for _, number in fresh))
        deadline: float | None = None if fresh else since + STATUS_S
        while fresh or self._book.unsettled():
            try:
                async with LogReader(self._settings) as reader:
                    bounds = await reader.bounds(fresh)
                    for key in sorted(fresh):
                        self._book.take(key, None if key in self._anew else stored[key], *bounds[key])
                    self._anew -= fresh
                    fresh = frozenset()
                    self._committer.wake()
                    if deadline is None:
                        deadline = time.monotonic() + STATUS_S
                    await self._settle(reader, deadline)
            except Exception as error:
                log.warning("partitions not taken over yet, tried again: %r", error)
                if deadline is not None and time.monotonic() > deadline:
                    log.error("status topic not read within %.0f s; what it would have told runs again", STATUS_S)
                    for number in self._book.unsettled():
                        self._book.settled(number, None)
                else:
                    await asyncio.sleep(RETRY_S)
        taken = keys - kept
        if recalling is not None:
            await asyncio.wait({recalling})
        for key in taken:
            self._consumer().seek(TopicPartition(*key), self._book.position(key))
        self._apply(keys)
        if taken:
            log.info(
                "took over %d partitions in %.3f s, %d of them after an unclean end; kept %d",
                len(taken),
                time.monotonic() - since,
                sum(self._book.is_careful(key) for key in taken),
                len(kept),
            )

    async def _committed(self, keys: frozenset[Key]) -> dict[Key, Commit | None]:
        while True:
            try:
                return await self._offsets.committed(keys)
            except Exception as error:
                log.warning("committed offsets not read, tried again: %r", error)
                await asyncio.sleep(RETRY_S)

    def _remember(self, numbers: frozenset[int]) -> asyncio.Future[None] | None:
        """What ended there lately is read beside the rest; the wait for it is short, however much it is (R7)."""
        return asyncio.ensure_future(self._recall(numbers)) if self._recall is not None and numbers else None

    async def _settle(self, reader: LogReader, deadline: float) -> None:
        starts = self._book.unsettled()
        ended = 0

        def tell(origin: Place, status_offset: int, at_ms: int) -> None:
            nonlocal ended
            ended += self._book.settle(origin, status_offset, at_ms)

        ends = await reader.ended(self._status_topic, starts, tell, deadline)
        for number, end in ends.items():
            self._book.settled(number, end)
        if ended:
            log.info("the status topic settled %d records that had ended without being committed", ended)

    async def _compare(self, keys: frozenset[Key]) -> None:
        """Finds topics that were made again since we had partitions of them."""
        if self._topic_ids is None or not keys:
            return
        try:
            ids = await self._topic_ids({topic for topic, _ in keys})
        except Exception as error:
            log.warning("topic ids not read, taken for the former ones: %r", error)
            return
        anew = {topic for topic, found in ids.items() if self._known.get(topic, found) != found}
        if anew:
            log.warning("deleted and made again, read from the start topics=%s", ",".join(sorted(anew)))
            self._part({key for key in self._book.keys if key[0] in anew})
            self._anew |= {key for key in keys if key[0] in anew}
        self._known.update(ids)

    def _gone(self, keys: Iterable[Key]) -> set[Key]:
        """Those whose topic the client does not find any more."""
        return {key for key in keys if not self._consumer().partitions_for_topic(key[0])}

    def _part(self, keys: set[Key]) -> None:
        """From partitions that nobody has any more. What is not due yet cannot be fetched again: let go."""
        timed = {key for key in keys if key[0] in self._book.timed}
        self._let_go(timed)
        self._book.detach(keys - timed)

    def _let_go(self, lost: Iterable[Key]) -> None:
        gone = set(lost)
        if not gone:
            return
        self._book.drop(gone)
        if self._barred:
            self._lost |= gone
        self._call(self._reception.abandon, gone)

    def _call(self, outwards: Callable[[set[Key]], None], keys: set[Key]) -> None:
        """Another room's failure must not leave partitions paused for ever."""
        try:
            outwards(keys)
        except Exception:
            log.exception("%r failed for %s", outwards, sorted(keys))


def _unclean(stored: Mapping[Key, Commit | None], keys: Iterable[Key]) -> bool:
    """Whether the last owner of one of these partitions has not stopped, as far as it told. Without a commit nobody has
    had a lease."""
    return any((commit := stored[key]) is not None and not decode(commit).clean for key in keys)
