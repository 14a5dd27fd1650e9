"""The rebalance listener on fakes: what must not happen between losing partitions and reading them (R4, R5, R18)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest
from aiokafka.structs import TopicPartition

from consumers import rebalance as room
from consumers.rebalance import Rebalance
from service.job import Place
from service.ledger import Book, Commit, Committer, Key
from service.ledger.metadata import decode
from service.settings import KafkaSettings
from tests.unit.test_ledger_committer import Store

KEY = ("jobs", 0)
TP = TopicPartition(*KEY)
LEASE_S = 0.3


class Reader:
    """The logs: everything is there, and the status topic tells nothing."""

    def __init__(self, *_: Any) -> None: ...

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def bounds(self, keys: Collection[Key]) -> dict[Key, tuple[int, int]]:
        return dict.fromkeys(keys, (0, 1000))

    async def ended(self, topic: str, starts: dict[int, int], tell: Any, deadline: float) -> dict[int, int]:
        return dict.fromkeys(starts, 0)


class Scene:
    """A member of a group, its offset store and its delivery; `order` is what happened."""

    def __init__(self, former_lease_s: float = 0.0) -> None:
        self.order: list[str] = []
        self.generation = 1
        self.gone: set[str] = set()
        self.ids: dict[str, bytes] = {"jobs": b"1"}
        self.store = Store()
        self.book = Book(high=100, max_span=1000)
        self.committer = Committer(self.book, self.store, lambda until: None, interval_s=60.0)
        self.while_barred: Callable[[], Any] | None = None
        self._coordinator = self  # of the consumer, with its generation
        self.rebalance = Rebalance(
            KafkaSettings(),
            "status",
            book=self.book,
            committer=self.committer,
            offsets=self,
            reception=self,  # type: ignore[arg-type]
            outlet=self,
            consumer=lambda: self,
            apply=self._apply,
            topic_ids=self._ids,
            former_lease_s=former_lease_s,
        )

    async def _ids(self, topics: Iterable[str]) -> dict[str, bytes]:
        return {topic: self.ids[topic] for topic in topics if topic in self.ids}

    def _apply(self, keys: Iterable[Key]) -> None:
        if keys:
            self.order.append("resume")

    # offsets

    async def commit(self, commits: Mapping[Key, Commit]) -> None:
        await self.store.commit(commits)

    async def committed(self, keys: Collection[Key]) -> dict[Key, Commit | None]:
        self.order.append("read committed")
        return await self.store.committed(keys)

    # consumer

    def pause(self, *_: TopicPartition) -> None:
        self.order.append("pause")

    def partitions_for_topic(self, topic: str) -> set[int]:
        return set() if topic in self.gone else {0}

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.order.append(f"seek {offset}")

    # reception and outlet

    def abandon(self, lost: set[Key]) -> None:
        self.order.append("abandon")

    def lease(self, until: float) -> None: ...

    async def barrier(self) -> None:
        self.order.append("barrier")
        if self.while_barred is not None:
            await self.while_barred()

    def release(self, lost: set[Key]) -> None:
        self.order.append(f"release {len(lost)}")

    async def assigned(self, *tps: TopicPartition) -> None:
        await self.rebalance.on_partitions_assigned(set(tps))
        taking = self.rebalance._taking
        if taking is not None:
            async with asyncio.timeout(5):
                await taking


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LogReader", Reader)


async def test_partitions_stand_still_until_what_is_committed_and_ended_there_is_known() -> None:
    scene = Scene()
    scene.store.values[KEY] = Commit(7, "")
    await scene.assigned(TP)
    assert scene.order == ["pause", "read committed", "seek 7", "resume"]
    assert scene.rebalance.joined and await scene.committer.run_once()


async def test_from_the_revoked_callback_on_there_is_one_commit_and_it_comes_after_the_barrier() -> None:
    scene = Scene()
    await scene.assigned(TP)
    ticket = scene.book.register(Place(*KEY, 0))
    assert ticket is not None
    tried: list[bool] = []

    async def meanwhile() -> None:
        """The committer's second comes round, and something ends."""
        tried.append(await scene.committer.run_once())
        assert scene.book.complete(ticket)

    scene.while_barred = meanwhile
    await scene.rebalance.on_partitions_revoked({TP})
    assert tried == [False] and len(scene.store.calls) == 1
    told = decode(scene.store.values[KEY])
    assert told.watermark == 1 and told.clean  # what ended during the barrier is in it
    assert not await scene.committer.run_once()
    assert not scene.rebalance.joined


async def test_a_barrier_ends_when_it_is_known_what_is_lost_and_not_before() -> None:
    scene = Scene()
    await scene.assigned(TP)
    await scene.rebalance.on_partitions_revoked({TP})
    scene.order.clear()
    await scene.assigned()
    assert scene.order == ["pause", "abandon", "read committed", "release 1"]
    assert not scene.book.keys


async def test_a_kept_partition_that_another_worker_wrote_to_is_given_up_and_taken_anew() -> None:
    scene = Scene()
    await scene.assigned(TP)
    assert await scene.committer.run_once()
    await scene.rebalance.on_partitions_revoked({TP})
    scene.store.values[KEY] = Commit(5, "")
    scene.order.clear()
    await scene.assigned(TP)
    assert scene.order == ["pause", "read committed", "abandon", "release 1", "seek 5", "resume"]


def left_behind(clean: bool) -> Commit:
    """What a worker wrote that had the partition before."""
    book = Book(high=100, max_span=1000)
    book.take(KEY, None, 0, 1000)
    book.settled(0, 0)
    return book.commits(clean=clean)[KEY]


@pytest.mark.parametrize(
    ("former_lease_s", "before", "waits"),
    [
        (LEASE_S, left_behind(clean=False), True),
        (LEASE_S, left_behind(clean=True), False),  # it has stopped
        (LEASE_S, None, False),  # nobody has had a lease
        (0.0, left_behind(clean=False), False),  # no static member: its session has run out
    ],
)
async def test_a_successor_by_static_id_waits_until_its_predecessors_lease_is_over(
    former_lease_s: float, before: Commit | None, waits: bool
) -> None:
    scene = Scene(former_lease_s)
    if before is not None:
        scene.store.values[KEY] = before
    began = time.monotonic()
    await scene.assigned(TP)
    assert (time.monotonic() - began >= LEASE_S) is waits
    assert scene.order.count("read committed") == 1 + waits  # what it did meanwhile counts


async def test_only_a_membership_that_lapsed_makes_it_wait_again() -> None:
    scene = Scene(LEASE_S)
    await scene.assigned()
    other = TopicPartition("jobs", 1)
    for lapsed in (False, True):
        scene.generation = -1 if lapsed else 5
        await scene.rebalance.on_partitions_revoked(set())
        scene.store.values["jobs", 1] = left_behind(clean=False)
        began = time.monotonic()
        await scene.assigned(other)
        assert (time.monotonic() - began >= LEASE_S) is lapsed
        scene.generation = 5
        await scene.assigned()


async def test_what_runs_of_a_deleted_topic_goes_on_to_its_end_and_is_committed_no_more() -> None:
    scene = Scene()
    await scene.assigned(TP)
    ticket, second = scene.book.register(Place(*KEY, 0)), scene.book.register(Place(*KEY, 1))
    assert ticket is not None and second is not None
    scene.gone = {"jobs"}
    scene.order.clear()
    await scene.rebalance.on_partitions_revoked({TP})
    await scene.assigned()
    assert "abandon" not in scene.order and not scene.store.calls
    assert scene.book.owns(ticket) and scene.book.complete(ticket) and scene.book.complete(second)
    assert not scene.book.owns(ticket) and not scene.book.commits()


async def test_a_topic_made_again_is_read_from_its_start_while_what_ran_of_the_former_ends() -> None:
    """Also if a commit of the former got into the group's store under the same name."""
    scene = Scene()
    await scene.assigned(TP)
    ticket = scene.book.register(Place(*KEY, 7))
    assert ticket is not None and await scene.committer.run_once()
    scene.gone = {"jobs"}
    await scene.rebalance.on_partitions_revoked({TP})
    await scene.assigned()
    scene.gone, scene.ids = set(), {"jobs": b"2"}
    scene.store.values[KEY] = Commit(500, "")
    scene.order.clear()
    await scene.assigned(TP)
    assert scene.order[-2:] == ["seek 0", "resume"] and "abandon" not in scene.order
    again = scene.book.register(Place(*KEY, 7))
    assert again is not None and scene.book.owns(ticket)
    assert scene.book.complete(ticket, 3) and scene.book.owns(again)
    assert await scene.committer.run_once()
    assert scene.store.values[KEY].offset == 7


async def test_a_topic_made_again_before_the_client_looked_is_noticed_by_its_id() -> None:
    scene = Scene()
    await scene.assigned(TP)
    for offset in range(5):
        assert scene.book.complete(scene.book.register(Place(*KEY, offset)))  # type: ignore[arg-type]
    assert await scene.committer.run_once()
    await scene.rebalance.seen({"jobs": b"1"})
    scene.order.clear()
    scene.ids = {"jobs": b"2"}
    await scene.rebalance.seen(scene.ids)
    assert scene.rebalance._taking is not None
    await scene.rebalance._taking
    assert scene.order == ["pause", "read committed", "seek 0", "resume"]
    assert scene.book.register(Place(*KEY, 0)) is not None
    assert await scene.committer.run_once() and scene.store.values[KEY].offset == 0
    await scene.rebalance.seen(scene.ids)
    assert scene.rebalance._taking.done()


async def test_a_topic_that_is_still_there_takes_its_jobs_along() -> None:
    scene = Scene()
    await scene.assigned(TP)
    ticket = scene.book.register(Place(*KEY, 0))
    assert ticket is not None
    await scene.rebalance.on_partitions_revoked({TP})
    await scene.assigned()
    assert "abandon" in scene.order and not scene.book.owns(ticket)
