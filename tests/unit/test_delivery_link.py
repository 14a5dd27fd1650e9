"""The worker's side against a scripted peer: what is handed over when, and what a successor gets (R8, R9)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.delivery import link as link_module
from service.delivery import wire
from service.delivery.child import Listener
from service.delivery.gather import Gather
from service.delivery.handover import Handover
from service.delivery.link import Link
from service.delivery.lock import NameLock, NameTaken
from service.delivery.stream import COMPACT, Stream
from service.frames import (
    Barrier,
    BarrierDone,
    Broken,
    Dead,
    Delta,
    Deltas,
    End,
    Ended,
    Frame,
    Lease,
    Open,
    Pressure,
    Release,
    Timing,
    Usage,
    Vanished,
)
from service.job import Place, Record
from service.settings import DeliverySettings, Settings
from tests.unit.test_delivery_gather import folded, head


class Peer:
    """Stands for one life of the delivery process."""

    lives: list[Peer]

    def __init__(self, _: Settings, listener: Listener) -> None:
        self.listener = listener
        self.frames: list[Any] = []
        self.lists: list[float] = []
        self.gone = asyncio.Event()
        self.finished = False
        self.killed = False
        self.pid = len(Peer.lives)
        self.buffered = 0
        Peer.lives.append(self)

    async def start(self) -> None:
        self.listener.heard([Pressure(unacknowledged=0, counters={"connected": 1.0})])

    def write(self, payload: bytes) -> None:
        self.lists.append(time.monotonic())
        self.frames += wire.to_delivery.decode(payload)

    def finish(self) -> None:
        self.finished = True
        self.gone.set()

    def kill(self) -> None:
        self.killed = True
        self.gone.set()

    async def reap(self, timeout_s: float) -> bool:
        return True

    def of(self, kind: type) -> list[Any]:
        return [frame for frame in self.frames if type(frame) is kind]

    def attempts(self) -> dict[str, tuple[str, dict[int, Any], str | None]]:
        """Job → (attempt, what it was given, how it ended), the last attempt of each."""
        opened = {f.stream: f for f in self.of(Open)}
        found = {}
        for number, frame in opened.items():
            given = [d for f in self.of(Deltas) if f.stream == number for d in f.deltas]
            end = next((f.kind for f in self.of(End) if f.stream == number), None)
            found[frame.head.job_id] = (frame.attempt, folded(given), end)
        return found


@pytest.fixture
async def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Link]:
    Peer.lives = []
    monkeypatch.setattr(link_module, "Inline", Peer)
    monkeypatch.setattr(link_module, "RESTART_FIRST_S", 0.01)
    monkeypatch.setattr(link_module, "WATCH_S", 0.02)
    found: list[Ended] = []
    link = Link(Settings(state_dir=tmp_path, delivery=DeliverySettings(mode="inline")), found.append, lambda _: None)
    link.seen = found  # type: ignore[attr-defined]
    await link.start()
    yield link
    await link.stop(1.0)


async def until(condition: Any) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def open_(link: Link, job: str, **changes: Any) -> Stream:
    found = head(job_id=job, **changes)
    record = Record(Place(found.topic, found.partition, found.offset), b"k", b"v", (("h", b"1"),), 0)
    return link.open(found, announce=True, prompt_tokens=3, record=record)


def end(stream: Stream, kind: str = "completed") -> None:
    stream.end(kind, Usage(3, 2), Timing(time.time()))


def ended(stream: Stream, kind: str = "completed") -> Ended:
    h = stream.head
    return Ended(stream=stream.id, topic=h.topic, partition=h.partition, offset=h.offset, epoch=h.epoch, kind=kind)


async def test_deltas_go_in_lists_and_the_first_does_not_wait() -> None:
    interval = 0.5
    lists: list[list[Any]] = []
    handover = Handover(interval, lambda payload: lists.append(wire.to_delivery.decode(payload)), lambda _: True)
    handover.resume()
    stream = Stream(handover, head(), announce=True, prompt_tokens=1, number=1, record=None)
    begin = time.monotonic()
    stream.send([Delta(0, "first", 1)])
    await until(lambda: lists)
    assert time.monotonic() - begin < interval / 2
    for _ in range(50):
        stream.send([Delta(0, "x", 1)])
    assert len(lists) == 1  # nothing is written in the engine's turn
    await until(lambda: len(lists) == 2)
    assert len(lists[1]) == 50
    assert time.monotonic() - begin > interval
    stream.send([Delta(0, "x", 1)])
    stream.end("completed", Usage(), Timing(0.0))
    begin = time.monotonic()
    await until(lambda: len(lists) == 3)
    assert time.monotonic() - begin < interval / 2


async def test_a_successor_gets_every_running_stream_and_every_unacknowledged_end(link: Link) -> None:
    running, complete, done = (open_(link, name) for name in ("running", "complete", "done"))
    for stream in (running, complete, done):
        stream.send([Delta(0, "one", 1), Delta(1, "uno", 1)])
    end(complete)
    end(done)
    link.lease(123.0)
    await until(lambda: len(Peer.lives[0].of(End)) == 2)
    link.heard([ended(done)])
    before = {s: s.attempt for s in (running, complete)}
    Peer.lives[0].gone.set()
    running.send([Delta(0, "two", 1)])
    await until(lambda: len(Peer.lives) == 2 and len(Peer.lives[1].of(Open)) == 2)
    running.send([Delta(0, "three", 1, finish_reason="stop")])
    end(running)
    await until(lambda: len(Peer.lives[1].of(End)) == 2)
    peer = Peer.lives[1]
    assert peer.frames[0] == Lease(123.0)
    attempts = peer.attempts()
    assert set(attempts) == {"running", "complete"}
    assert attempts["running"][1][0][:2] == ("onetwothree", 3)
    assert attempts["complete"][1][1][:2] == ("uno", 1)
    assert (attempts["running"][2], attempts["complete"][2]) == ("completed", "completed")
    for stream, attempt in before.items():
        assert stream.attempt != attempt and stream.number == 2
    assert link.restarts == 1


async def test_a_broken_stream_goes_on_under_a_new_attempt(link: Link) -> None:
    peer = Peer.lives[0]
    broken, other = open_(link, "broken"), open_(link, "other")
    broken.send([Delta(0, "a", 1)])
    number, attempt, untouched = broken.id, broken.attempt, other.attempt
    await until(lambda: peer.of(Deltas))
    link.heard([Broken(number)])
    broken.send([Delta(0, "b", 1, finish_reason="stop")])
    end(broken)
    await until(lambda: peer.of(End))
    assert broken.attempt != attempt and broken.id != number
    assert peer.attempts()["broken"] == (broken.attempt, {0: ("ab", 2, "", {}, 0, "stop")}, "completed")
    assert other.attempt == untouched
    link.heard([Broken(number)])  # a second word about the old one changes nothing
    assert len(peer.of(Open)) == 3


async def test_dead_letters_are_kept_until_acknowledged(link: Link) -> None:
    dead = Dead(
        topic="t", partition=0, offset=5, epoch=1, key=b"k", value=b"v", headers=[("h", None)], origin="t/0/5",
        code="invalid_job", message="m", attempts=0, at=1.0,
    )  # fmt: skip
    link.dead(dead)
    Peer.lives[0].gone.set()
    await until(lambda: len(Peer.lives) == 2 and Peer.lives[1].of(Dead))
    assert Peer.lives[1].of(Dead)[0].headers == [("h", None)]
    assert not await link.flush(0.02)
    link.heard([Ended(stream=None, topic="t", partition=0, offset=5, epoch=1, kind="dead", status_offset=9)])
    assert await link.flush(1.0)
    assert link.seen[0].status_offset == 9  # type: ignore[attr-defined]


async def test_a_barrier_survives_its_process_and_never_hangs(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BARRIER_S", 0.2)
    begin = time.monotonic()
    await link.barrier()
    assert 0.15 < time.monotonic() - begin < 1.0
    Peer.lives[0].gone.set()
    await until(lambda: len(Peer.lives) == 2 and Peer.lives[1].of(Barrier))
    link.release(set())
    await until(lambda: Peer.lives[1].of(Release))
    assert Peer.lives[1].of(Release)[0].number == Peer.lives[1].of(Barrier)[0].number
    waiting = asyncio.create_task(link.barrier())
    await until(lambda: len(Peer.lives[1].of(Barrier)) == 2)
    link.heard([BarrierDone(Peer.lives[1].of(Barrier)[1].number)])
    await asyncio.wait_for(waiting, 0.15)


async def test_released_streams_are_silent(link: Link) -> None:
    lost, kept = open_(link, "lost", partition=3), open_(link, "kept")
    link.release({(lost.head.topic, 3)})
    for stream in (lost, kept):
        stream.send([Delta(0, "x", 1)])
        end(stream)
    await until(lambda: Peer.lives[0].of(End))
    assert [f.stream for f in Peer.lives[0].of(End)] == [kept.id]
    link.heard([ended(kept)])
    assert await link.flush(0.1)


async def test_a_vanished_topic_ends_the_stream_with_its_record(link: Link) -> None:
    peer = Peer.lives[0]
    running, complete = open_(link, "running"), open_(link, "complete")
    running.send([Delta(0, "x", 4)])
    end(complete)
    link.heard([Vanished(running.id, "gone"), Vanished(complete.id, "gone")])
    running.send([Delta(0, "y", 1)])
    end(running)
    await until(lambda: len(peer.of(End)) == 3)
    last = {f.stream: f for f in peer.of(End)}
    for stream in (running, complete):
        frame = last[stream.id]
        assert (frame.kind, frame.dead.value, frame.dead.code) == ("undeliverable", b"v", "reply_topic_refused")
    assert last[running.id].usage.completion == 4
    assert last[complete.id].usage.completion == 2


async def test_a_silent_peer_is_replaced(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "STUCK_S", 0.1)
    monkeypatch.setattr(link_module, "START_STUCK_S", 0.1)
    await until(lambda: len(Peer.lives) > 1)
    assert Peer.lives[0].killed


async def test_above_the_high_water_mark_deltas_gather_per_stream(link: Link) -> None:
    peer = Peer.lives[0]
    stream, other = open_(link, "a"), open_(link, "b")
    stream.send([Delta(0, "0", 1)])
    await until(lambda: peer.of(Deltas))
    link.full()
    for i in range(1000):
        stream.send([Delta(0, str(i % 10), 1)])
        other.send([Delta(0, "y", 1)])
    end(other)
    assert link.unacknowledged >= 1000
    await asyncio.sleep(0.05)
    assert len(peer.of(Deltas)) == 1
    assert len(stream.backlog) < 100
    link.roomy()
    await until(lambda: peer.of(End))
    assert len(peer.of(Deltas)) == 3
    assert peer.attempts()["a"][1][0][:2] == ("0" + "0123456789" * 100, 1001)
    assert peer.attempts()["b"] == (other.attempt, {0: ("y" * 1000, 1000, "", {}, 0, None)}, "completed")
    assert link.unacknowledged == 0


async def test_half_surrogates_never_break_a_list(link: Link) -> None:
    peer = Peer.lives[0]
    stream = open_(link, "a")
    for text in ("x\ud83d", "\ude00y", "\udc00", "z\ud83d"):
        stream.send([Delta(0, text, 1)])
        await asyncio.sleep(0.015)
    stream.send([Delta(0, "", 1, finish_reason="stop")])
    end(stream)
    await until(lambda: peer.of(End))
    assert peer.attempts()["a"][1][0][:2] == ("x😀y\ufffdz\ufffd", 5)
    link.heard([Broken(stream.id)])
    await until(lambda: len(peer.of(End)) == 2)
    assert peer.attempts()["a"][1][0][:2] == ("x😀y\ufffdz\ufffd", 5)


@pytest.mark.parametrize("over", ["ended", "released", "released before its list went out"])
async def test_half_a_pair_is_forgotten_with_its_stream(link: Link, over: str) -> None:
    stream = open_(link, "a", topic="gone")
    stream.send([Delta(0, "x\ud83d", 1)])
    if "before" not in over:
        await asyncio.sleep(0.03)
        assert link._handover._carried
    if over == "ended":
        end(stream, "cancelled")
    else:
        link.release({("gone", stream.head.partition)})
    await asyncio.sleep(0.03)
    assert not link._handover._carried  # else every later list would be looked through for it


async def test_a_life_that_fails_in_any_way_is_followed_by_another(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(peer: Peer) -> None:
        peer.listener.heard([Pressure(unacknowledged=0, counters={"connected": 1.0})])
        if len(Peer.lives) < 4:
            raise RuntimeError("no event loop, no memory, no luck")

    monkeypatch.setattr(Peer, "start", start)
    stream = open_(link, "a")
    end(stream)
    Peer.lives[0].kill()
    await until(lambda: len(Peer.lives) == 4 and Peer.lives[3].of(End))
    assert all(peer.killed for peer in Peer.lives[:3])


async def test_stop_ends_the_peer_and_a_later_word_is_harmless(link: Link) -> None:
    stream = open_(link, "a")
    await link.stop(1.0)
    assert Peer.lives[0].finished and len(Peer.lives) == 1
    stream.send([Delta(0, "x", 1)])
    end(stream)


class Sink:
    def deltas(self, stream: Stream, deltas: list[Delta]) -> None: ...

    def end(self, stream: Stream, frame: End) -> None: ...


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.integers(0, 3)), max_size=1500))
def test_what_is_replayed_is_what_was_given(given_: list[tuple[int, str, int]]) -> None:
    stream = Stream(Sink(), head(), announce=True, prompt_tokens=1, number=1, record=None)
    deltas = [Delta(*one) for one in given_]
    for delta in deltas:
        stream.send([delta])
    replayed: list[Frame] = list(stream.frames())
    again = [d for frame in replayed if isinstance(frame, Deltas) for d in frame.deltas]
    assert folded(again) == folded(deltas)
    assert stream.tokens == Gather(deltas).tokens
    assert len(again) <= 3 * (len(deltas) // COMPACT + 1)


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 17))
def test_payloads_survive_any_cut(payloads: list[bytes], size: int) -> None:
    data = b"".join(wire.length(p) + p for p in payloads)
    splitter = wire.Splitter()
    found = [p for i in range(0, len(data), size) for p in splitter.feed(data[i : i + size])]
    assert found == payloads


async def test_a_name_is_held_by_one(tmp_path: Path) -> None:
    first, second = NameLock(tmp_path, "w/1"), NameLock(tmp_path, "w/1")
    await first.acquire(0.1)
    with pytest.raises(NameTaken):
        await second.acquire(0.1)
    first.release()
    await second.acquire(0.1)
    second.release()


async def test_the_handover_never_writes_without_a_socket() -> None:
    written: list[bytes] = []
    handover = Handover(0.005, written.append, lambda _: True)
    handover.put(Lease(1.0), urgent=True)
    handover.flush()
    await asyncio.sleep(0.02)
    assert written == []
    handover.resume()
    await asyncio.sleep(0.02)
    assert wire.to_delivery.decode(written[0]) == [Lease(1.0)]
