"""The committer: one commit at a time, the gate, the lease, flushes, slices, and the last commit's care."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping

from service.job import Place, Ticket
from service.ledger import Book, Commit, Committer, Evicted, Key, MetadataTooLarge
from service.ledger.committer import SLICE_BYTES, slices
from service.ledger.metadata import decode
from service.settings import LEASE_MARGIN_S

KEY = ("jobs", 0)


class Store:
    """An offset store in memory. `held`: commits wait until it is set; `failure`: raised by the next one."""

    def __init__(self) -> None:
        self.values: dict[Key, Commit] = {}
        self.calls: list[dict[Key, Commit]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.held = asyncio.Event()
        self.held.set()
        self.failure: Exception | None = None
        self.largest = 10_000

    async def commit(self, commits: Mapping[Key, Commit]) -> None:
        self.calls.append(dict(commits))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            await self.held.wait()
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            if any(len(commit.metadata) > self.largest for commit in commits.values()):
                raise MetadataTooLarge("too large")
            self.values.update(commits)
        finally:
            self.at_once -= 1

    async def committed(self, keys: Collection[Key]) -> dict[Key, Commit | None]:
        return {key: self.values.get(key) for key in keys}


class Scene:
    def __init__(self, interval_s: float = 60.0) -> None:
        self.store = Store()
        self.leases: list[float] = []
        self.book = Book(high=1000, max_span=32_768)
        self.book.take(KEY, None, 0, 100_000)
        self.book.settled(0, 0)
        self.committer = Committer(self.book, self.store, self.leases.append, interval_s=interval_s)

    def read(self, offset: int) -> Ticket:
        ticket = self.book.register(Place(*KEY, offset))
        assert ticket is not None
        return ticket


async def until(condition: object, what: str, seconds: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


async def test_commits_every_interval_whether_anything_changed_or_not() -> None:
    scene = Scene(interval_s=0.02)
    scene.committer.start()
    scene.committer.open()
    await until(lambda: len(scene.leases) >= 4, "four commits")
    await scene.committer.stop()
    assert scene.leases == sorted(scene.leases)


async def test_the_lease_counts_from_the_start_of_the_commit() -> None:
    scene = Scene()
    scene.committer.open()
    scene.store.held.clear()
    before = time.monotonic()
    commit = asyncio.create_task(scene.committer.run_once())
    await asyncio.sleep(0.1)
    started_before = time.monotonic() - 0.05
    scene.store.held.set()
    assert await commit
    assert before + 10.0 - LEASE_MARGIN_S <= scene.leases[0] < started_before + 10.0 - LEASE_MARGIN_S


async def test_a_failed_commit_gives_no_lease() -> None:
    scene = Scene()
    scene.committer.open()
    scene.store.failure = OSError("broker away")
    assert not await scene.committer.run_once()
    assert scene.leases == []
    assert await scene.committer.run_once()
    assert len(scene.leases) == 1


async def test_no_commit_while_the_gate_is_closed() -> None:
    scene = Scene()
    assert not await scene.committer.run_once()
    scene.committer.open()
    scene.committer.close()
    assert not await scene.committer.run_once()
    assert not await scene.committer.flush(0.1)
    assert scene.store.calls == []


async def test_after_a_refusal_not_even_the_last_commit_until_the_next_assignment() -> None:
    scene = Scene()
    scene.committer.open()
    scene.store.failure = Evicted("another generation")
    assert not await scene.committer.run_once()
    assert scene.committer.evicted
    assert not await scene.committer.run_once()
    assert not await scene.committer.hand_over(clean=True, deadline_s=1.0)
    assert len(scene.store.calls) == 1
    scene.committer.open()
    assert await scene.committer.run_once()


async def test_never_two_commits_at_a_time_and_the_last_one_waits_for_the_one_in_flight() -> None:
    scene = Scene(interval_s=0.001)
    scene.committer.start()
    scene.committer.open()
    scene.store.held.clear()
    flushes = [asyncio.create_task(scene.committer.flush()) for _ in range(5)]
    await until(lambda: scene.store.at_once == 1, "a commit in flight")
    await scene.committer.stop()
    last = asyncio.create_task(scene.committer.hand_over(clean=True, deadline_s=5.0))
    await asyncio.sleep(0.02)
    scene.store.held.set()
    assert await last
    assert scene.store.most_at_once == 1
    assert len(scene.store.calls) == 2
    assert decode(scene.store.values[KEY]).clean
    assert not any(await asyncio.gather(*flushes))


async def test_a_late_commit_is_dropped_at_the_deadline_of_the_last_one() -> None:
    scene = Scene()
    scene.committer.open()
    scene.store.held.clear()
    commit = asyncio.create_task(scene.committer.run_once())
    await until(lambda: scene.store.at_once == 1, "a commit in flight")
    before = time.monotonic()
    assert not await scene.committer.hand_over(clean=True, deadline_s=0.1)
    assert time.monotonic() - before < 1.0
    assert scene.store.at_once == 0
    assert not await commit


async def test_a_flush_is_true_only_after_a_commit_that_began_later() -> None:
    scene = Scene()
    scene.committer.start()
    scene.committer.open()
    await until(lambda: scene.leases, "the first commit")
    scene.store.held.clear()
    first = asyncio.create_task(scene.committer.flush())
    await until(lambda: scene.store.at_once == 1, "a commit in flight")
    ticket = scene.read(0)
    scene.book.start(ticket)
    second = asyncio.create_task(scene.committer.flush())
    await asyncio.sleep(0)
    scene.store.held.set()
    assert await first
    assert await second
    assert decode(scene.store.values[KEY]).unfinished == {0: 1}
    assert len(scene.store.calls) == 3
    await scene.committer.stop()


async def test_the_last_commit_leaves_alone_what_another_worker_wrote() -> None:
    other = Scene()
    for lower in (False, True):
        scene = Scene()
        scene.committer.open()
        for n in range(3):
            scene.book.complete(scene.read(n))
        assert await scene.committer.run_once()
        theirs = other.book.commits()[KEY]
        scene.store.values[KEY] = theirs if lower else theirs._replace(offset=3)
        scene.book.complete(scene.read(3))
        assert not await scene.committer.hand_over(clean=True, deadline_s=1.0)
        assert scene.store.values[KEY] != scene.book.commits(clean=True)[KEY]
        assert len(scene.store.calls) == 1


async def test_the_last_commit_writes_over_its_own_and_over_what_it_took_over() -> None:
    former = Scene()
    former.book.complete(former.read(0))
    stored = former.book.commits()[KEY]
    scene = Scene()
    scene.store.values[KEY] = stored
    scene.book.take(KEY, stored, 0, 10)
    assert await scene.committer.hand_over(clean=True, deadline_s=1.0)
    assert decode(scene.store.values[KEY]).clean
    assert await scene.committer.hand_over(clean=True, deadline_s=1.0)


async def test_a_broker_with_a_smaller_metadata_limit_gets_less() -> None:
    scene = Scene()
    scene.store.largest = 200
    for n in range(0, 1800, 2):
        scene.read(n)
    scene.committer.start()
    scene.committer.open()
    await until(lambda: scene.leases, "a commit that fits")
    await scene.committer.stop()
    told = decode(scene.store.values[KEY])
    assert told.watermark == 0
    assert 50 < len(told.unfinished) < 200
    assert told.next <= 2 * len(told.unfinished)  # what did not fit is read again


def test_slices_stay_below_the_limit_and_keep_a_number_together() -> None:
    commits = {(topic, n): Commit(0, "ÿ" * 4096) for topic in ("a", "b", "c") for n in range(48)}
    parts = list(slices(commits))
    assert sum(len(part) for part in parts) == len(commits)
    for part in parts:
        assert sum(len(c.metadata.encode()) for c in part.values()) <= SLICE_BYTES
    order = [key[1] for part in parts for key in part]
    assert order == sorted(order)
