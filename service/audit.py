"""Reads a pool's logs for `service/reconcile.py`: what to read from where to where, in the order that makes it sound.

Ends of the jobs topics → the group's commits → ends of all others: a job that a commit calls finished then has its
status record before the end that is read to, whatever goes on meanwhile. Never writes, joins no group.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, TopicAuthorizationFailedError
from aiokafka.structs import TopicPartition

from consumers import lenient
from schemas import names
from schemas.decode import NotJson, decode
from service.bounded_stop import stop_within
from service.intake.address import is_reserved
from service.job import Place
from service.ledger import Commit, Key, Snapshot
from service.ledger.metadata import decode as decode_metadata
from service.places import origin_of
from service.reconcile import Letters, Reconciliation
from service.settings import Settings
from service.topics import BrokerUnreachable, TopicsRefused
from service.topics import Finding as TopicFinding
from service.verdicts import Finding, Report

log = logging.getLogger(__name__)

T = TypeVar("T")

# Job records compared at a time: about 100 MB. More are read in several rounds, by a hash of their ids.
SHARE_JOBS = 200_000
# One question to the broker, and the longest time without any record while some are due, seconds.
ANSWER_S = 10.0
STALL_S = 30.0
# Clocks of workers and brokers differ: everything that follows a job is read from so much earlier, milliseconds.
SLACK_MS = 5 * 60_000
POLL_MS = 200
# Findings whose job is looked up, so that they can be told by name.
NAMED = 100

Range = tuple[int, int]  # first offset, end


@dataclass(frozen=True, slots=True)
class Named:
    """A finding with the identity that its record states."""

    finding: Finding
    tenant: str
    job_id: str
    run: int


@dataclass
class Account:
    """What an audit found, and over which time."""

    pool: str
    since: float  # wall clock
    until: float
    report: Report = field(default_factory=Report)
    named: list[Named] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # topics that may not be read


class Audit:
    """`run` once. `since_s`: how far to look back; None, or more than that: the shortest retention.

    `show(done, total)`: records read so far, for a progress bar; the total grows as reply topics become known.
    """

    def __init__(
        self,
        settings: Settings,
        since_s: float | None = None,
        *,
        show: Callable[[int, int], None] = lambda done, total: None,
        share_jobs: int = SHARE_JOBS,
    ) -> None:
        self._settings = settings
        self._since_s = since_s
        self._show = show
        self._share_jobs = share_jobs
        self._done = self._total = 0
        self._counts: dict[str, int] = {}  # partitions by topic
        self._consumer: AIOKafkaConsumer
        self._admin: AIOKafkaAdminClient

    async def run(self) -> Account:
        """Raises BrokerUnreachable, TopicsRefused."""
        lenient.install()
        try:
            return await self._run()
        except (TopicAuthorizationFailedError, GroupAuthorizationFailedError) as error:
            pool = self._settings.pool
            what = f"jobs, status and the group of pool {pool} must be readable ({type(error).__name__})"
            raise TopicsRefused([TopicFinding("", what, "give this client the rights to read them")]) from None

    async def _run(self) -> Account:
        pool = self._settings.pool
        jobs, status = names.jobs_topics(pool), names.status_topic(pool)
        async with self._connected():
            self._counts = await self._partitions()
            missing = [topic for topic in (*jobs, status) if topic not in self._counts]
            if missing:
                raise TopicsRefused(
                    [TopicFinding(topic, "is missing", f"check --pool (is {pool})") for topic in missing]
                )
            jobs = (*jobs, *sorted(name for name in self._counts if _is_own(name, pool)))
            copies = [name for name in (names.deferred_topic(pool), names.overflow_topic(pool)) if name in self._counts]
            letters = [names.DEAD_LETTERS] if names.DEAD_LETTERS in self._counts else []
            account = Account(pool, 0.0, time.time())
            window = await self._window([*jobs, *copies, status, names.REPLIES])
            account.since = account.until - (window if self._since_s is None else min(window, self._since_s))
            since_ms = int(account.since * 1000)

            job_ranges = await self._ranges(jobs, since_ms)
            commits = await self._commits([*jobs, *copies])
            copy_ranges = await self._ranges(copies, since_ms)
            status_ranges = await self._ranges([status], since_ms - SLACK_MS)
            read = await self._letters(letters, since_ms - SLACK_MS, account)
            number_of_jobs = sum(end - start for start, end in job_ranges.values())
            shares = max(1, math.ceil(number_of_jobs / self._share_jobs))
            for _ in range(shares):
                self._expect(job_ranges, copy_ranges, status_ranges)
            for share in range(shares):
                part = Reconciliation(commits, read, share=share, shares=shares)
                for number in range(self._counts[status]):
                    await self._join(part, number, job_ranges, copy_ranges, status_ranges)
                await self._answers(part, since_ms - SLACK_MS, account)
                account.report.add(part.report())
            account.named = await self._name(account.report.listed())
            return account

    async def _letters(self, topics: Collection[str], since_ms: int, account: Account) -> Letters:
        read = Letters()
        try:
            ranges = await self._ranges(topics, since_ms)
            self._expect(ranges)
            async for record in self._scan(ranges):
                read.take(record.headers)
        except TopicAuthorizationFailedError:
            read.readable = False
            account.unread.append(names.DEAD_LETTERS)
        return read

    # One partition number

    async def _join(
        self,
        part: Reconciliation,
        number: int,
        jobs: Mapping[TopicPartition, Range],
        copies: Mapping[TopicPartition, Range],
        status: Mapping[TopicPartition, Range],
    ) -> None:
        part.begin()
        first = True
        async for record in self._scan(_of(status, number)):
            if first and (await self._begin(record.topic, number)) == record.offset > 0:
                part.status_reaches(number, record.timestamp)
            first = False
            part.status(record.value)
        async for record in self._scan(_of(copies, number)):
            place = Place(record.topic, number, record.offset)
            if not part.copy(place, origin_of(record.headers)):
                part.job(place, record.value, record.timestamp)
        async for record in self._scan(_of(jobs, number)):
            part.job(Place(record.topic, number, record.offset), record.value, record.timestamp)

    async def _answers(self, part: Reconciliation, since_ms: int, account: Account) -> None:
        """Every terminal event on the reply topics concerned, from the window's beginning on."""
        for topic in sorted(part.reply_topics):
            if topic not in self._counts or is_reserved(topic):
                continue
            try:
                begins = await self._answered(self._consumer.beginning_offsets(self._places([topic])))
                ranges = await self._ranges([topic], since_ms)
                for place, (start, end) in ranges.items():
                    lowest = part.lowest(topic, place.partition)
                    ranges[place] = (max(begins[place], min(start, start if lowest is None else lowest)), end)
                self._expect(ranges)
                async for record in self._scan(ranges):
                    place_of = Place(record.topic, record.partition, record.offset)
                    part.event(place_of, record.key, record.value, record.headers)
            except TopicAuthorizationFailedError:
                if topic not in account.unread:
                    account.unread.append(topic)
                continue
            for place, begin in begins.items():
                part.reach(topic, place.partition, begin)

    async def _name(self, findings: Iterable[Finding]) -> list[Named]:
        """Reads the first of the records found fault with once more, for the identity they state."""
        named: list[Named] = []
        for finding in findings:
            tenant, job_id, run = "", "", 0
            place = finding.origin
            if len(named) < NAMED:
                tp = TopicPartition(place.topic, place.partition)
                async for record in self._scan({tp: (place.offset, place.offset + 1)}):
                    tenant, job_id, run = _stated(record.value)
            named.append(Named(finding, tenant, job_id, run))
        return named

    # Where to read

    async def _window(self, topics: Collection[str]) -> float:
        """The shortest retention of these topics, seconds."""
        asked = [ConfigResource(ConfigResourceType.TOPIC, name, None) for name in topics if name in self._counts]
        shortest = math.inf
        for answer in await self._answered(self._admin.describe_configs(asked)):
            for resource in answer.to_object()["resources"]:
                for entry in resource["config_entries"]:
                    if entry["config_names"] == "retention.ms" and (kept := int(entry["config_value"] or -1)) > 0:
                        shortest = min(shortest, kept / 1000)
        return min(shortest, time.time())

    async def _ranges(self, topics: Iterable[str], since_ms: int) -> dict[TopicPartition, Range]:
        """From the first record that is not older up to the present end."""
        places = self._places(topics)
        if not places:
            return {}
        ends = await self._answered(self._consumer.end_offsets(places))
        begins = await self._answered(self._consumer.beginning_offsets(places))
        found = await self._answered(self._consumer.offsets_for_times(dict.fromkeys(places, max(0, since_ms))))
        ranges = {}
        for place in places:
            at = found.get(place)
            start = at.offset if at is not None else ends[place]
            ranges[place] = (max(start, begins[place]), ends[place])
        return ranges

    async def _commits(self, topics: Iterable[str]) -> dict[Key, Snapshot | None]:
        places = self._places(topics)
        group = names.group_id(self._settings.pool)
        stored = await self._answered(self._admin.list_consumer_group_offsets(group, partitions=places))
        begins = await self._answered(self._consumer.beginning_offsets(places))
        ends = await self._answered(self._consumer.end_offsets(places))
        commits: dict[Key, Snapshot | None] = {}
        for place in places:
            told = stored.get(place)
            snapshot = None
            if told is not None and told.offset >= 0:
                snapshot = decode_metadata(Commit(told.offset, told.metadata or ""))
                snapshot = snapshot.within(begins[place], ends[place])
            commits[place.topic, place.partition] = snapshot
        return commits

    async def _begin(self, topic: str, number: int) -> int:
        place = TopicPartition(topic, number)
        return int((await self._answered(self._consumer.beginning_offsets([place])))[place])

    def _places(self, topics: Iterable[str]) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for topic in topics for number in range(self._counts[topic])]

    # Reading

    def _expect(self, *ranges: Mapping[TopicPartition, Range]) -> None:
        self._total += sum(end - start for some in ranges for start, end in some.values())
        self._show(self._done, self._total)

    async def _scan(self, ranges: Mapping[TopicPartition, Range]) -> AsyncIterator[Any]:
        """All records in these ranges; in order within a partition."""
        left = {place: end for place, (start, end) in ranges.items() if start < end}
        if not left:
            return
        consumer = self._consumer
        consumer.assign(list(left))
        for place in left:
            consumer.seek(place, ranges[place][0])
        passed = {place: ranges[place][0] for place in left}
        moved = time.monotonic()
        while left:
            for place, records in (await consumer.getmany(timeout_ms=POLL_MS)).items():
                for record in records:
                    if record.offset < ranges[place][1]:
                        yield record
            for place in list(left):
                # What was compacted away, or removed meanwhile, is passed over too.
                position = min(await self._answered(consumer.position(place)), left[place])
                if position > passed[place]:
                    moved = time.monotonic()
                    self._done += position - passed[place]
                    passed[place] = position
                if position >= left[place]:
                    del left[place]
                    consumer.pause(place)
            self._show(self._done, self._total)
            if time.monotonic() - moved > STALL_S:
                raise self._unreachable()

    async def _partitions(self) -> dict[str, int]:
        topics = await self._answered(self._admin.describe_topics())
        return {topic["topic"]: len(topic["partitions"]) for topic in topics}

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        connection = self._settings.kafka.connection()
        self._consumer = AIOKafkaConsumer(
            **connection,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",  # what a transaction took back is no job, so it cannot be lost
            max_partition_fetch_bytes=4 << 20,
            fetch_max_wait_ms=100,
        )
        self._admin = AIOKafkaAdminClient(**connection, client_id="headrace-reconcile")
        try:
            await self._answered(self._consumer.start())
            await self._answered(self._admin.start())
            yield
        finally:
            await asyncio.gather(
                stop_within(ANSWER_S, self._consumer.stop()), stop_within(ANSWER_S, self._admin.close())
            )

    async def _answered(self, question: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(ANSWER_S):  # wait_for may swallow a cancellation (Python 3.11)
                return await question
        except (TopicAuthorizationFailedError, GroupAuthorizationFailedError):
            raise
        except (KafkaError, OSError, TimeoutError) as error:
            raise self._unreachable() from error

    def _unreachable(self) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"no Kafka broker answers at {self._settings.kafka.bootstrap}{self._settings.kafka.security.hint}"
        )


def _is_own(topic: str, pool: str) -> bool:
    """Whether it is a jobs topic that one tenant has to itself."""
    found = names.parse_jobs_topic(topic)
    return found is not None and found.pool == pool and found.tenant is not None


def _of(ranges: Mapping[TopicPartition, Range], number: int) -> dict[TopicPartition, Range]:
    return {place: span for place, span in ranges.items() if place.partition == number}


def _stated(value: bytes | None) -> tuple[str, str, int]:
    try:
        document = decode(value).document
    except NotJson:
        return "", "", 0
    tenant, job_id, run = document.get("tenant"), document.get("id"), document.get("run")
    return (
        tenant if isinstance(tenant, str) else "",
        job_id if isinstance(job_id, str) else "",
        run if type(run) is int else 0,
    )
