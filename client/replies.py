"""The one connection on which all streams of a client arrive: fixed partitions of one reply topic, no consumer group.

Records are matched to streams by their key (the job id) and handed over in offset order. No rebalance can interrupt a
stream, and an event that nobody here asked for costs one dictionary look-up.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from client.errors import ClientError, Closed, InvalidJob, ResumeExpired, UnknownTopic
from client.stream import Stream
from schemas.cancellation import is_asked_for
from schemas.names import H_TYPE

log = logging.getLogger("headrace.client")

# Records handled without giving way to other tasks of the loop: about 3 ms of work.
BATCH = 500
# Milliseconds one poll waits; only bounds how long `stop` takes when nothing arrives.
POLL_MS = 500
# Bytes per partition in one fetch: a reply partition carries many streams.
FETCH_BYTES = 4 << 20
# Seconds an answer about the partitions' bounds is used for: the question waits behind a fetch on the same connection,
# for up to half a second, and a restarted client resumes hundreds of jobs in a row.
BOUNDS_S = 5.0
CHUNK_HEADER = (H_TYPE, b"chunk")


class Replies:
    """`partitions` are those this client names in its jobs; others are read only while a resumed stream needs them."""

    def __init__(self, consumer: AIOKafkaConsumer, topic: str, count: int, partitions: Sequence[int]) -> None:
        self._consumer = consumer
        self._topic = topic
        self._all = [TopicPartition(topic, number) for number in range(count)]
        self._own = frozenset(partitions)
        self._next: dict[int, int] = {}  # the offset each partition goes on at
        self._sought: set[int] = set()  # partitions whose position was set while a poll was under way
        self._streams: dict[bytes, list[Stream]] = {}
        self._expiring: list[tuple[Stream, int]] = []  # resumed, beginning lost: and the end up to which to look
        self._asking = asyncio.Lock()
        self._asked = float("-inf")  # monotonic seconds
        self._bound: dict[TopicPartition, tuple[int, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def start(self) -> None:
        """Reads from the present end of every partition on."""
        self._consumer.assign(self._all)
        ends = await self._consumer.end_offsets(self._all)
        for place in self._all:
            self._consumer.seek(place, ends[place])
            self._next[place.partition] = ends[place]
            if place.partition not in self._own:
                self._consumer.pause(place)
        self._task = asyncio.create_task(self._read(), name="headrace-replies")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._fail(Closed("the client was closed while the job was running; resume(token) finds it again"))

    def end_of(self, partition: int) -> int:
        """An offset no event of a job that is published from now on can lie before, as far on as is known here."""
        highwater = self._consumer.highwater(TopicPartition(self._topic, partition))
        return max(self._next[partition], highwater or 0)

    def open(self, stream: Stream) -> None:
        """From now on the stream gets its events. Raises Closed, and InvalidJob if a job of this identity with other
        content is open: both would be shown the first one's end, since only one can count.
        """
        if self._failure is not None:
            raise self._failure
        streams = self._streams.setdefault(stream.job_id.encode(), [])
        if any(_conflict(stream, other) for other in streams):
            raise InvalidJob(
                f"id: job {stream.job_id} (run {stream.published_run}) of {stream.tenant} is open in this client with "
                "other content; choose another id, or run + 1"
            )
        streams.append(stream)

    async def reopen(self, stream: Stream) -> None:
        """As `open`, reading its partition again from the stream's offset on. Raises ResumeExpired, ClientError."""
        number = stream.partition
        if not 0 <= number < len(self._all):
            raise ClientError(f"topic {self._topic} has {len(self._all)} partitions, the token names number {number}")
        place = TopicPartition(self._topic, number)
        begins, ends = await self._bounds(place)
        if stream.next_offset < begins:
            if begins == ends:
                raise _expired(stream)
            self._expiring.append((stream, ends))
        idle = number not in self._own and not self._reading(number)
        self.open(stream)
        if idle or stream.next_offset < self._next[number]:
            self._seek(number, max(stream.next_offset, begins))
        self._consumer.resume(place)

    async def _bounds(self, place: TopicPartition) -> tuple[int, int]:
        """Where the partition begins and ends, at most BOUNDS_S seconds ago."""
        async with self._asking:
            if time.monotonic() - self._asked > BOUNDS_S:
                begins = await self._consumer.beginning_offsets(self._all)
                ends = await self._consumer.end_offsets(self._all)
                self._bound = {each: (begins[each], ends[each]) for each in self._all}
                self._asked = time.monotonic()
            return self._bound[place]

    def close(self, stream: Stream) -> None:
        """The stream gets nothing more; unknown ones are ignored."""
        key = stream.job_id.encode()
        streams = self._streams.get(key, [])
        if stream not in streams:
            return
        streams.remove(stream)
        if not streams:
            del self._streams[key]
        if self._expiring:
            self._expiring = [entry for entry in self._expiring if entry[0] is not stream]
        if stream.partition not in self._own and not self._reading(stream.partition):
            self._consumer.pause(TopicPartition(self._topic, stream.partition))

    def _reading(self, number: int) -> bool:
        return any(stream.partition == number for streams in self._streams.values() for stream in streams)

    def _seek(self, number: int, offset: int) -> None:
        self._consumer.seek(TopicPartition(self._topic, number), offset)
        self._next[number] = offset
        self._sought.add(number)

    async def _read(self) -> None:
        try:
            while True:
                self._sought.clear()
                batches = await self._consumer.getmany(timeout_ms=POLL_MS, max_records=BATCH)
                for place, records in batches.items():
                    if place.partition in self._sought:
                        # Read before the seek or after it, nobody can tell: read again from where the seek went.
                        self._consumer.seek(place, self._next[place.partition])
                        continue
                    self._hand_over(records)
                    self._next[place.partition] = records[-1].offset + 1
                if self._expiring:
                    self._expire()
        except asyncio.CancelledError:
            if is_asked_for():
                raise
            self._fail(Closed(f"replies on {self._topic} can no longer be read: the connection went away"))
        except KafkaError as error:
            self._fail(Closed(f"replies on {self._topic} can no longer be read: {type(error).__name__}: {error}"))
        except Exception as error:  # a fault of ours must not leave callers waiting for ever
            log.exception("reading replies failed")
            self._fail(Closed(f"reading replies failed: {type(error).__name__}: {error}"))

    def _hand_over(self, records: Sequence[ConsumerRecord[bytes, bytes]]) -> None:
        for record in records:
            streams = self._streams.get(record.key or b"")
            if not streams or record.value is None:
                continue
            if CHUNK_HEADER in record.headers and not any(stream.wants_chunks for stream in streams):
                continue
            event = parse(record.value)
            if event is None:
                continue
            for stream in tuple(streams):
                if stream.partition == record.partition and stream.feed(event, record.offset):
                    self.close(stream)

    def _expire(self) -> None:
        for stream, end in tuple(self._expiring):
            if stream.seen:
                self._expiring.remove((stream, end))
            elif self._next[stream.partition] >= end:
                stream.fail(_expired(stream))
                self.close(stream)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for streams in self._streams.values():
            for stream in streams:
                stream.fail(error)
        self._streams.clear()
        self._expiring.clear()


def choose(topic: str, wanted: int | Sequence[int], count: int) -> list[int]:
    """Which of a topic's `count` partitions a client takes: so many at random, or those it names. UnknownTopic."""
    if isinstance(wanted, int):
        return sorted(random.sample(range(count), max(1, min(wanted, count))))
    if not wanted or not all(0 <= number < count for number in wanted):
        raise UnknownTopic(f"{topic} has partitions 0 to {count - 1}, not {list(wanted)}")
    return list(wanted)


def parse(value: bytes) -> Mapping[str, Any] | None:
    """An event with the identity every event has; None for anything else."""
    try:
        event = orjson.loads(value)
        well_formed = (
            isinstance(event["run"], int)
            and isinstance(event["type"], str)
            and isinstance(event["tenant"], str)
            and isinstance(event.get("job_id", ""), str)
            and isinstance(event.get("attempt", ""), str)
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    return event if well_formed else None


def _conflict(one: Stream, other: Stream) -> bool:
    same = (one.tenant, one.published_run) == (other.tenant, other.published_run)
    return same and None not in (one.content, other.content) and one.content != other.content


def _expired(stream: Stream) -> ResumeExpired:
    return ResumeExpired(
        f"the reply topic begins after job {stream.job_id} was published and holds no event of it: they passed its "
        "retention, or the job has not begun; `headrace job` looks at its status"
    )
