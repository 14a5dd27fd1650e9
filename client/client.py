"""`Client`: publishes jobs and hands out their streams and results. It needs a broker and the contract, nothing else
of the service.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, TopicAuthorizationFailedError

from client.errors import ClientError, Closed, InvalidJob, PublishFailed, ResultTimeout, UnknownTopic, Unreachable
from client.record import MAX_RECORD_BYTES, JobRecord, When, build, moment, new_id, partition_of
from client.replies import FETCH_BYTES, Replies
from client.result import BlobRef, Result, ResumeToken
from client.store import Store, StoreAccess
from client.stream import Stream
from client.submitted import Place, Submitted
from client.tracing import Sending
from schemas.fields import format_time
from schemas.names import CANCEL, CHAT, REPLIES, SCHEMA_VERSION, TIERS, jobs_topic
from schemas.records import CancelRecord, cancel_key

T = TypeVar("T")

# Seconds a stopping connection gets; a broker that is away must not hold up the caller's own shutdown.
STOP_S = 5.0
# Seconds between two tries to reach or to write to a broker that is away.
RETRY_S = 0.5


class Client:
    """An async context manager; one per process serves any number of jobs at once over one reading connection.

    bootstrap: `host:port`, several separated by commas.
    tenant, model, tier: used for jobs that name none themselves.
    reply_topic: where this client's events arrive. reply_partitions: how many of its partitions this client takes (at
      random), or their numbers; one carries hundreds of streams.
    store: access to stored outputs; with it results are downloaded, and bodies too large for a record are
    claim-checked.
    spread: the tenant's `spread` in the registry, if it has one.
    buffer: events a stream keeps for a slow consumer before it becomes result-only.
    connect_timeout_s, publish_timeout_s: bounds, in seconds, on reaching the broker and on an acknowledged publication.
    kafka: further arguments for both aiokafka clients (TLS, SASL).
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        tenant: str | None = None,
        model: str | None = None,
        pool: str = "default",
        tier: str = "standard",
        reply_topic: str = REPLIES,
        reply_partitions: int | Sequence[int] = 1,
        store: StoreAccess | None = None,
        spread: int = 1,
        buffer: int = 1024,
        connect_timeout_s: float = 10.0,
        publish_timeout_s: float = 30.0,
        client_id: str = "headrace-client",
        kafka: Mapping[str, Any] | None = None,
    ) -> None:
        self._bootstrap = bootstrap
        self._tenant = tenant
        self._model = model
        self._pool = pool
        self._tier = tier
        self._reply_topic = reply_topic
        self._reply_partitions = reply_partitions
        self._access = store
        self._spread = spread
        self._buffer = buffer
        self._connect_timeout_s = connect_timeout_s
        self._publish_timeout_s = publish_timeout_s
        self._kafka = {"client_id": client_id, **(kafka or {})}
        self._topics: set[str] = set()  # known to exist
        self._partitions: list[int] = []
        self._producer: AIOKafkaProducer | None = None
        self._consumer: AIOKafkaConsumer | None = None
        self._replies: Replies | None = None
        self._store: Store | None = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._connect()
        except TimeoutError:
            await self._disconnect()
            raise Unreachable(
                f"no Kafka broker answers at {self._bootstrap} within {self._connect_timeout_s:g} s: is it up, "
                "is the address right?"
            ) from None
        except KafkaError as error:
            await self._disconnect()
            raise Unreachable(
                f"the Kafka broker at {self._bootstrap} refused: {type(error).__name__}: {error}"
            ) from error
        except BaseException:
            await self._disconnect()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._disconnect()

    async def publish(
        self,
        body: Mapping[str, Any] | None = None,
        *,
        endpoint: str = CHAT,
        input: BlobRef | None = None,
        id: str | None = None,
        run: int = 0,
        tenant: str | None = None,
        tier: str | None = None,
        stream: bool = True,
        progress: bool = False,
        deadline: When | None = None,
        not_before: When | None = None,
        conversation: str | None = None,
        metadata: Mapping[str, str] | None = None,
        output: Mapping[str, Any] | None = None,
        traceparent: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Submitted:
        """Publishes one job and returns once the broker has acknowledged it.

        `body` is the OpenAI request body for `endpoint`, or `input` a reference to one in the store. With an `id` of
        the caller's own, publishing the same job again, after an error too, does not run it twice; `run` + 1 does.
        `deadline` and `not_before`: seconds or a timedelta from now, a datetime with zone, or RFC 3339 text.
        `output`: the contract's `inline_max_bytes`, `store`, `ttl_days`. `traceparent`: the parent, if it is not the
        current span.

        Raises InvalidJob (nothing was sent), UnknownTopic, PublishFailed, StoreError (a large body), Closed.
        """
        replies, store = self._open()
        tier = tier or self._tier
        if tier not in TIERS:
            raise InvalidJob(f"tier: {tier!r} is none of {', '.join(TIERS)}")
        tenant = tenant or self._tenant
        if tenant is None:
            raise InvalidJob("tenant: name one, here or in Client(…, tenant=…)")
        id = id if id is not None else new_id()
        if not isinstance(id, str):
            raise InvalidJob(f"id: must be text, not {type(id).__name__}")
        partition = self._partitions[partition_of(id, len(self._partitions))]
        if body is not None and "model" not in body and self._model is not None:
            body = {**body, "model": self._model}
        fields: dict[str, Any] = {
            "id": id,
            "run": run,
            "tenant": tenant,
            "endpoint": endpoint,
            "body": _plain(body),
            "input": None if input is None else input.wire(),
            "reply": {"topic": self._reply_topic, "partition": partition, "stream": stream, "progress": progress},
            "deadline": moment(deadline),
            "not_before": moment(not_before),
            "conversation": conversation,
            "metadata": _plain(metadata),
            "output": _plain(output),
        }
        record = build(fields, self._spread)
        if len(record.value) > MAX_RECORD_BYTES:
            record = await self._claim_check(fields, record, store)
        topic = jobs_topic(self._pool, tier)
        await self._must_exist(topic)

        token = ResumeToken(self._reply_topic, partition, replies.end_of(partition), tenant, id, run)
        waiting = self._stream(token, stream)
        replies.open(waiting)
        sending = Sending(topic, id, record.key.decode(), traceparent)
        try:
            place = await self._send(topic, record.key, record.value, {**sending.headers, **(headers or {})})
        except BaseException as error:
            replies.close(waiting)
            sending.failed(error)
            raise
        sending.sent(place.partition, place.offset)
        return self._submitted(waiting, token, place, sending.trace_id)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        timeout_s: float | None = None,
        id: str | None = None,
        tenant: str | None = None,
        tier: str | None = None,
        deadline: When | None = None,
        **params: Any,
    ) -> Result:
        """One chat completion, awaited; `params` are the body's other fields (`model`, `max_tokens`, `temperature` …).

        Raises what `publish` and `Submitted.result` raise. After ResultTimeout the job is cancelled: nobody has its id.
        """
        body = {"messages": list(messages), **params}
        job = await self.publish(body, endpoint=CHAT, id=id, tenant=tenant, tier=tier, deadline=deadline, stream=False)
        try:
            return await job.result(timeout_s)
        except ResultTimeout:
            if id is None:
                await job.cancel()
            raise
        finally:
            job.close()

    async def resume(self, token: ResumeToken | str) -> Submitted:
        """A job published earlier, by this process or another one, read again from its beginning.

        Raises ResumeExpired (now, or from the result) when the reply topic no longer holds it; ClientError for a token
        of another reply topic.
        """
        replies, _ = self._open()
        token = ResumeToken.parse(token) if isinstance(token, str) else token
        if token.topic != self._reply_topic:
            raise ClientError(
                f"the token is of reply topic {token.topic}: resume it with Client(…, reply_topic={token.topic!r})"
            )
        stream = self._stream(token, True)
        try:
            await self._bounded(replies.reopen(stream))
        except BaseException:
            replies.close(stream)
            raise
        return self._submitted(stream, token, None, None)

    async def cancel(
        self, id: str, tenant: str | None = None, run: int | None = None, reason: str | None = None
    ) -> Place:
        """Asks the service to stop a job, queued or running; all runs published so far unless `run` names one.

        Returns once the wish is acknowledged by the broker, with its place; the job's terminal event tells what came of
        it. Raises InvalidJob, UnknownTopic, PublishFailed, Closed.
        """
        return await self._wish(id, tenant, run, reason)

    async def cancel_all(self, tenant: str | None = None, reason: str | None = None) -> Place:
        """As `cancel`, for all jobs of the tenant that were published so far."""
        return await self._wish(None, tenant, None, reason)

    async def _wish(self, id: str | None, tenant: str | None, run: int | None, reason: str | None) -> Place:
        self._open()
        tenant = tenant or self._tenant
        if tenant is None:
            raise InvalidJob("tenant: name one, here or in Client(…, tenant=…)")
        wish = {"schema_version": SCHEMA_VERSION, "tenant": tenant, "job_id": id, "run": run, "reason": reason}
        wish = {name: value for name, value in wish.items() if value is not None}
        try:
            CancelRecord.model_validate(wish)
        except ValueError as error:
            raise InvalidJob(f"not a cancel: {str(error).splitlines()[-1].strip()}") from None
        await self._must_exist(CANCEL)
        wish["at"] = format_time(datetime.now(UTC))
        return await self._send(CANCEL, cancel_key(tenant, id), orjson.dumps(wish), {})

    # -- connection

    async def _connect(self) -> None:
        while True:  # a broker that is just starting refuses connections for a moment
            producer = AIOKafkaProducer(
                bootstrap_servers=self._bootstrap,
                acks="all",
                compression_type="lz4",
                max_request_size=MAX_RECORD_BYTES + 48_576,
                request_timeout_ms=15_000,
                **self._kafka,
            )
            try:
                await producer.start()
                break
            except KafkaError:
                await _stop(producer)
                await asyncio.sleep(RETRY_S)
            except BaseException:
                await _stop(producer)
                raise
        self._producer = producer
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            enable_auto_commit=False,
            auto_offset_reset="earliest",  # only when retention overtakes a reader: what is left is read
            max_partition_fetch_bytes=FETCH_BYTES,
            **self._kafka,
        )
        await self._consumer.start()
        await self._must_exist(self._reply_topic)
        count = len(await producer.partitions_for(self._reply_topic))
        self._partitions = self._choose(count)
        self._replies = Replies(self._consumer, self._reply_topic, count, self._partitions)
        await self._replies.start()
        self._store = None if self._access is None else Store(self._access)

    def _choose(self, count: int) -> list[int]:
        wanted = self._reply_partitions
        if isinstance(wanted, int):
            return sorted(random.sample(range(count), max(1, min(wanted, count))))
        if not wanted or not all(0 <= number < count for number in wanted):
            raise UnknownTopic(f"{self._reply_topic} has partitions 0 to {count - 1}, not {list(wanted)}")
        return list(wanted)

    async def _disconnect(self) -> None:
        if self._replies is not None:
            await self._replies.stop()
        for connection in (self._producer, self._consumer):
            if connection is not None:
                await _stop(connection)
        if self._store is not None:
            self._store.close()
        self._producer = self._consumer = self._replies = self._store = None

    def _open(self) -> tuple[Replies, Store | None]:
        if self._replies is None:
            raise Closed("the client is not open: use it as `async with Client(…) as client:`")
        return self._replies, self._store

    async def _bounded(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._connect_timeout_s):  # wait_for may swallow a cancellation (Python 3.11)
                return await work
        except TimeoutError:
            raise Unreachable(
                f"no Kafka broker answers at {self._bootstrap} within {self._connect_timeout_s:g} s"
            ) from None

    async def _must_exist(self, topic: str) -> None:
        """Asked once a topic: a send to a missing one would only fail after the request timeout, without saying why."""
        if topic not in self._topics and self._consumer is not None:
            self._topics = await self._bounded(self._consumer.topics())
            if topic not in self._topics:
                raise UnknownTopic(
                    f"there is no topic {topic} at {self._bootstrap}: run `headrace topics apply`, or check the name"
                )

    # -- sending

    async def _send(self, topic: str, key: bytes, value: bytes, headers: Mapping[str, str]) -> Place:
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

    async def _claim_check(self, fields: dict[str, Any], record: JobRecord, store: Store | None) -> JobRecord:
        if store is None or fields["body"] is None:
            raise InvalidJob(
                f"the job's record has {len(record.value):,} bytes, over {MAX_RECORD_BYTES:,}: "
                "give the client a store, and it puts large bodies there: Client(…, store=StoreAccess(…))"
            )
        ref = await store.put_input(record.tenant, record.id, record.run, orjson.dumps(fields["body"]))
        return build({**fields, "body": None, "input": ref.wire()}, self._spread)

    def _stream(self, token: ResumeToken, streaming: bool) -> Stream:
        return Stream(
            token.tenant,
            token.id,
            token.run,
            partition=token.partition,
            offset=token.offset,
            limit=self._buffer,
            streaming=streaming,
        )

    def _submitted(self, stream: Stream, token: ResumeToken, place: Place | None, trace_id: str | None) -> Submitted:
        assert self._replies is not None
        return Submitted(
            stream,
            token,
            close=self._replies.close,
            cancel=self.cancel,
            fetch=None if self._store is None else self._store.fetch,
            place=place,
            trace_id=trace_id,
        )


def _plain(fields: Mapping[str, Any] | None) -> Any:
    """A mapping as JSON knows it; anything else stays for the contract to refuse."""
    return dict(fields) if isinstance(fields, Mapping) else fields


async def _stop(connection: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    """In a task of its own and bounded: with the broker away a stop can hang, or raise CancelledError."""
    task = asyncio.create_task(connection.stop())
    done, _ = await asyncio.wait((task,), timeout=STOP_S)
    if done and not task.cancelled():
        task.exception()  # a failed stop has nothing left to tell
