"""The consumer group on a real broker: who gets what, what is handed out again, and what a commit remembers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic
from aiokafka.record.util import calc_crc32c

from consumers import jobs as room
from consumers import topic_ids
from schemas import names
from service.job import Place, Record, Ticket
from service.ledger import Book
from service.ledger.metadata import Commit, decode
from tests.integration.conftest import TestStack
from tests.integration.group_kit import PARTITIONS, Pool, Worker, pool_of, settings_for, until

KEYS = 3 * PARTITIONS


@pytest.fixture
async def pool(stack: TestStack) -> AsyncIterator[Pool]:
    async with pool_of(stack.bootstrap) as pool:
        yield pool


def numbers(worker: Worker) -> set[int]:
    return {number for _, number in worker.consumer.assignment}


def settled(*workers: Worker) -> bool:
    """The partitions are given out among exactly these workers, and all of them are being read."""
    keys = [key for worker in workers for key in worker.consumer.assignment]
    return (
        len(keys) == len(set(keys)) == KEYS
        and all(worker.consumer.joined for worker in workers)
        and all(worker.book.readable(key) for worker in workers for key in worker.consumer.assignment)
    )


async def test_one_member_reads_everything_from_the_start_and_commits_it(pool: Pool) -> None:
    await pool.publish(300)
    worker = Worker(pool.settings)
    await worker.start()
    await until(lambda: len(worker.ended) == 300, "300 jobs")
    assert worker.lease_until > time.monotonic()
    assert abs(worker.consumer.last_poll - time.monotonic()) < 5
    assert await worker.stop()
    stored = await pool.committed()
    assert sum(value.offset for value in stored.values()) == 300
    assert all(decode(Commit(value.offset, value.metadata)).clean for value in stored.values())
    assert max(worker.admitted.values()) == 1


async def test_members_leave_and_join_under_load_and_nothing_runs_twice(pool: Pool) -> None:
    """Running jobs of kept partitions go on; those of moved ones are abandoned and run at the new owner."""
    jobs = {"s": 0.3}
    workers = [Worker(pool.settings, job_s=lambda record: jobs["s"]) for _ in range(3)]
    publishing = True

    async def publish() -> None:
        while publishing:
            await pool.publish(30)
            await asyncio.sleep(0.05)

    load = asyncio.create_task(publish())
    first, second, third = workers
    await first.start()
    await until(lambda: len(first.live) > 10, "load")
    await second.start()
    await until(lambda: settled(first, second), "two members")
    assert len(numbers(first)) == len(numbers(second)) == PARTITIONS // 2
    await until(lambda: len(second.live) > 10, "load on the second")
    kept = numbers(second)
    await first.stop()
    await until(lambda: settled(second), "one member")
    assert kept <= numbers(second)
    await third.start()
    await until(lambda: settled(second, third), "two members again")
    await until(lambda: len(third.ended) > 10, "work at the third")
    publishing = False
    await load
    jobs["s"] = 0.0
    await until(lambda: len(set().union(*(w.ended for w in workers))) == len(pool.sent), "all jobs ended")
    ends = Counter(place for worker in workers for place in worker.ended)
    assert set(ends) == pool.sent
    assert [place for place, count in ends.items() if count > 1] == []
    assert [worker.doubled for worker in workers] == [[], [], []]
    for worker in workers:
        for place, count in worker.admitted.items():
            assert count == 1, f"{place} was handed out {count} times to one process"
    for worker in (second, third):
        assert await worker.stop()


async def test_records_between_rebalances_are_not_handed_out_again_to_one_process(pool: Pool) -> None:
    """The client library alone redelivers 740-1,250 records per rebalance under load to the same process."""
    await pool.publish(600)
    worker = Worker(pool.settings, job_s=lambda record: None, high=10_000)
    await worker.start()
    await until(lambda: len(worker.admitted) == 600, "600 records")
    received = worker.consumer.received
    for _ in range(3):
        before = worker.consumer.rebalances
        coordinator = worker.consumer.consumer._coordinator
        coordinator.request_rejoin()
        await until(lambda before=before: worker.consumer.rebalances > before and settled(worker), "a rebalance")
    more = await pool.publish(60)
    await until(lambda: all(place in worker.admitted for place in more), "60 more")
    assert worker.consumer.received - received == 60
    assert max(worker.admitted.values()) == 1
    assert len(worker.live) == 660
    assert worker.barriers == 3
    await worker.stop()


async def test_when_one_of_three_is_gone_nothing_moves_between_the_survivors(pool: Pool) -> None:
    workers = [Worker(pool.settings) for _ in range(3)]
    for worker in workers:
        await worker.start()
    await until(lambda: settled(*workers), "three members")
    assert [len(numbers(worker)) for worker in workers] == [2, 2, 2]
    before = [numbers(worker) for worker in workers]
    for worker in workers:
        assert worker.consumer.assignment == {
            (topic, number) for topic in names.jobs_topics(pool.name) for number in numbers(worker)
        }
    await workers[1].stop()
    await until(lambda: settled(workers[0], workers[2]), "two members")
    for index in (0, 2):
        assert before[index] <= numbers(workers[index])
        assert workers[index].released[-1] == set()
    for index in (0, 2):
        await workers[index].stop()


class Process:
    """A member in a process of its own."""

    def __init__(self, pool: Pool, instance: str = "") -> None:
        self._options = json.dumps({"pool": pool.name, "bootstrap": pool.bootstrap, "instance": instance})
        self.events: list[dict[str, Any]] = []

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.group_kit",
            self._options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.events.append(json.loads(line))

    def places(self, event: str) -> list[Place]:
        return [Place(*told["place"]) for told in self.events if told["event"] == event]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reading

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), 20)
        await self._reading


async def test_after_kill_9_only_what_was_unfinished_is_handed_out_again(pool: Pool) -> None:
    """Finished ones are known from the commit, and those that ended after it from the status topic."""
    process = Process(pool)
    await process.start()
    try:
        await until(lambda: any(e["event"] == "joined" for e in process.events), "the member", 40)
        held = await pool.publish(36, hold=True)
        done = await pool.publish(150)
        await until(lambda: len(process.places("ended")) == 150, "150 jobs ended", 40)
        mark = len(process.events)
        await until(
            lambda: any(e["event"] == "committed" and e["live"] == 36 for e in process.events[mark:]), "a commit"
        )
        late = await pool.publish(90)
        await until(lambda: len(process.places("ended")) == 240, "90 more ended")
    finally:
        await process.kill()  # most of the last 90 are not committed yet
    assert set(process.places("ended")) == {*done, *late}
    worker = Worker(pool.settings, job_s=lambda record: 0.0)
    await worker.start()
    await until(lambda: len(worker.ended) == 36, "the interrupted jobs", 40)
    after = await pool.publish(30)
    await until(lambda: len(worker.ended) == 66, "new jobs")
    assert set(worker.admitted) == {*held, *after}
    assert max(worker.admitted.values()) == 1
    # It ran them when it was killed: carefully now, and their unclean start is counted.
    assert set(held) <= worker.careful
    assert [worker.starts[place] for place in held] == [1] * 36
    await worker.stop()


async def test_a_frozen_member_wakes_up_harmless(pool: Pool) -> None:
    """Frozen for longer than its session, then woken in an empty group, where the broker would take its old commit."""
    process = Process(pool)
    await process.start()
    try:
        await until(lambda: any(e["event"] == "joined" for e in process.events), "the member", 40)
        held = await pool.publish(36, hold=True)
        await until(lambda: len(process.places("admitted")) == 36, "36 jobs", 40)
        mark = len(process.events)
        await until(lambda: any(e["event"] == "committed" for e in process.events[mark:]), "a commit")
        process.signal(signal.SIGSTOP)
        worker = Worker(pool.settings)
        await worker.start()
        await until(lambda: len(worker.ended) == 36, "the frozen member's jobs", 40)
        more = await pool.publish(36)
        await until(lambda: len(worker.ended) == 72, "new jobs")
        await worker.stop()
        before = await pool.committed()
        assert sum(value.offset for value in before.values()) == 72
        process.signal(signal.SIGCONT)
        last = await pool.publish(18)
        await until(lambda: set(last) <= set(process.places("ended")), "the woken member at work again", 40)
        for key, value in (await pool.committed()).items():
            assert value.offset >= before[key].offset
        # It may have read on before it knew, but without a lease it ended nothing, and nothing twice.
        assert Counter(process.places("ended")) == Counter(last)
        assert {*held, *last} <= set(process.places("admitted")) <= {*held, *more, *last}
        await process.stop()
        assert process.events[-1]["doubled"] == 0
    finally:
        process.end()


async def test_a_clean_stop_is_remembered_and_costs_no_start(pool: Pool) -> None:
    process = Process(pool)
    await process.start()
    await until(lambda: any(e["event"] == "joined" for e in process.events), "the member", 40)
    held = await pool.publish(36, hold=True)
    done = await pool.publish(60)
    await until(lambda: len(process.places("ended")) == 60, "60 jobs ended", 40)
    await until(lambda: len(process.places("admitted")) == 96, "all admitted")
    await process.stop()
    assert process.events[-1] == {"event": "stopped", "place": None, "stored": True, "doubled": 0}
    worker = Worker(pool.settings)
    await worker.start()
    await until(lambda: len(worker.ended) == 36, "the abandoned jobs")
    assert set(worker.admitted) == set(held)
    assert not set(done) & set(worker.admitted)
    assert worker.careful == set()
    assert set(worker.starts.values()) == {0}
    await worker.stop()


async def test_records_with_binary_null_and_doubled_headers_and_no_value_come_through_whole(pool: Pool) -> None:
    topic = names.jobs_topic(pool.name, "standard")
    headers: list[tuple[str, Any]] = [
        ("a", b"\xff\xfe\x00"),
        ("reply_to", None),
        ("content-type", b"application/\xff"),
        ("a", b"second"),
        ("correlation_id", b"\x00" * 8),
        ("ключ", "значение".encode()),
    ]
    await pool.producer.send_and_wait(topic, b"\x80\x81 not json", key=b"\xff", partition=0, headers=headers)
    await pool.producer.send_and_wait(topic, None, key=b"k", partition=0)
    await pool.producer.send_and_wait(topic, b"", partition=0, headers=[("traceparent", b"")])
    worker = Worker(pool.settings)
    await worker.start()
    await until(lambda: len(worker.ended) == 3, "three records")
    first, second, third = worker.records
    assert (first.key, first.value, list(first.headers)) == (b"\xff", b"\x80\x81 not json", headers)
    assert (second.key, second.value, second.headers) == (b"k", None, ())
    assert third.value == b""
    assert abs(first.timestamp_ms / 1000 - time.time()) < 60
    await worker.stop()


async def test_a_header_name_that_is_no_utf_8_does_not_block_its_partition(pool: Pool) -> None:
    """Not lenient, the client library fails on it again and again, and the partition stands still."""
    topic = names.jobs_topic(pool.name, "standard")
    batch = pool.producer.create_batch()
    for value in (b"before", b"hostile", b"after"):
        batch.append(key=b"k", value=value, timestamp=None, headers=[("XXXX" if value == b"hostile" else "good", b"1")])
    batch._builder = HostileBuilder(batch._builder)
    batch.close()
    await (await pool.producer.send_batch(batch, topic, partition=0))
    await pool.producer.send_and_wait(topic, b"later", partition=0)
    worker = Worker(pool.settings)
    await worker.start()
    await until(lambda: len(worker.ended) == 4, "four records", 10)
    assert [record.value for record in worker.records] == [b"before", b"hostile", b"after", b"later"]
    assert worker.records[1].headers == (("\\xff\\xfe\\xfd\\xfc", b"1"),)
    await worker.stop()


class HostileBuilder:
    """A batch builder that puts bytes on the wire which no well-behaved client would."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def build(self) -> bytearray:
        data = bytearray(self._builder.build())
        at = data.index(b"XXXX")
        data[at : at + 4] = b"\xff\xfe\xfd\xfc"
        data[17:21] = calc_crc32c(bytes(data[21:])).to_bytes(4, "big")
        return data


class Refusing(Worker):
    """A reception that breaks on some records."""

    def admit(self, record: Record, ticket: Ticket) -> None:
        if b"break" in (record.value or b""):
            raise KeyError("secret input")
        super().admit(record, ticket)


async def test_a_record_that_breaks_admission_becomes_poison_and_the_next_ones_go_on(pool: Pool) -> None:
    await pool.publish(18, kind="break")
    await pool.publish(18)
    worker = Refusing(pool.settings)
    await worker.start()
    await until(lambda: len(worker.ended) == 18 and len(worker.poisoned) == 18, "18 poisoned, 18 ended")
    assert all("secret" not in message and "KeyError" in message for _, message in worker.poisoned)
    assert await worker.stop()
    assert sum(value.offset for value in (await pool.committed()).values()) == 36


async def test_a_record_that_cannot_be_parsed_is_registered_and_becomes_poison(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered only later, it would be passed over by the commit, and nobody would ever know of it (R2)."""
    parse = room.parse

    async def fails(raw: Any) -> Any:
        if b"torn" in raw.value:
            raise ValueError("secret input")
        return await parse(raw)

    monkeypatch.setattr(room, "parse", fails)
    torn = await pool.publish(18, kind="torn")
    good = await pool.publish(18)
    worker = Worker(pool.settings)
    await worker.start()
    await until(lambda: len(worker.ended) == len(worker.poisoned) == 18, "18 poisoned, 18 ended")
    assert {record.place for record, _ in worker.poisoned} == set(torn) and worker.ended == set(good)
    assert await worker.stop()
    assert sum(value.offset for value in (await pool.committed()).values()) == 36


async def test_back_pressure_and_a_stopped_admission_hold_records_back(pool: Pool) -> None:
    await pool.publish(18 * 40)
    release = asyncio.Event()
    worker = Worker(pool.settings, job_s=lambda record: 0.0 if release.is_set() else 3.0, high=10)
    await worker.start()
    await until(lambda: len(worker.live) == KEYS * 10, "every partition at its limit")
    worker.consumer.pause_all("engine")
    worker.consumer.pause_all("memory")
    release.set()
    await until(lambda: not worker.live, "the running ones ended")
    assert len(worker.admitted) == KEYS * 10
    worker.consumer.resume_all("engine")
    assert worker.consumer.paused_for == {"memory"}
    await asyncio.sleep(0.3)
    assert len(worker.admitted) == KEYS * 10
    worker.consumer.resume_all("memory")
    await until(lambda: len(worker.ended) == 18 * 40, "the rest")
    assert max(worker.admitted.values()) == 1
    await worker.stop()


async def test_a_flush_commits_the_start_of_a_careful_job(pool: Pool) -> None:
    (place, *_) = await pool.publish(1)
    worker = Worker(pool.settings, job_s=lambda record: None)
    await worker.start()
    await until(lambda: bool(worker.live), "the job")
    before = time.monotonic()
    assert await worker.consumer.committer.flush()
    assert time.monotonic() - before < 0.5
    stored = (await pool.committed())[place[:2]]
    assert decode(Commit(stored.offset, stored.metadata)).unfinished == {place.offset: 1}
    await worker.stop()


async def test_without_a_broker_it_starts_with_an_error_and_stops_within_its_deadline(pool: Pool) -> None:
    worker = Worker(pool.settings)
    worker.consumer = type(worker.consumer)(settings_for(pool.name, "127.0.0.1:9"), worker.book, worker, worker)
    before = time.monotonic()
    with pytest.raises(Exception, match="bootstrap"):
        await worker.consumer.start()
    assert time.monotonic() - before < 10
    assert not worker.consumer.joined
    assert await worker.consumer.stop(clean=True)


async def test_when_the_broker_goes_away_the_lease_ends_and_stop_returns_within_its_deadline(pool: Pool) -> None:
    """The broker is taken away by breaking every connection of this consumer and pointing it at a dead address."""
    worker = Worker(pool.settings, job_s=lambda record: None)
    await worker.start()
    await pool.publish(18)
    await until(lambda: len(worker.live) == 18, "jobs")
    await until(lambda: worker.lease_until > time.monotonic(), "a lease")
    clients = [worker.consumer.consumer._client, worker.consumer._admin._client]
    for client in clients:
        for broker in client.cluster.brokers():
            client.cluster._brokers[broker.nodeId] = broker._replace(port=9)
        client._bootstrap_servers = "127.0.0.1:9"
        for connection in list(client._conns.values()):
            connection.close()
        client._conns.clear()
    last = worker.lease_until
    await until(lambda: time.monotonic() > last, "the end of the lease", 15)
    assert worker.lease_until == last
    before = time.monotonic()
    assert not await worker.consumer.stop(clean=True, deadline_s=8.0)
    assert time.monotonic() - before < 8.5
    await worker.vanish()


async def test_a_foreign_commit_in_between_makes_a_kept_partition_start_afresh(pool: Pool) -> None:
    """As after a frozen spell: another worker owned the partition, and its commit is the truth."""
    await pool.publish(36)
    worker = Worker(pool.settings, job_s=lambda record: None)
    await worker.start()
    await until(lambda: len(worker.live) == 36, "36 jobs")
    await until(lambda: worker.consumer.committer.commits > 0, "a commit")
    key = (names.jobs_topic(pool.name, "standard"), 2)
    worker.consumer.committer.close()
    await worker.consumer.committer.flush(0.1)
    other = Book(high=10, max_span=100)
    other.take(key, None, 0, 2)
    other.settled(2, 0)
    ticket = other.register(Place(*key, 0))
    assert ticket is not None
    other.complete(ticket)
    await worker.consumer._rebalance._offsets.commit(other.commits())
    before = worker.consumer.rebalances
    worker.consumer.consumer._coordinator.request_rejoin()
    await until(lambda: worker.consumer.rebalances > before and bool(worker.released), "a rebalance")
    assert worker.released == [{key}]
    await until(lambda: worker.admitted[Place(*key, 1)] == 2, "the record that the other had not finished")
    assert worker.admitted[Place(*key, 0)] == 1
    assert Place(*key, 0) not in worker.live
    assert sum(worker.admitted.values()) == 37
    assert worker.doubled == []
    await worker.stop()


async def test_a_job_of_an_open_or_aborted_transaction_is_none_and_its_marker_is_not_waited_for(pool: Pool) -> None:
    topic = names.jobs_topic(pool.name, "standard")
    producer = AIOKafkaProducer(bootstrap_servers=pool.bootstrap, transactional_id=pool.name)
    await producer.start()

    async def publish(count: int = 1) -> list[Place]:
        sent = [await producer.send_and_wait(topic, b"{}", partition=0) for _ in range(count)]
        return [Place(m.topic, m.partition, m.offset) for m in sent]

    async def committed() -> int:
        return next(value.offset for key, value in (await pool.committed()).items() if key == (topic, 0))

    await producer.begin_transaction()
    aborted = await publish(3)
    await producer.abort_transaction()
    async with producer.transaction():
        wanted = await publish(2)
    await producer.begin_transaction()
    aborted += await publish()
    await producer.abort_transaction()
    worker = Worker(pool.settings)
    await worker.start()
    await until(lambda: worker.ended == set(wanted), "the committed ones")
    end = aborted[-1].offset + 2
    deadline = time.monotonic() + 10
    while await committed() < end:
        assert time.monotonic() < deadline, f"{await committed()} is committed, the log ends at {end}"
        await asyncio.sleep(0.1)

    await producer.begin_transaction()
    open_ = await publish()
    behind = await pool.producer.send_and_wait(topic, b"{}", partition=0)
    beside = await pool.producer.send_and_wait(topic, b"{}", partition=1)
    await until(lambda: Place(topic, 1, beside.offset) in worker.ended, "one of another partition")
    assert Place(topic, 0, behind.offset) not in worker.admitted
    await producer.abort_transaction()
    await until(lambda: Place(topic, 0, behind.offset) in worker.ended, "the one behind the transaction")
    assert not set(worker.admitted) & {*aborted, *open_}
    await producer.stop()
    assert await worker.stop()
    assert await committed() >= behind.offset + 1


async def test_a_topic_that_is_deleted_and_made_again_is_read_anew_and_what_ran_of_it_ends(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_ids, "LOOK_S", 0.5)
    topic = names.jobs_topic(pool.name, "standard")
    job = {"s": 0.0}
    worker = Worker(pool.settings, job_s=lambda record: job["s"])
    await worker.start()
    former = [place for place in await pool.publish(60) if place.topic == topic]
    await until(lambda: worker.ended >= set(former), "the first ones")
    job["s"] = 4.0
    running = [place for place in await pool.publish(60) if place.topic == topic]
    await until(lambda: worker.live.keys() >= set(running), "running jobs")
    await pool.admin.delete_topics([topic])
    await until(lambda: topic in worker.consumer.missing, "the topic is missed")
    await until(lambda: worker.ended >= set(running), "jobs of the deleted topic")
    assert len([key for key in worker.consumer.assignment if key[0] == topic]) == 0
    job["s"] = 0.0
    await pool.admin.create_topics([NewTopic(topic, PARTITIONS, 1)])
    await until(lambda: settled(worker) and not worker.consumer.missing, "the new topic is read", 10)
    sent = await asyncio.gather(*[pool.producer.send_and_wait(topic, b"{}", partition=n % 6) for n in range(12)])
    places = {Place(m.topic, m.partition, m.offset) for m in sent}
    assert places <= set(former)  # they lie where others lay
    await until(lambda: all(worker.admitted[place] == 2 for place in places), "jobs of the new topic", 10)
    assert await worker.stop()
    stored = await pool.committed()
    assert {value.offset for key, value in stored.items() if key[0] == topic} == {2}
