"""What the delivery process promises, on a real broker, a real store and the real process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import orjson
import psutil
import pytest

from schemas.names import COMPLETIONS, DEAD_LETTERS, H_ORIGIN, H_REASON, USAGE
from schemas.records import StatusRecord, UsageRecord
from service.delivery.link import Link
from service.delivery.lock import NameLock, NameTaken
from service.frames import Delta, Error, Timing, Usage
from service.job import Place, Ticket
from service.store import BlobMissing, DigestMismatch, Store, StoreUnavailable
from tests.integration.conftest import TestStack
from tests.integration.delivery_kit import Log, Room, create_topics, delete_topics, numbering, text_of, until

WORDS = ["سلام ", "دنیا ", "👩‍👩‍👧 ", "é ", "漢", "字 "] * 20


def room_of(stack: TestStack, state: Path, **delivery: object) -> Room:
    return Room(stack.bootstrap, stack.store_endpoint, state, **delivery)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["process", "inline"])
async def test_a_stream_comes_out_as_the_contract_says(stack: TestStack, tmp_path: Path, mode: str) -> None:
    room = room_of(stack, tmp_path, mode=mode)
    async with room.open() as log:
        stream = room.stream()
        job = stream.head.job_id
        await room.run(stream, WORDS, 0.003)
        stream.send([Delta(0, "", 1, finish_reason="stop")])
        room.end(stream, tokens=len(WORDS) + 1)
        await until(lambda: room.ended, "the end")
        await until(lambda: log.terminals(job) and log.of(room.status) and log.of(USAGE), "the records")

        events = log.events(job)
        log.valid(job)
        numbering(events)
        assert [events[0]["type"], events[-1]["type"]] == ["started", "completed"]
        text = "".join(WORDS)
        assert text_of(events) == text
        terminal = events[-1]
        assert terminal["response"]["choices"][0]["message"]["content"] == text
        assert terminal["text_sha256"] == [hashlib.sha256(text.encode()).hexdigest()]
        assert sum(e["tokens"] for e in events if e["type"] == "chunk") == terminal["usage"]["completion_tokens"]
        assert terminal["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert events[0]["metadata"] == terminal["metadata"] == {"k": "v"}

        ended = room.ended[0]
        assert (ended.kind, ended.topic, ended.partition, ended.offset) == ("completed", room.jobs, 1, 1)
        record = log.of(room.status)[0]
        assert (record.partition, record.offset) == (1, ended.status_offset)
        status = StatusRecord.model_validate_json(record.value)
        written = next(r for r in log.of(room.replies) if orjson.loads(r.value)["type"] == "completed")
        assert status.terminal is not None
        assert (status.terminal.partition, status.terminal.offset) == (written.partition, written.offset)
        usage = UsageRecord.model_validate_json(next(r.value for r in log.of(USAGE) if job.encode() in r.value))
        assert (usage.attempt, usage.completion_tokens) == (status.attempt, len(WORDS) + 1)


async def test_a_killed_delivery_process_costs_a_new_attempt_and_no_token(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    async with room.open() as log:
        streams = [room.stream() for _ in range(30)]
        finals = [room.stream(stream=False) for _ in range(5)]
        attempts = {s.attempt for s in streams}
        for word in WORDS[:60]:
            for stream in streams + finals:
                stream.send([Delta(0, word, 1)])
            await asyncio.sleep(0.005)
        for stream in streams[:5]:  # these end at the very moment
            room.end(stream, tokens=60)
        victim = room.link.pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        for word in WORDS[60:]:
            for stream in streams[5:] + finals:
                stream.send([Delta(0, word, 1)])
            await asyncio.sleep(0.005)
        for stream in streams[5:] + finals:
            room.end(stream, tokens=len(WORDS))
        await until(lambda: len(room.ended) == 35, "all ends")
        await until(lambda: all(log.terminals(s.head.job_id) for s in streams + finals), "all terminals")

        assert room.link.restarts == 1
        assert not psutil.pid_exists(victim)
        for stream in streams[5:] + finals:
            events = log.events(stream.head.job_id)
            numbering(events)
            log.valid(stream.head.job_id)
            ends = log.terminals(stream.head.job_id)
            assert len(ends) == 1
            own = [e for e in events if e["attempt"] == ends[0]["attempt"]]
            assert ends[0]["attempt"] not in attempts
            assert ends[0]["response"]["choices"][0]["message"]["content"] == "".join(WORDS)
            if stream.head.stream:
                assert text_of(own) == "".join(WORDS)
        for stream in streams[:5]:  # the terminal may have been written before: a reader takes the first
            assert text_of_terminal(log.terminals(stream.head.job_id)[0]) == "".join(WORDS[:60])


async def test_a_stuck_delivery_process_is_replaced(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    async with room.open() as log:
        stream = room.stream()
        stream.send([Delta(0, "a", 1)])
        await until(lambda: len(log.events(stream.head.job_id)) == 2, "the first chunk")
        victim = room.link.pid
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)
        for _ in range(2000):
            stream.send([Delta(0, "b", 1)])
        room.end(stream, tokens=2001)
        await until(lambda: room.ended, "the end")
        assert not psutil.pid_exists(victim)
        await until(lambda: log.terminals(stream.head.job_id), "the terminal")
        assert text_of_terminal(log.terminals(stream.head.job_id)[0]) == "a" + "b" * 2000


async def test_a_large_output_is_stored_before_the_terminal(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    store = Store(room.settings.store)
    async with room.open() as log:
        stream = room.stream(inline_max_bytes=10_000, ttl_days=3)
        small = room.stream(store="always")
        never = room.stream(inline_max_bytes=1000, store="never")
        for one, size in ((stream, 4000), (small, 1), (never, 1000)):
            one.send([Delta(0, "خانه ", 1) for _ in range(size)])
            one.send([Delta(0, "", 0, finish_reason="length")])
            room.end(one, tokens=size)
        await until(lambda: len(room.ended) == 3, "the ends")
        await until(lambda: all(log.terminals(s.head.job_id) for s in (stream, small, never)), "the terminals")
        for one, size in ((stream, 4000), (small, 1)):
            log.valid(one.head.job_id)
            terminal = log.terminals(one.head.job_id)[0]
            reference = terminal["output"]
            assert "response" not in terminal
            assert reference["key"].startswith("v1/acme/") and one.attempt in reference["key"]
            data = await store.get(reference["bucket"], reference["key"], reference["size"], reference["sha256"])
            assert orjson.loads(data)["choices"][0]["message"]["content"] == "خانه " * size
        with pytest.raises(DigestMismatch):
            await store.get(reference["bucket"], reference["key"], reference["size"], "0" * 64)
        with pytest.raises(DigestMismatch):
            await store.get(reference["bucket"], reference["key"], reference["size"] - 1, reference["sha256"])
        with pytest.raises(BlobMissing):
            await store.get(reference["bucket"], "v1/none", 1, None)
        failed = log.terminals(never.head.job_id)[0]
        assert (failed["type"], failed["error"]["code"]) == ("failed", "output_too_large")
        log.valid(never.head.job_id)
        assert [e.stored for e in sorted(room.ended, key=lambda e: e.offset)] == [True, True, False]
        assert await store.ready()
    store.close()


async def test_a_store_that_is_away_fails_the_job_as_retriable(stack: TestStack, tmp_path: Path) -> None:
    room = Room(stack.bootstrap, "127.0.0.1:9", tmp_path)
    room.settings.store.deadline_s = 2.0
    store = Store(room.settings.store)
    with pytest.raises(StoreUnavailable):
        await store.put("v1/x", b"x")
    assert not await store.ready()
    store.close()
    async with room.open() as log:
        stream = room.stream(store="always")
        stream.send([Delta(0, "text", 1, finish_reason="stop")])
        room.end(stream, tokens=1)
        await until(lambda: log.terminals(stream.head.job_id), "the terminal")
        error = log.terminals(stream.head.job_id)[0]["error"]
        assert (error["code"], error["retriable"]) == ("store_unavailable", True)
        numbering(log.events(stream.head.job_id))
        log.valid(stream.head.job_id)


async def test_without_a_lease_nothing_goes_out(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    async with room.open(lease=False) as log:
        stream = room.stream()
        stream.send([Delta(0, "held", 1)])
        await until(lambda: len(room.pressures) > 3, "reports")
        assert log.events(stream.head.job_id) == []
        room.link.lease(time.monotonic() + 1.0)
        await until(lambda: len(log.events(stream.head.job_id)) == 2, "the first chunk")
        await asyncio.sleep(1.1)  # the lease's end is a time, not an event
        stream.send([Delta(0, " until the lease is renewed", 1, finish_reason="stop")])
        room.end(stream, tokens=2)
        seen = len(room.pressures)
        await until(lambda: len(room.pressures) > seen + 2, "reports")
        assert len(log.events(stream.head.job_id)) == 2 and not room.ended
        room.link.lease(time.monotonic() + 60)
        await until(lambda: room.ended, "the end")
        await until(lambda: log.terminals(stream.head.job_id), "the terminal")
        numbering(log.events(stream.head.job_id))
        assert text_of(log.events(stream.head.job_id)) == "held until the lease is renewed"


async def test_a_barrier_holds_terminals_and_a_release_drops_what_is_lost(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    async with room.open() as log:
        kept, lost = room.stream(), room.stream(partition=2)
        for stream in (kept, lost):
            stream.send([Delta(0, "before", 1)])
        await until(lambda: all(len(log.events(s.head.job_id)) == 2 for s in (kept, lost)), "the first chunks")
        begin = time.monotonic()
        await room.link.barrier()
        assert time.monotonic() - begin < 1.2
        for stream in (kept, lost):
            stream.send([Delta(0, " after", 1, finish_reason="stop")])
            room.end(stream, tokens=2)
        seen = len(room.pressures)
        await until(lambda: len(room.pressures) > seen + 2, "reports")
        assert not room.ended
        assert all(len(log.events(s.head.job_id)) == 2 for s in (kept, lost))
        room.link.release({(room.jobs, 2)})
        await until(lambda: room.ended, "the end of the kept one")
        await until(lambda: log.terminals(kept.head.job_id), "its terminal")
        await until(lambda: log.events(lost.head.job_id)[-1]["type"] == "abandoned", "abandoned")
        assert not log.terminals(lost.head.job_id)
        for stream in (kept, lost):
            numbering(log.events(stream.head.job_id))
            log.valid(stream.head.job_id)
        lost.send([Delta(0, "ignored", 1)])
        room.end(lost, tokens=3)
        assert await room.link.flush(1.0)
        assert [e.offset for e in room.ended] == [kept.head.offset]


async def test_a_barrier_reports_what_was_in_flight_first(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    async with room.open() as log:
        streams = [room.stream(stream=False) for _ in range(200)]
        for stream in streams:
            stream.send([Delta(0, "x", 1, finish_reason="stop")])
            room.end(stream, tokens=1)
        await room.link.barrier()
        reported = {e.offset for e in room.ended}
        await asyncio.sleep(0.5)
        written = {s.head.offset for s in streams if log.terminals(s.head.job_id)}
        assert written == reported  # nothing was written that the commit at the barrier does not know
        room.link.release(set())
        await until(lambda: len(room.ended) == 200, "the rest")


async def test_a_vanished_reply_topic_ends_the_job_undeliverable(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    async with room.open() as log:
        head = room.head(reply_topic=f"{room.name}.none", metadata=None)
        stream = room.stream(head)
        beyond = room.stream(reply_partition=99)
        other = room.stream()
        other.send([Delta(0, "unharmed", 1, finish_reason="stop")])
        room.end(other, tokens=1)
        stream.send([Delta(0, "nobody reads this", 4)])
        await until(lambda: len(room.ended) == 3, "the ends")
        kinds = {e.offset: e.kind for e in room.ended}
        assert kinds[head.offset] == kinds[beyond.head.offset] == "undeliverable"
        assert kinds[other.head.offset] == "completed"
        stream.send([Delta(0, "ignored", 1)])
        room.end(stream, tokens=5)

        def dead() -> list[dict[str, bytes]]:
            origins = (head.origin.encode(), beyond.head.origin.encode())
            found = [r for r in log.of(DEAD_LETTERS) if dict(r.headers).get(H_ORIGIN) in origins]
            assert all(r.value == b'{"the":"job"}' and r.key == b"acme" for r in found)
            return [dict(r.headers) for r in found]

        await until(lambda: len(dead()) == 2, "the dead letters")
        assert {h[H_REASON] for h in dead()} == {b"reply_topic_refused"}
        assert dead()[0]["h"] == b"1"
        await until(lambda: len(log.of(room.status)) == 3, "the status records")
        statuses = [StatusRecord.model_validate_json(r.value) for r in log.of(room.status)]
        assert sorted(s.kind for s in statuses) == ["completed", "undeliverable", "undeliverable"]


async def test_a_reply_topic_deleted_under_a_stream_ends_it_and_nothing_else(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    room.settings.kafka.request_timeout_ms = 3000
    doomed = f"{room.name}.doomed"
    async with room.open() as log:
        await create_topics(stack.bootstrap, doomed)
        stream, other = room.stream(reply_topic=doomed), room.stream()
        stream.send([Delta(0, "a", 1)])
        await until(lambda: room.link.unacknowledged == 0 and len(room.pressures) > 2, "acknowledgement")
        await delete_topics(stack.bootstrap, doomed)
        begin = time.monotonic()
        process = psutil.Process(room.link.pid)
        before = process.cpu_times()
        while not room.ended and time.monotonic() < begin + 30:
            for one in (stream, other):
                one.send([Delta(0, "b", 1)])
            await asyncio.sleep(0.1)
        assert room.ended[0].kind == "undeliverable"
        after = process.cpu_times()
        busy = (after.user + after.system - before.user - before.system) / (time.monotonic() - begin)
        assert busy < 0.5, f"the process span: {busy:.2f} of a core"
        room.end(other, tokens=1)
        await until(lambda: len(room.ended) == 2, "the other's end")
        await until(lambda: log.terminals(other.head.job_id), "its terminal")
        numbering(log.events(other.head.job_id))
        assert len({e["attempt"] for e in log.events(other.head.job_id)}) == 1


async def test_refusals_waiting_and_dead_letters(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    async with room.open() as log:
        head = room.head(endpoint=COMPLETIONS)
        room.link.waiting(head, "quota", time.time() - 5)
        room.link.waiting(room.head(progress=False, job_id="silent"), "quota", time.time())
        refused = room.link.open(head, announce=False, prompt_tokens=0)
        room.end(refused, "failed", error=Error("invalid_request", "max_tokens must be at least 1"))
        expired = room.link.open(room.head(), announce=False, prompt_tokens=0)
        room.end(expired, "expired")
        record = room.record(room.head())
        origin = Place(room.jobs, 1, 99)
        room.link.dead(record.dead(Ticket(record.place, 7), origin, "invalid_job", "not JSON", attempts=1))
        await until(lambda: len(room.ended) == 3, "the ends")
        await until(lambda: len(log.of(room.status)) == 3, "the status records")
        await until(lambda: len(log.events(head.job_id)) == 2, "the events")
        statuses = [StatusRecord.model_validate_json(r.value) for r in log.of(room.status)]
        assert sorted(s.kind for s in statuses) == ["dead", "expired", "failed"]
        waiting, failed = log.events(head.job_id)
        assert (waiting["type"], waiting["reason"]) == ("waiting", "quota")
        assert (failed["type"], failed["seq"], failed["error"]["code"]) == ("failed", 0, "invalid_request")
        assert [e["type"] for e in log.events(expired.head.job_id)] == ["expired"]
        for one in (refused, expired):
            log.valid(one.head.job_id)
        assert log.events("silent") == []
        letter = next(r for r in log.of(DEAD_LETTERS) if dict(r.headers).get(H_ORIGIN) == str(origin).encode())
        assert letter.value == record.value
        dead = next(e for e in room.ended if e.kind == "dead")
        assert (dead.stream, dead.offset, dead.epoch) == (None, record.place.offset, 7)
        assert not [r for r in log.of(USAGE) if room.name.encode() in r.value]  # nothing was used


async def test_a_failed_job_names_its_dead_letter_and_a_cancelled_one_its_partial(
    stack: TestStack, tmp_path: Path
) -> None:
    room = room_of(stack, tmp_path)
    async with room.open() as log:
        poisoned, cancelled, given_up = room.stream(), room.stream(), room.stream()
        for stream in (poisoned, cancelled, given_up):
            stream.send([Delta(0, "half", 2)])
        await until(lambda: len(log.events(given_up.head.job_id)) == 2, "the first chunk")
        letter = room.record(poisoned.head).dead(
            Ticket(Place(room.jobs, 1, poisoned.head.offset), 1), Place(room.jobs, 1, 1), "poison_job", "killed it"
        )
        room.end(cancelled, "cancelled", tokens=2)
        room.end(given_up, "abandoned", tokens=2)
        poisoned.end("failed", Usage(7, 2), Timing(time.time()), Error("poison_job", "killed it"), letter)
        await until(lambda: len(room.ended) == 3, "the ends")
        both = (poisoned.head.job_id, cancelled.head.job_id)
        await until(lambda: all(log.terminals(job) for job in both), "the terminals")
        place = log.terminals(poisoned.head.job_id)[0]["error"]["dead_letter"]
        at = (place["partition"], place["offset"])
        written = next(r for r in log.of(DEAD_LETTERS) if (r.partition, r.offset) == at)
        assert written.value == letter.value
        assert log.terminals(cancelled.head.job_id)[0]["partial"]["choices"] == [{"index": 0, "text": "half"}]
        await until(lambda: log.events(given_up.head.job_id)[-1]["type"] == "abandoned", "abandoned")
        assert next(e for e in room.ended if e.kind == "abandoned").status_offset is None
        for stream in (poisoned, cancelled, given_up):
            log.valid(stream.head.job_id)
            numbering(log.events(stream.head.job_id))


async def test_a_stop_flushes_what_is_complete_and_leaves_no_process(stack: TestStack, tmp_path: Path) -> None:
    room = room_of(stack, tmp_path)
    async with room.open() as log:
        pid = room.link.pid
        os.kill(pid, signal.SIGTERM)  # type: ignore[arg-type]
        os.kill(pid, signal.SIGINT)  # type: ignore[arg-type]
        complete, unfinished = room.stream(), room.stream()
        for stream in (complete, unfinished):
            stream.send([Delta(0, "x", 1)])
        room.end(complete, tokens=1)
        begin = time.monotonic()
        await room.link.stop(5.0)
        assert time.monotonic() - begin < 4.0
        assert not psutil.pid_exists(pid)  # type: ignore[arg-type]
        assert [e.offset for e in room.ended] == [complete.head.offset]
        await until(lambda: log.terminals(complete.head.job_id), "the terminal")
        assert not log.terminals(unfinished.head.job_id)


WORKER = """
import asyncio, sys, time
from pathlib import Path
from service.frames import Delta
from tests.integration.delivery_kit import Room

async def main(bootstrap, store, state, name):
    room = Room(bootstrap, store, Path(state), name=name)
    await room.link.start()
    room.link.lease(time.monotonic() + 60)
    complete, unfinished = room.stream(), room.stream()
    for stream in (complete, unfinished):
        stream.send([Delta(0, "x", 1)])
    await asyncio.sleep(0.5)
    room.end(complete, tokens=1)
    room.link._handover.flush()
    print(room.link.pid, complete.head.job_id, unfinished.head.job_id, flush=True)
    time.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_worker_leaves_no_process_and_its_complete_streams_go_out(
    stack: TestStack, tmp_path: Path
) -> None:
    room = room_of(stack, tmp_path)
    await room.topics()
    async with Log(stack.bootstrap, room.replies, room.status) as log:
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, stack.bootstrap, stack.store_endpoint, str(tmp_path), room.name,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert worker.stdout is not None
        line = await asyncio.wait_for(worker.stdout.readline(), 60)
        pid, complete, unfinished = line.decode().split()
        worker.kill()
        await worker.wait()
        await until(lambda: not alive(int(pid)), "the delivery process's end", 10)
        await until(lambda: log.terminals(complete) and log.of(room.status), "the complete one")
        assert not log.terminals(unfinished)
        numbering(log.events(unfinished))
        lock = NameLock(room.settings.state_dir, room.name)
        await lock.acquire(1.0)  # a new worker of this name may start
        lock.release()
    await delete_topics(stack.bootstrap, room.replies, room.status)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_stop_without_a_broker_does_not_hang(tmp_path: Path) -> None:
    room = Room("127.0.0.1:9", "127.0.0.1:9", tmp_path)
    link = Link(room.settings, room.ended.append, room.pressures.append)
    starting = asyncio.create_task(link.start())
    await until(lambda: room.pressures, "the first report")
    pid = link.pid
    begin = time.monotonic()
    starting.cancel()
    await asyncio.wait({starting})
    assert time.monotonic() - begin < 6.0
    assert not psutil.pid_exists(pid)  # type: ignore[arg-type]


async def test_two_workers_of_one_name_do_not_deliver_side_by_side(
    stack: TestStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.delivery.link.LOCK_S", 0.3)
    room = room_of(stack, tmp_path)
    async with room.open():
        second = Link(room.settings, room.ended.append, room.pressures.append)
        with pytest.raises(NameTaken, match="HEADRACE_WORKER"):
            await second.start()
    await room.topics()
    await second.start()
    await second.stop(5.0)
    await delete_topics(stack.bootstrap, room.replies, room.status)


def text_of_terminal(event: dict[str, object]) -> str:
    return event["response"]["choices"][0]["message"]["content"]  # type: ignore[index,no-any-return]
