"""The client's two connections to Kafka: made, checked and closed; records go out here until they are acknowledged.

Knows topics and bytes, nothing of jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.conn import collect_hosts
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, TopicAuthorizationFailedError

from client.errors import Closed, InvalidJob, PublishFailed, UnknownTopic, Unreachable
from client.record import MAX_RECORD_BYTES
from client.replies import FETCH_BYTES
from client.submitted import Place
from schemas.security import KafkaSecurity, SecurityError

T = TypeVar("T")

# Seconds a stopping connection gets; a broker that is away must not hold up the caller's own shutdown.
STOP_S = 5.0
# Seconds between two tries to reach or to write to a broker that is away.
RETRY_S = 0.5
# What to do about a broker that does not answer.
REMEDY = "start it, or give its address (of a local stack: `headrace up` starts it, `headrace status` prints it)"


class Connection:
    """`kafka`: further arguments for both clients. Times in seconds."""

    def __init__(
        self,
        bootstrap: str,
        security: KafkaSecurity,
        kafka: Mapping[str, Any],
        *,
        connect_timeout_s: float,
        publish_timeout_s: float,
    ) -> None:
        self.bootstrap = bootstrap
        self._security = security
        self._kafka = kafka
        self._connect_timeout_s = connect_timeout_s
        self._publish_timeout_s = publish_timeout_s
        self._arguments: dict[str, Any] = {}  # of every client of the broker
        self._topics: set[str] = set()  # known to exist
        self._producer: AIOKafkaProducer | None = None
        self._consumer: AIOKafkaConsumer | None = None

    # life

    async def open(self) -> AIOKafkaConsumer:
        """The reading side, not assigned yet. Tries until it is cancelled. Raises Unreachable, KafkaError."""
        if fault := address_fault(self.bootstrap):
            raise Unreachable(fault)
        try:
            secured = self._arguments = {**self._security.arguments(), **self._kafka}
        except SecurityError as error:
            raise Unreachable(str(error)) from None
        while True:  # a broker that is just starting refuses connections for a moment
            producer = AIOKafkaProducer(
                bootstrap_servers=self.bootstrap,
                acks="all",
                compression_type="lz4",
                max_request_size=MAX_RECORD_BYTES + 48_576,
                request_timeout_ms=15_000,
                **secured,
            )
            try:
                await producer.start()
                break
            except KafkaError:
                await stop(producer)
                await asyncio.sleep(RETRY_S)
            except BaseException:
                await stop(producer)
                raise
        self._producer = producer
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset="earliest",  # only when retention overtakes a reader: what is left is read
            max_partition_fetch_bytes=FETCH_BYTES,
            **secured,
        )
        await self._consumer.start()
        return self._consumer

    def reader(self, **more: Any) -> AIOKafkaConsumer:
        """A further reading side, the caller's to start and stop."""
        return AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            **{**self._arguments, **more},
        )

    async def close(self) -> None:
        for connection in (self._producer, self._consumer):
            if connection is not None:
                await stop(connection)
        self._producer = self._consumer = None

    async def bounded(self, work: Awaitable[T]) -> T:
        """Raises Unreachable after the connect timeout."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):  # wait_for may swallow a cancellation (Python 3.11)
                return await work
        except TimeoutError:
            raise Unreachable(
                f"no Kafka broker answers at {self.bootstrap} within {self._connect_timeout_s:g} s: {REMEDY}"
            ) from None

    # topics

    async def must_exist(self, topic: str) -> None:
        """Asked once a topic: a send to a missing one would only fail after the request timeout, without saying why."""
        if topic not in self._topics and self._consumer is not None:
            self._topics = await self.bounded(self._consumer.topics())
            if topic not in self._topics:
                raise UnknownTopic(
                    f"there is no topic {topic} at {self.bootstrap}{self._rights}: run `headrace topics apply`, "
                    "or check the name"
                )

    @property
    def _rights(self) -> str:
        """Brokers with access lists show nobody what it may not see."""
        return " (or this user may not see it)" if self._security.sasl or self._security.cert_file else ""

    async def partitions(self, topic: str) -> int:
        if self._producer is None:
            raise Closed("the client was closed")
        return len(await self._producer.partitions_for(topic))

    # sending

    async def send(self, topic: str, key: bytes, value: bytes, headers: Mapping[str, str]) -> Place:
        """Until acknowledged. A failed send may have been written all the same, so the same bytes are sent again: the
        service recognises a job's copy by its identity, and a cancel hits nothing twice."""
        deadline = time.monotonic() + self._publish_timeout_s
        wire = [(name, text.encode()) for name, text in headers.items()]
        while True:
            producer = self._producer
            if producer is None:
                raise Closed("the client was closed")
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                    written = await producer.send_and_wait(topic, value, key=key, headers=wire)
                return Place(written.topic, written.partition, written.offset)
            except MessageSizeTooLargeError as error:
                raise InvalidJob(f"the job's record is too large for {topic}: {error}") from error
            except TopicAuthorizationFailedError as error:
                raise PublishFailed(f"not allowed to write to {topic}") from error
            except (KafkaError, TimeoutError) as error:
                if time.monotonic() + RETRY_S >= deadline:
                    raise PublishFailed(
                        f"{topic} did not acknowledge within {self._publish_timeout_s:g} s ({type(error).__name__}): "
                        "the record may have been written; publishing it again with the same id is safe"
                    ) from error
                await asyncio.sleep(RETRY_S)


def address_fault(bootstrap: str) -> str | None:
    """What to say where the client library can make no hosts and ports of it."""
    try:
        good = all(host.encode("idna") and 0 < port < 65_536 for host, port, _ in collect_hosts(bootstrap))
    except (TypeError, ValueError, AttributeError):
        good = False
    return None if good else f"{bootstrap!r} is no address of a broker: write host:port, several with commas"


async def stop(connection: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    """In a task of its own and bounded: with the broker away a stop can hang, or raise CancelledError."""
    task = asyncio.create_task(connection.stop())
    done, _ = await asyncio.wait((task,), timeout=STOP_S)
    if done and not task.cancelled():
        task.exception()  # a failed stop has nothing left to tell
