"""The jobs consumer: one FastStream subscriber over a pool's jobs topics, that only admits (R2), and its pauses.

It owns the client's whole life: joining, pausing, the rebalance listener, the committer, leaving. It never waits in the
handler, never acknowledges by FastStream (`ack()` would commit everything handed out), never sends.

    fetch → Admission.on_receive: register → parse (nothing) → handler: admit → (exception: poison)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import ConsumerRecord, TopicPartition
from faststream import AckPolicy, BaseMiddleware
from faststream.kafka import KafkaBroker, KafkaMessage
from faststream.kafka.message import FAKE_CONSUMER

from consumers import lenient
from consumers.assignor import numbers_assignor
from consumers.offsets import GroupOffsets, is_member
from consumers.ports import Outlet, Reception
from consumers.rebalance import Rebalance
from consumers.security import security_of
from consumers.topic_ids import TopicWatch
from schemas import names
from service.bounded_stop import stop_within
from service.job import Place, Record, Ticket
from service.ledger import Book, Committer, Key
from service.settings import LEASE_MARGIN_S, Settings

log = logging.getLogger(__name__)
# FastStream's own log: a warning at every start, two lines per record at its level; only its errors are news.
client_log = logging.getLogger(f"{__name__}.client")
client_log.setLevel(logging.ERROR)

JOIN_S = 60.0  # the first member of an empty group waits 3 s, a joiner up to the rebalance timeout of 30 s
FETCH_WAIT_MS = 100
# Of records that were fetched the client hands out the next without ever letting others onto the loop: the engine's
# steps and heartbeats get it after so many (2 ms).
RECORDS_A_TURN = 8
REJOIN_POLL_S = 0.2
LEAVE_S = 3.0  # of the client's own stop; measured: 0.01 s with a broker, for ever without one


class JobsConsumer:
    """Joins the pool's group and hands every new record to `reception`. `topics`: left out, the pool's jobs topics."""

    def __init__(
        self,
        settings: Settings,
        book: Book,
        reception: Reception,
        outlet: Outlet,
        *,
        topics: Sequence[str] | None = None,
    ) -> None:
        self.book = book
        self.received = 0  # records, those that were not new included
        self._settings = settings
        self._reception = reception
        self._outlet = outlet
        self._topics = tuple(topics) if topics is not None else names.jobs_topics(settings.pool)
        self._instance = settings.kafka.instance or None  # static member id (R18)
        # Told of the partition numbers that came here, before they are read; `None`: nobody wants to know.
        self.recall: Callable[[frozenset[int]], Awaitable[None]] | None = None
        self.missing: frozenset[str] = frozenset()  # topics to be read that are not there
        self._watch = TopicWatch(lambda: self._joined_admin()._client, lambda: self._topics, self._seen)
        self._closed: set[str] = set()  # why admission is stopped altogether
        self._admin: AIOKafkaAdminClient | None = None
        self._rebalance: Rebalance | None = None
        self._committer: Committer | None = None
        self._broker: KafkaBroker | None = None
        self._subscriber: Any = None
        self._stopping: asyncio.Task[bool] | None = None
        book.on_pressure = self._pressed
        book.positions = self._positions

    # life

    async def start(self, timeout_s: float = JOIN_S) -> None:
        """Joins the group; returns once partitions are assigned (perhaps none). Raises KafkaError, TimeoutError."""
        lenient.install()
        kafka = self._settings.kafka
        self._admin = AIOKafkaAdminClient(**kafka.connection(), request_timeout_ms=kafka.request_timeout_ms)
        offsets = GroupOffsets(names.group_id(self._settings.pool), self._admin, lambda: self.consumer)
        self._committer = Committer(
            self.book,
            offsets,
            self._outlet.lease,
            interval_s=self._settings.ledger.commit_interval_s,
            session_timeout_s=kafka.session_timeout_ms / 1000,
        )
        self._rebalance = Rebalance(
            kafka,
            names.status_topic(self._settings.pool),
            book=self.book,
            committer=self._committer,
            offsets=offsets,
            reception=self._reception,
            outlet=self._outlet,
            consumer=self._joined_consumer,
            apply=self._apply,
            recall=self.recall,
            topic_ids=self._watch.ask,
            former_lease_s=kafka.session_timeout_ms / 1000 - LEASE_MARGIN_S if self._instance else 0.0,
        )
        self._broker = self._build(self._rebalance)
        self._committer.start()
        joining = asyncio.create_task(self._join(self._admin, self._broker), name="join")
        await asyncio.wait({joining}, timeout=timeout_s)
        if joining.done() and not joining.cancelled() and joining.exception() is None:
            self._watch.start()
            return
        joining.cancel()
        await asyncio.wait({joining}, timeout=1.0)
        await self.stop(clean=False)
        if not joining.cancelled() and (error := joining.exception()) is not None:
            raise error
        raise TimeoutError(f"did not join group {names.group_id(self._settings.pool)} within {timeout_s:.0f} s")

    async def stop(self, *, clean: bool, deadline_s: float = 10.0) -> bool:
        """Barrier, last commit, leave the group (R19). Returns within the deadline whatever the broker does.

        `clean`: nothing runs any more that could end uncleanly; writes the clean-stop mark. Call it when the runner has
        drained. True: the last commit is stored. A second call waits for the first.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(clean, deadline_s / 2), name="leave")
        await asyncio.wait({self._stopping}, timeout=deadline_s)
        if not self._stopping.done():
            self._stopping.cancel()
            log.error("the consumer did not stop within %.1f s", deadline_s)
            return False
        return not self._stopping.cancelled() and self._stopping.exception() is None and self._stopping.result()

    async def extend(self, topics: Iterable[str]) -> None:
        """Reads these topics too, from now on (or from the start); one rebalance, in which nothing moves needlessly.

        The client gives up its assignment before it tells anybody, so what is finished is committed first.
        """
        more = set(topics) - set(self._topics)
        self._topics = (*self._topics, *sorted(more))
        if self._rebalance is None or not more:
            return
        while not self.joined and self._stopping is None:  # noqa: ASYNC110 (a rebalance, or a broker that is away)
            await asyncio.sleep(REJOIN_POLL_S)
        if self._stopping is None and (consumer := self.consumer) is not None:
            await self._rebalance.prepare()
            consumer.subscribe(topics=list(self._topics), listener=self._rebalance)

    # admission

    def pause_all(self, reason: str = "admission") -> None:
        """Stops reading until every reason given is taken back by `resume_all`."""
        self._closed.add(reason)
        self._apply(self.assignment)

    def resume_all(self, reason: str = "admission") -> None:
        self._closed.discard(reason)
        self._apply(self.assignment)

    @property
    def paused_for(self) -> frozenset[str]:
        return frozenset(self._closed)

    # health

    @property
    def consumer(self) -> AIOKafkaConsumer | None:
        return self._subscriber.consumer if self._subscriber is not None else None

    @property
    def committer(self) -> Committer:
        """For `flush`, `lease_until` and figures; there from `start` on."""
        if self._committer is None:
            raise RuntimeError("the consumer was not started")
        return self._committer

    @property
    def assignment(self) -> frozenset[Key]:
        """Partitions of the last assignment; whether it holds is `joined`."""
        return self._rebalance.assignment if self._rebalance is not None else frozenset()

    @property
    def rebalances(self) -> int:
        return self._rebalance.count if self._rebalance is not None else 0

    @property
    def joined(self) -> bool:
        """A member of the group, with an assignment, not in the middle of a rebalance, not refused by the group."""
        return (
            self._rebalance is not None
            and self._rebalance.joined
            and is_member(self.consumer)
            and not self.committer.evicted
        )

    @property
    def last_poll(self) -> float:
        """Monotonic time at which the consume loop last asked for records; now, while it is waiting for some."""
        subscription = getattr(self.consumer, "_subscription", None)
        return time.monotonic() - subscription.fetcher_idle_time if subscription is not None else 0.0

    # inside

    def _build(self, listener: Rebalance) -> KafkaBroker:
        kafka = self._settings.kafka

        def admission(msg: Any, /, *, context: Any) -> Admission:
            return Admission(self, msg, context)

        broker = KafkaBroker(
            kafka.bootstrap,
            client_id=self._settings.worker,
            security=security_of(kafka.security),
            consumer_only=True,  # its producer and admin client would stand idle
            allow_auto_create_topics=False,
            request_timeout_ms=kafka.request_timeout_ms,
            graceful_timeout=1.0,  # the handler never waits
            apply_types=False,
            middlewares=(admission,),
            logger=client_log,
            log_level=logging.DEBUG,
        )
        self._subscriber = broker.subscriber(
            *self._topics,
            group_id=names.group_id(self._settings.pool),
            group_instance_id=self._instance,
            auto_offset_reset="earliest",
            isolation_level="read_committed",  # a job of an open or aborted transaction is none
            ack_policy=AckPolicy.MANUAL,
            no_reply=True,
            parser=parse,
            decoder=whole,
            listener=listener,
            partition_assignment_strategy=(numbers_assignor(),),
            session_timeout_ms=kafka.session_timeout_ms,
            heartbeat_interval_ms=kafka.heartbeat_interval_ms,
            rebalance_timeout_ms=kafka.rebalance_timeout_ms,
            max_partition_fetch_bytes=kafka.max_partition_fetch_bytes,
            fetch_max_wait_ms=FETCH_WAIT_MS,
        )

        @self._subscriber
        async def admit(arrival: Any) -> None:
            self._reception.admit(*arrival)

        return broker

    async def _join(self, admin: AIOKafkaAdminClient, broker: KafkaBroker) -> None:
        await admin.start()
        await broker.start()

    async def _stop(self, clean: bool, commit_s: float) -> bool:
        self.pause_all("stopping")
        await self._watch.stop()
        committer, rebalance = self._committer, self._rebalance
        stored = True
        if committer is not None and rebalance is not None:
            await committer.stop()
            await rebalance.halt()
            if self.book.keys:
                await rebalance.barrier()
            stored = await committer.hand_over(clean=clean, deadline_s=min(commit_s, LEAVE_S))
            rebalance.joined = False
        if self._broker is not None:
            await stop_within(LEAVE_S, self._broker.stop())
        if self._admin is not None:
            await stop_within(1.0, self._admin.close())
        return stored

    def _joined_admin(self) -> AIOKafkaAdminClient:
        if self._admin is None:
            raise RuntimeError("the consumer was not started")
        return self._admin

    async def _seen(self, ids: Mapping[str, bytes]) -> None:
        """What topics there are. The client is told where it thinks otherwise: alone it looks every five minutes."""
        self.missing = frozenset(self._topics) - ids.keys()
        consumer, rebalance = self._joined_consumer(), self._rebalance
        if any(bool(consumer.partitions_for_topic(topic)) != (topic in ids) for topic in self._topics):
            consumer._client.force_metadata_update()
        if rebalance is not None:
            await rebalance.seen(ids)

    def _positions(self) -> dict[Key, int]:
        """How far the client has come, beyond what it had no record for. Only while the one who takes records waits for
        one: else a record may have been handed out that is not registered yet."""
        state = getattr(self.consumer, "_subscription", None)
        subscription = state.subscription if state is not None and state._fetch_count else None
        assignment = subscription.assignment if subscription is not None else None
        if assignment is None or not assignment.active:
            return {}
        return {(tp.topic, tp.partition): at.offset for tp, at in assignment.all_consumed_offsets().items()}

    def to_the_end(self, tp: TopicPartition) -> None:
        """Records of other partitions that were fetched come before the next of this one. The client hands out all that
        it has of one first: hundreds of a flood, before one of a neighbour's."""
        fetcher = getattr(self.consumer, "_fetcher", None)
        if fetcher is not None and tp in fetcher._records:
            fetcher._records.move_to_end(tp)

    def _joined_consumer(self) -> AIOKafkaConsumer:
        consumer = self.consumer
        if consumer is None:
            raise RuntimeError("the consumer is gone")
        return consumer

    def _pressed(self, key: Key, paused: bool) -> None:
        self._apply((key,))

    def _apply(self, keys: Iterable[Key]) -> None:
        """Pauses or resumes partitions as the reasons against all and the book have it now; idempotent."""
        consumer = self.consumer
        if consumer is None:
            return
        assigned = consumer.assignment()
        for key in keys:
            tp = TopicPartition(*key)
            if tp not in assigned:
                continue
            if self._closed or not self.book.readable(key):
                consumer.pause(tp)
            else:
                consumer.resume(tp)


class Admission(BaseMiddleware):
    """Registers a record before anything is made of it, and turns what breaks on the way into poison (R2)."""

    __slots__ = ("_jobs", "_record", "_ticket")

    def __init__(self, jobs: JobsConsumer, msg: ConsumerRecord, context: Any) -> None:
        super().__init__(msg, context=context)
        self._jobs = jobs
        self._record: Record | None = None
        self._ticket: Ticket | None = None

    async def on_receive(self) -> None:
        raw: Any = self.msg
        self._jobs.received += 1
        self._jobs.to_the_end(TopicPartition(raw.topic, raw.partition))
        place = Place(raw.topic, raw.partition, raw.offset)
        self._ticket = self._jobs.book.register(place, raw.timestamp)
        if self._ticket is not None:
            self._record = Record(place, raw.key, raw.value, tuple(raw.headers), raw.timestamp)

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        if self._ticket is None:
            return None
        msg.body = (self._record, self._ticket)
        return await call_next(msg)

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        if self._jobs.received % RECORDS_A_TURN == 0:
            await asyncio.sleep(0)  # here no record is in hand that a rebalance could make another's
        if exc_val is None or not isinstance(exc_val, Exception):
            return False
        if self._ticket is None or self._record is None:
            log.warning("a record that is not new could not be parsed: %s", type(exc_val).__name__)
            return True
        log.error("record %s could not be admitted: %s", self._record.place, type(exc_val).__name__, exc_info=exc_val)
        self._jobs._reception.poison(
            self._record, self._ticket, f"the service could not take this record in ({type(exc_val).__name__})"
        )
        return True


async def parse(raw: Any) -> KafkaMessage:
    """FastStream's own parser decodes every header as UTF-8 and drops the record if one is binary or null."""
    return KafkaMessage(
        raw_message=raw,
        body=b"",
        correlation_id="-",
        message_id="-",
        consumer=FAKE_CONSUMER,
    )


async def whole(message: Any) -> Any:
    """No decoding: the body is the (record, ticket) that the middleware put there."""
    return message.body
