"""The one Kafka producer, its lanes, and what is known of topics. Knows nothing of jobs.

A raw AIOKafkaProducer: acks=all, no idempotence (it hangs instead of failing: research/kafka.md §2.2), no linger of its
own, since lanes fill their batches themselves and first chunks must not wait. Everything is flushed `linger_ms` after
it was put, or at once if it is urgent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import lru_cache

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError
from aiokafka.partitioner import murmur2
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from schemas.names import DEAD_LETTERS, USAGE, status_topic
from service.bounded_stop import stop_within
from service.delivery.lane import Lane, Letter
from service.settings import Settings

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 256 * 1024  # 16 KiB, the default, throttles a busy partition to 11,000 records/s
METADATA_WAIT_S = 5.0  # a topic that is missing for so long has vanished (R16); leaders move in less
FETCH_TIMEOUT_S = 5.0  # one metadata request
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0  # doubling, while the broker is away
LANE_IDLE_S = 300.0  # unused lanes are forgotten, so that tenants' topics do not pile up
STOP_S = 2.0


@lru_cache(maxsize=8192)
def _partition(key: bytes, count: int) -> int:
    """As Java's and aiokafka's default partitioner; 10 µs in pure Python, and tenants repeat."""
    return int(murmur2(key) & 0x7FFFFFFF) % count


class Replies:
    """Raises RuntimeError where aiokafka's C extension is missing.

    `on_topic(topic, found)`: a topic that `lane` did not know, or one that vanished. `on_room(lane)`: see Lane.room.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        may_send: Callable[[], bool],
        on_topic: Callable[[str, bool], None],
        on_room: Callable[[Lane], None],
        on_landed: Callable[[], None],
    ) -> None:
        if "_crecords" not in DefaultRecordBatchBuilder.__module__:
            raise RuntimeError("aiokafka runs without its C extension, 7 times slower: install its wheel")
        self._settings = settings
        self._may_send = may_send
        self._on_topic = on_topic
        self._on_room = on_room
        self._on_landed = on_landed
        self._linger = settings.delivery.linger_ms / 1000
        self._status_topic = status_topic(settings.pool)
        self._service_topics = (self._status_topic, USAGE, DEAD_LETTERS)
        self._producer: AIOKafkaProducer | None = None
        self._counts: dict[str, int] = {}  # partitions of the topics that exist
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._dirty: list[Lane] = []
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._sought: dict[str, float] = {}  # topics that are looked for, since when (monotonic)
        self._down: dict[Lane, float] = {}
        self._care: asyncio.Task[None] | None = None
        self._missed: set[str] = set()  # service topics that are missing, as logged
        self._swept = time.monotonic()
        self._away = False  # the broker
        self.unacknowledged = 0  # bytes queued or in flight
        self.airborne = 0  # gated lanes with a batch in flight
        self.failures = 0  # batches that were not acknowledged

    # Life

    async def start(self) -> None:
        """Connects; tries for ever, since streams can wait."""
        delay, kafka = RETRY_FIRST_S, self._settings.kafka
        while True:
            producer = AIOKafkaProducer(
                **kafka.connection(),
                client_id=f"{self._settings.worker}-delivery",
                acks="all",
                max_batch_size=MAX_BATCH_BYTES,
                linger_ms=0,
                compression_type="lz4",
                request_timeout_ms=kafka.request_timeout_ms,
            )
            try:
                await producer.start()
                break
            except BaseException as error:
                await stop_within(STOP_S, producer.stop())
                if not isinstance(error, KafkaError | OSError):
                    raise
                self._log_away(f"no broker at {kafka.bootstrap}{kafka.security.hint}", error)
            await asyncio.sleep(delay)
            delay = min(delay * 2, RETRY_MOST_S)
        self._producer = producer
        self._log_back()
        for topic in self._service_topics:
            self._seek(topic)
        for lane in list(self._lanes.values()):
            lane.up()

    @property
    def connected(self) -> bool:
        return self._producer is not None and not self._down and all(t in self._counts for t in self._service_topics)

    async def stop(self) -> None:
        """Never hangs: what is not acknowledged by now is given up."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        if self._care is not None:
            self._care.cancel()
        if self._producer is not None:
            await stop_within(STOP_S, self._producer.stop())

    # Records in

    def lane(self, topic: str, partition: int | None, key: bytes) -> Lane | None:
        """The lane of a reply. None: the topic is not known yet, or does not exist; `on_topic` will tell."""
        count = self._counts.get(topic)
        if count is None:
            self._seek(topic)
            return None
        if partition is None:
            partition = _partition(key, count)
        return self._lane(topic, partition, gated=True)

    def knows(self, topic: str, partition: int | None) -> bool:
        """Whether that partition exists, as far as is known."""
        return partition is None or partition < self._counts.get(topic, 0)

    def put(self, lane: Lane, letter: Letter, urgent: bool = False) -> None:
        lane.put(letter)
        self.unacknowledged += letter.size
        if not lane.dirty:
            lane.dirty = True
            self._dirty.append(lane)
        if urgent:
            if self._soon is None:
                self._soon = asyncio.get_running_loop().call_soon(self._flush)
        elif self._timer is None and self._soon is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger, self._flush)

    def put_status(self, letter: Letter, partition: int) -> None:
        self.put(self._lane(self._status_topic, partition, gated=False), letter, urgent=True)

    def put_usage(self, letter: Letter) -> None:
        self._put_service(USAGE, letter, None)

    def put_dead(self, letter: Letter, partition: int) -> None:
        """`partition` counts only for a record without key."""
        self._put_service(DEAD_LETTERS, letter, partition)

    def release_all(self) -> None:
        """The gate opened: what was queued behind it goes out."""
        for lane in list(self._lanes.values()):
            if lane.gated and not lane.idle:
                lane.flush()

    def _put_service(self, topic: str, letter: Letter, partition: int | None) -> None:
        count = self._counts.get(topic, 1)
        number = _partition(letter.key, count) if letter.key is not None else (partition or 0) % count
        self.put(self._lane(topic, number, gated=False), letter, urgent=True)

    def _lane(self, topic: str, partition: int, *, gated: bool) -> Lane:
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = self._lanes[topic, partition] = Lane(self, topic, partition, gated=gated)
            lane.down = self._producer is None
        return lane

    def _flush(self) -> None:
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None
        dirty, self._dirty = self._dirty, []
        for lane in dirty:
            lane.flush()

    # What lanes ask for (Post)

    @property
    def producer(self) -> AIOKafkaProducer:
        assert self._producer is not None
        return self._producer

    def may_send(self, lane: Lane) -> bool:
        return not lane.gated or self._may_send()

    def settled(self, lane: Lane, size: int) -> None:
        self.unacknowledged -= size

    def launched(self, lane: Lane) -> None:
        self.airborne += lane.gated

    def landed(self, lane: Lane) -> None:
        self.airborne -= lane.gated
        self._on_landed()

    def failed(self, lane: Lane, error: BaseException) -> None:
        self.failures += 1
        log.warning("send failed topic=%s partition=%d: %r", lane.topic, lane.partition, error)
        if isinstance(error, TopicAuthorizationFailedError) and lane.gated:
            self._vanish(lane.topic)
            return
        self._down[lane] = time.monotonic()
        self._look_after()

    def roomy(self, lane: Lane) -> None:
        self._on_room(lane)

    # Topics and leaders

    def _seek(self, topic: str) -> None:
        if topic not in self._sought:
            self._sought[topic] = time.monotonic()
            if self._producer is not None:
                self._look_after()

    def _look_after(self) -> None:
        if self._care is None or self._care.done():
            self._care = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Asks the brokers until every topic that is sought is found or given up, and every lane's leader is back."""
        delay = RETRY_FIRST_S
        while self._sought or self._down:
            try:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    cluster = await self.producer.client.fetch_all_metadata()
                    self._log_back()
                    await self._settle_topics(cluster)
                    await self._settle_lanes(cluster)
            except (KafkaError, OSError, TimeoutError) as error:
                self._log_away("no metadata from the brokers", error)
            except Exception:
                log.exception("looking after topics failed")
            if self._sought or self._down:
                await asyncio.sleep(delay)
                delay = min(delay * 2, RETRY_MOST_S)

    async def _settle_topics(self, cluster: object) -> None:
        for topic, since in list(self._sought.items()):
            partitions = cluster.partitions_for_topic(topic)  # type: ignore[attr-defined]
            if partitions:
                await self.producer.partitions_for(topic)  # the producer keeps track of it from now on
                del self._sought[topic]
                self._counts[topic] = len(partitions)
                self._on_topic(topic, True)
            elif topic in self._service_topics:
                if topic not in self._missed:
                    self._missed.add(topic)
                    log.error("service topic is missing, run `headrace topics apply` topic=%s", topic)
            elif time.monotonic() - since >= METADATA_WAIT_S:
                self._vanish(topic)

    async def _settle_lanes(self, cluster: object) -> None:
        if not self._down:
            return
        refreshed = False
        for lane, since in list(self._down.items()):
            if lane not in self._down:  # its topic vanished a moment ago
                continue
            leader = cluster.leader_for_partition(TopicPartition(lane.topic, lane.partition))  # type: ignore[attr-defined]
            if leader is not None and leader != -1:
                if not refreshed:
                    await self.producer.client.force_metadata_update()
                    refreshed = True
                self._down.pop(lane, None)
                lane.up()
            elif (
                not cluster.partitions_for_topic(lane.topic)  # type: ignore[attr-defined]
                and lane.gated
                and time.monotonic() - since >= METADATA_WAIT_S
            ):
                self._vanish(lane.topic)

    def _vanish(self, topic: str) -> None:
        self._sought.pop(topic, None)
        self._counts.pop(topic, None)
        for place, lane in list(self._lanes.items()):
            if place[0] == topic:
                lane.clear()
                self._down.pop(lane, None)
                del self._lanes[place]
        self.producer.client.set_topics([*self._counts])  # or it would be asked for, and logged, for ever
        self._on_topic(topic, False)

    def _log_away(self, what: str, error: BaseException) -> None:
        """Changes only: a broker may be away for hours."""
        if not self._away:
            self._away = True
            log.warning("%s, trying again until it is back: %r", what, error)

    def _log_back(self) -> None:
        if self._away:
            self._away = False
            log.info("the broker is back")

    def sweep(self) -> None:
        """Forgets lanes that nobody used for a while. Called now and then."""
        now = time.monotonic()
        if now - self._swept < LANE_IDLE_S / 4:
            return
        self._swept = now
        for place, lane in list(self._lanes.items()):
            if lane.idle and not lane.users and not lane.dirty and now - lane.used > LANE_IDLE_S:
                del self._lanes[place]
