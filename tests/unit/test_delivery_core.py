"""The core against a producer that fails on command: order of effects, R5 and R9, without a broker."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from aiokafka.errors import MessageSizeTooLargeError, RequestTimedOutError

from schemas.names import DEAD_LETTERS, USAGE, status_topic
from service.delivery.blobs import Blobs
from service.delivery.core import Core
from service.delivery.gate import Gate
from service.frames import (
    Barrier,
    BarrierDone,
    Broken,
    Dead,
    Delta,
    Deltas,
    End,
    Ended,
    Lease,
    Open,
    Release,
    Timing,
    Usage,
    Vanished,
)
from service.settings import Settings
from tests.unit.test_delivery_gather import head

REPLIES = "r"
STATUS = status_topic("default")


class Batch:
    """Stands for aiokafka's batch builder."""

    def __init__(self) -> None:
        self.records: list[tuple[bytes | None, bytes | None, list[Any]]] = []

    def append(self, *, timestamp: int, key: bytes | None, value: bytes | None, headers: list[Any]) -> object | None:
        if self.records and sum(len(v or b"") for _, v, _ in self.records) + len(value or b"") > 256 * 1024:
            return None
        self.records.append((key, value, headers))
        return self

    def close(self) -> None: ...


class Producer:
    """Acknowledges at once, unless told to hold or to fail batches of a topic."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int, bytes | None, bytes | None]] = []
        self.fail: deque[Exception] = deque()  # the next batches of the reply topic
        self.hold: asyncio.Event | None = None
        self.held = {REPLIES}  # topics whose batches wait for `hold`
        self.limit = 1 << 30
        self.client = self

    def create_batch(self) -> Batch:
        return Batch()

    async def send_batch(self, batch: Batch, topic: str, *, partition: int) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if topic in self.held and self.hold is not None:
            await self.hold.wait()
        if any(len(value or b"") > self.limit for _, value, _ in batch.records) and topic == REPLIES:
            future.set_exception(MessageSizeTooLargeError())
        elif topic == REPLIES and self.fail:
            future.set_exception(self.fail.popleft())
        else:
            base = sum(1 for t, p, _, _ in self.written if (t, p) == (topic, partition))
            self.written += [(topic, partition, key, value) for key, value, _ in batch.records]
            future.set_result(type("Metadata", (), {"offset": base}))
        return future

    # metadata: every topic exists, but for those that begin with "no"

    async def fetch_all_metadata(self) -> Producer:
        return self

    async def force_metadata_update(self) -> bool:
        return True

    async def partitions_for(self, topic: str) -> set[int]:
        return {0}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return None if topic.startswith("no") else {0}

    def leader_for_partition(self, place: Any) -> int | None:
        return None if place.topic.startswith("no") else 0

    def set_topics(self, topics: list[str]) -> None: ...

    async def stop(self) -> None: ...


class Store:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes, content_type: str = "", ttl_days: int | None = None) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        self.held[key] = data
        return {"bucket": "outputs", "key": key, "size": len(data), "sha256": "0" * 64}


class Tracer:
    def __init__(self) -> None:
        self.spans: list[tuple[Any, ...]] = []

    def ended(self, *what: Any) -> None:
        self.spans.append(what)

    def unanswered(self, record: Any) -> None:
        self.spans.append((record,))

    def traceparent(self, *_: object) -> str:
        return "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


class Desk:
    def __init__(self) -> None:
        self.settings = Settings()
        self.replied: list[Any] = []
        self.store, self.tracer, self.producer = Store(), Tracer(), Producer()
        self.core = Core(self.settings, Blobs(self.settings.store, self.store), self.tracer, self.replied.append)
        self.core.replies._producer = self.producer  # type: ignore[assignment]
        for topic in (STATUS, USAGE, DEAD_LETTERS, REPLIES):
            self.core.replies._counts[topic] = 1

    def lease(self, seconds: float = 60.0) -> None:
        self.core.receive([Lease(time.monotonic() + seconds)])

    def open(self, stream: int, /, **changes: Any) -> None:
        changes.setdefault("job_id", f"job-{stream}")
        attempt = f"{stream:026d}"
        self.core.receive(
            [
                Open(
                    stream=stream,
                    head=head(**changes),
                    attempt=attempt,
                    number=1,
                    announce=True,
                    prompt_tokens=3,
                    at=time.time(),
                )
            ]
        )

    def send(self, stream: int, *texts: str) -> None:
        self.core.receive([Deltas(stream, [Delta(0, text, 1)]) for text in texts])

    def end(self, stream: int, kind: str = "completed", tokens: int = 1, dead: Dead | None = None) -> None:
        self.core.receive(
            [End(stream=stream, kind=kind, usage=Usage(3, tokens), timing=Timing(time.time()), dead=dead)]
        )

    def events(self, stream: int) -> list[dict[str, Any]]:
        key = f"job-{stream}".encode()
        return [orjson.loads(v) for t, _, k, v in self.producer.written if t == REPLIES and k == key and v]

    def order(self) -> list[str]:
        """What was written, in order: event types, or the topic."""
        return [
            orjson.loads(value)["type"] if topic == REPLIES and value else topic
            for topic, _, _, value in self.producer.written
        ]

    def got(self, kind: type) -> list[Any]:
        return [frame for frame in self.replied if isinstance(frame, kind)]

    async def until(self, condition: Any, what: str = "") -> None:
        end = time.monotonic() + 8
        while not condition():
            assert time.monotonic() < end, what
            await asyncio.sleep(0.002)

    async def still(self, seconds: float = 0.1) -> None:
        """Time for whatever must not happen."""
        await asyncio.sleep(seconds)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    desk.lease()
    yield desk
    await desk.core.replies.stop()


def test_the_gate_opens_by_lease_and_closes_by_time_or_barrier() -> None:
    gate = Gate()
    assert not gate.open(0.0)
    gate.lease(10.0)
    assert gate.open(9.9) and not gate.open(10.0)
    gate.close(1)
    assert not gate.open(1.0)
    gate.close(2)
    assert not gate.release(1) and not gate.open(1.0)
    assert gate.release(2) and gate.open(1.0)


def letter() -> Dead:
    return Dead(
        topic="t", partition=0, offset=1, epoch=1, key=b"k", value=b"v", headers=[], origin="t/0/1", code="x",
        message="m", attempts=1, at=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("topic", [REPLIES, USAGE, STATUS, DEAD_LETTERS])
async def test_an_end_is_reported_only_when_each_of_its_records_is_acknowledged(desk: Desk, topic: str) -> None:
    desk.producer.hold, desk.producer.held = asyncio.Event(), {topic}
    desk.open(1)
    desk.send(1, "a")
    desk.end(1, dead=letter())
    await desk.still()
    assert not desk.got(Ended)
    desk.producer.hold.set()
    await desk.until(lambda: desk.got(Ended))


async def test_records_are_written_in_the_order_of_effects(desk: Desk) -> None:
    dead = letter()
    desk.open(1, store="always")
    desk.send(1, "a")
    await desk.until(lambda: len(desk.events(1)) == 2)
    desk.send(1, "b")
    desk.end(1, tokens=2, dead=dead)
    await desk.until(lambda: desk.got(Ended))
    assert desk.order() == ["started", "chunk", DEAD_LETTERS, "chunk", "completed", USAGE, STATUS] or desk.order() == [
        "started", "chunk", DEAD_LETTERS, USAGE, "chunk", "completed", STATUS,
    ]  # fmt: skip
    assert len(desk.store.held) == 1
    assert desk.events(1)[-1]["output"]["key"] in desk.store.held
    assert desk.got(Ended)[0].stored
    assert len(desk.tracer.spans) == 1
    assert desk.core.unacknowledged == 0


async def test_a_failed_chunk_ends_the_attempt_and_takes_back_what_is_queued_behind_it(desk: Desk) -> None:
    desk.producer.hold = asyncio.Event()
    desk.producer.fail.append(RequestTimedOutError())
    desk.open(1)
    await desk.still(0.02)  # `started` is in flight
    desk.send(1, "a")
    desk.end(1)
    desk.open(2)  # only queued while the batch fails: it lives on
    desk.producer.hold.set()
    await desk.until(lambda: desk.got(Broken))
    assert [b.stream for b in desk.got(Broken)] == [1]
    await desk.until(lambda: desk.events(2))
    assert desk.events(1) == []
    desk.send(2, "b")
    desk.end(2)
    await desk.until(lambda: desk.got(Ended))
    assert [e["seq"] for e in desk.events(2)] == [0, 1, 2]
    assert desk.core.unacknowledged == 0
    assert not [v for t, _, _, v in desk.producer.written if t == STATUS and b"job-1" in v]


async def test_a_terminal_is_sent_again_byte_for_byte_until_it_is_acknowledged(desk: Desk) -> None:
    desk.open(1)
    desk.send(1, "a")
    await desk.until(lambda: len(desk.events(1)) == 2)
    seen: list[list[bytes | None]] = []
    send = desk.producer.send_batch

    async def watched(batch: Batch, topic: str, *, partition: int) -> asyncio.Future[Any]:
        if topic == REPLIES:
            seen.append([value for _, value, _ in batch.records])
        return await send(batch, topic, partition=partition)

    desk.producer.send_batch = watched  # type: ignore[method-assign]
    desk.producer.fail.extend([RequestTimedOutError(), RequestTimedOutError()])
    desk.end(1)
    await desk.until(lambda: desk.got(Ended))
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]
    assert desk.got(Broken) == []
    assert [e["type"] for e in desk.events(1)] == ["started", "chunk", "completed"]


async def test_a_closed_gate_keeps_everything_in_one_buffer(desk: Desk) -> None:
    desk.open(1)
    desk.send(1, "a")
    await desk.until(lambda: len(desk.events(1)) == 2)
    desk.core.receive([Barrier(1)])
    assert [b.number for b in desk.got(BarrierDone)] == [1]
    for _ in range(500):
        desk.send(1, "b")
    desk.end(1, tokens=501)
    await desk.still()
    assert len(desk.events(1)) == 2
    desk.core.receive([Release(1, [])])
    await desk.until(lambda: desk.got(Ended))
    assert [e["type"] for e in desk.events(1)] == ["started", "chunk", "chunk", "completed"]
    assert desk.events(1)[2]["tokens"] == 500


async def test_a_barrier_waits_for_flights_and_their_status(desk: Desk) -> None:
    desk.producer.hold = asyncio.Event()
    desk.open(1, stream=False)
    desk.send(1, "a")
    desk.end(1)
    await desk.still(0.02)
    desk.core.receive([Barrier(7)])
    await desk.still()
    assert desk.got(BarrierDone) == []
    desk.producer.hold.set()
    await desk.until(lambda: desk.got(BarrierDone))
    kinds = [type(frame) for frame in desk.replied if isinstance(frame, Ended | BarrierDone)]
    assert kinds == [Ended, BarrierDone]


async def test_a_barrier_is_answered_after_a_second_at_the_latest(desk: Desk) -> None:
    desk.producer.hold = asyncio.Event()
    desk.open(1)
    await desk.still(0.02)
    begin = time.monotonic()
    desk.core.receive([Barrier(7)])
    await desk.until(lambda: desk.got(BarrierDone))
    assert 0.9 < time.monotonic() - begin < 1.5
    desk.producer.hold.set()


async def test_a_lost_partition_abandons_without_a_gap_in_the_numbers(desk: Desk) -> None:
    desk.open(1)
    desk.send(1, "a")
    await desk.until(lambda: len(desk.events(1)) == 2)
    desk.producer.hold = asyncio.Event()
    desk.open(2, partition=3)
    await desk.still(0.02)  # a batch flies; the terminal of 1 waits in the lane behind it
    desk.end(1)
    await desk.still(0.02)
    desk.core.receive([Barrier(1), Release(1, [("inference.default.jobs.standard", 0)])])
    desk.producer.hold.set()
    await desk.until(lambda: len(desk.events(1)) == 3)
    assert [(e["type"], e["seq"]) for e in desk.events(1)][-1] == ("abandoned", 2)
    desk.send(2, "kept")
    desk.end(2)
    await desk.until(lambda: desk.got(Ended))
    assert [e.stream for e in desk.got(Ended)] == [2]
    assert desk.core.unacknowledged == 0


async def test_a_lease_that_runs_out_stops_what_is_queued(desk: Desk) -> None:
    desk.lease(0.05)
    desk.open(1)
    await desk.until(lambda: len(desk.events(1)) == 1)
    await desk.still(0.06)
    desk.send(1, "late")
    await desk.still()
    assert len(desk.events(1)) == 1
    desk.lease()
    await desk.until(lambda: len(desk.events(1)) == 2)


async def test_an_output_over_the_topics_limit_becomes_output_too_large(desk: Desk) -> None:
    desk.producer.limit = 4000
    desk.open(1, stream=False)
    desk.send(1, *("word " * 100 for _ in range(10)))
    desk.end(1, tokens=10)
    await desk.until(lambda: desk.got(Ended))
    assert [(e["type"], e["seq"]) for e in desk.events(1)] == [("started", 0), ("failed", 1)]
    assert desk.events(1)[1]["error"]["code"] == "output_too_large"
    assert desk.got(Ended)[0].kind == "failed"
    assert len([t for t, *_ in desk.producer.written if t == USAGE]) == 1


async def test_a_topic_that_takes_no_chunk_ends_undeliverable(desk: Desk) -> None:
    desk.producer.limit = 100
    desk.open(1)
    await desk.until(lambda: desk.got(Vanished))
    desk.send(1, "ignored")
    desk.end(1, "completed")  # the runner's, too late
    desk.end(1, "undeliverable")
    await desk.until(lambda: desk.got(Ended))
    assert desk.got(Ended)[0].kind == "undeliverable"
    status = orjson.loads(next(v for t, _, _, v in desk.producer.written if t == STATUS and v))
    assert (status["kind"], status["terminal"]) == ("undeliverable", None)


async def test_a_missing_topic_vanishes_after_one_bounded_wait(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.delivery.replies.METADATA_WAIT_S", 0.3)
    desk.open(1, reply_topic="none")
    desk.send(1, "a")
    await desk.still(0.2)
    assert desk.got(Vanished) == []
    await desk.until(lambda: desk.got(Vanished))


async def test_a_crowded_lane_makes_chunks_larger_not_more(desk: Desk) -> None:
    desk.open(1)
    desk.send(1, "a")
    await desk.until(lambda: len(desk.events(1)) == 2)
    desk.producer.hold = asyncio.Event()
    for _ in range(100):
        desk.send(1, "x" * 5000)  # each over the flush limit
    held = desk.core.unacknowledged
    assert held > 450_000
    await desk.still(0.02)
    desk.producer.hold.set()
    desk.end(1, tokens=101)
    await desk.until(lambda: desk.got(Ended))
    chunks = [e for e in desk.events(1) if e["type"] == "chunk"]
    assert len(chunks) < 70
    assert sum(e["tokens"] for e in chunks) == 101
    assert desk.core.unacknowledged == 0


async def test_the_end_of_the_worker_drops_what_is_unfinished(desk: Desk) -> None:
    desk.producer.hold = asyncio.Event()
    desk.open(1)
    desk.open(2)
    desk.send(1, "a")
    desk.send(2, "a")
    desk.end(1)
    desk.core.drop_unfinished()
    assert desk.core.unsettled == 1
    desk.producer.hold.set()
    await desk.until(lambda: desk.core.unsettled == 0)
    assert [e.stream for e in desk.got(Ended)] == [1]
    assert desk.core.unacknowledged == 0


async def test_output_that_cannot_be_written_fails_its_job_alone(desk: Desk) -> None:
    desk.open(1)
    desk.open(2)
    desk.core.receive([Deltas(1, [Delta(0, "x", 1, logprobs={"content": [{"logprob": 1 << 70}]})])])
    desk.send(2, "x")
    desk.end(2)
    await desk.until(lambda: len(desk.got(Ended)) == 2)
    assert [e["type"] for e in desk.events(1)] == ["started", "failed"]
    assert [e["type"] for e in desk.events(2)] == ["started", "chunk", "completed"]
    desk.open(3, stream=False)
    desk.core.receive([Deltas(3, [Delta(0, "x", 1, logprobs={"content": [{"logprob": 1 << 70}]})])])
    desk.end(3)
    await desk.until(lambda: len(desk.got(Ended)) == 3)
    assert [e["type"] for e in desk.events(3)] == ["started", "failed"]
    assert desk.core.unacknowledged == 0
