"""`Client`: publishes jobs and hands out their streams and results. It needs a broker and the contract, nothing else
of the service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import orjson
from aiokafka.errors import KafkaError
from pydantic import ValidationError

from client.connection import REMEDY, Connection
from client.errors import ClientError, Closed, InvalidJob, ResultTimeout, Unreachable
from client.record import (
    MAX_RECORD_BYTES,
    PLAINLY,
    JobRecord,
    When,
    build,
    content_of,
    fault,
    headers_of,
    moment,
    new_id,
    plain,
)
from client.registry import Registry
from client.replies import Replies, choose
from client.result import BlobRef, Result, ResumeToken
from client.signing import Signer
from client.store import Store, StoreAccess
from client.stream import Stream
from client.submitted import Place, Submitted
from client.tracing import Sending
from schemas.fields import format_time
from schemas.keys import partition_of
from schemas.names import (
    CHAT,
    H_AUTHORIZATION,
    REPLIES,
    SCHEMA_VERSION,
    TIERS,
    cancel_topic,
    jobs_topic,
    reply_topic_of,
)
from schemas.records import CancelRecord, cancel_key
from schemas.security import PLAINTEXT, KafkaSecurity


class Client:
    """An async context manager; one per process serves any number of jobs at once over one reading connection.

    bootstrap: `host:port`, several separated by commas.
    tenant, model: used for jobs that name none themselves.
    pool, tier, spread: where jobs go. Left out, as the service's registries say of the model and the tenant, live; if
      those may not be read: `default`, `standard`, 1.
    reply_topic: where this client's events arrive; by default `inference.replies`, with `signer` or `own_topics` the
      tenant's own. reply_partitions: how many of its partitions this client takes (at
      random), or their numbers; one carries hundreds of streams.
    store: access to stored outputs; with it results are downloaded, and bodies too large for a record are
    claim-checked.
    buffer: events a stream keeps for a slow consumer before it becomes result-only.
    connect_timeout_s, publish_timeout_s: bounds, in seconds, on reaching the broker and on an acknowledged publication.
    security: TLS and the login at the broker. signer: signs every job and cancel with the tenant's key.
    own_topics: jobs and cancels go to the tenant's own topics (identity mode `topic`).
    kafka: further arguments for both aiokafka clients.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        tenant: str | None = None,
        model: str | None = None,
        pool: str | None = None,
        tier: str | None = None,
        reply_topic: str | None = None,
        reply_partitions: int | Sequence[int] = 1,
        store: StoreAccess | None = None,
        spread: int | None = None,
        buffer: int = 1024,
        connect_timeout_s: float = 10.0,
        publish_timeout_s: float = 30.0,
        client_id: str = "headrace-client",
        security: KafkaSecurity = PLAINTEXT,
        signer: Signer | None = None,
        own_topics: bool = False,
        kafka: Mapping[str, Any] | None = None,
    ) -> None:
        self._bootstrap = bootstrap
        self._tenant = tenant
        self._model = model
        self._pool = pool
        self._tier = tier
        if (own_topics or signer is not None) and tenant is None:
            raise ValueError("a signer and own_topics are of one tenant: Client(…, tenant=…)")
        own = tenant if own_topics or signer is not None else None
        self._reply_topic = reply_topic or (REPLIES if own is None else reply_topic_of(own))
        self._reply_partitions = reply_partitions
        self._access = store
        self._spread = spread
        self._buffer = buffer
        self._connect_timeout_s = connect_timeout_s
        self._security = security
        self._signer = signer
        self._own_topics = own_topics
        self._connection = Connection(
            bootstrap,
            security,
            {"client_id": client_id, **(kafka or {})},
            connect_timeout_s=connect_timeout_s,
            publish_timeout_s=publish_timeout_s,
        )
        self._partitions: list[int] = []
        self._registry: Registry | None = None
        self._replies: Replies | None = None
        self._store: Store | None = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._connect()
        except TimeoutError:
            await self._disconnect()
            raise Unreachable(
                f"no Kafka broker answers at {self._bootstrap} within {self._connect_timeout_s:g} s"
                f"{self._security.hint}: {REMEDY}"
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

        Raises InvalidJob (nothing was sent; also while a job of this id and run with other content is open here),
        UnknownTopic, PublishFailed, StoreError (a large body), Closed.
        """
        replies, store = self._open()
        if body is not None and not isinstance(body, Mapping):
            raise InvalidJob(
                'body: takes a request body, such as {"messages": [{"role": "user", "content": "…"}]}, '
                f"not {type(body).__name__}"
            )
        tenant = tenant or self._tenant
        if tenant is None:
            raise InvalidJob("tenant: name one, here or in Client(…, tenant=…)")
        tier = tier or self._tier_of(tenant)
        if tier not in TIERS:
            raise InvalidJob(f"tier: {tier!r} is none of {', '.join(TIERS)}")
        id = id if id is not None else new_id()
        if not isinstance(id, str) or not id.isascii():
            raise InvalidJob(f"id: {PLAINLY['id']}")
        if input is not None and not isinstance(input, BlobRef):
            raise InvalidJob(f"input: takes a BlobRef, not {type(input).__name__}")
        more = headers_of(headers, traceparent)
        partition = self._partitions[partition_of(id, len(self._partitions))]
        if body is not None and "model" not in body and self._model is not None:
            body = {**body, "model": self._model}
        fields: dict[str, Any] = {
            "id": id,
            "run": run,
            "tenant": tenant,
            "endpoint": endpoint,
            "body": plain(body),
            "input": None if input is None else input.wire(),
            "reply": {"topic": self._reply_topic, "partition": partition, "stream": stream, "progress": progress},
            "deadline": moment(deadline),
            "not_before": moment(not_before),
            "conversation": conversation,
            "metadata": plain(metadata),
            "output": plain(output),
        }
        record = build(fields, self._spread_of(tenant))
        pool = self._pool_of(body)
        topic = jobs_topic(pool, tier, tenant if self._own_topics else None)
        token = ResumeToken(self._reply_topic, partition, replies.end_of(partition), tenant, id, run)
        waiting = self._stream(token, stream, content_of(fields))
        replies.open(waiting)  # before anything is stored or sent: another job of this id may be on its way
        try:
            if len(record.value) > MAX_RECORD_BYTES:
                record = await self._claim_check(fields, record, store)
            await self._connection.must_exist(topic)
            with Sending(topic, id, record.key.decode(), traceparent) as sending:
                wire = {**sending.headers, **more}
                if self._signer is not None:
                    wire[H_AUTHORIZATION] = self._signer.job(tenant=tenant, job_id=id, pool=pool, value=record.value)
                place = await self._connection.send(topic, record.key, record.value, wire)
                sending.sent(place.partition, place.offset)
        except BaseException:
            replies.close(waiting)
            raise
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
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            raise InvalidJob(
                f'messages: takes a list, such as [{{"role": "user", "content": "…"}}], not {type(messages).__name__}'
            )
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
        token = token if isinstance(token, ResumeToken) else ResumeToken.parse(token)
        if token.topic != self._reply_topic:
            raise ClientError(
                f"the token is of reply topic {token.topic}: resume it with Client(…, reply_topic={token.topic!r})"
            )
        stream = self._stream(token, True)
        try:
            await self._connection.bounded(replies.reopen(stream))
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
        except ValidationError as error:
            raise InvalidJob(fault(error, "cancel")) from None
        topic = cancel_topic(tenant if self._own_topics else None)
        await self._connection.must_exist(topic)
        wish["at"] = format_time(datetime.now(UTC))
        value = orjson.dumps(wish)
        headers = {}
        if self._signer is not None:
            headers[H_AUTHORIZATION] = self._signer.cancel(tenant=tenant, job_id=id, value=value)
        return await self._connection.send(topic, cancel_key(tenant, id), value, headers)

    # -- connection

    async def _connect(self) -> None:
        consumer = await self._connection.open()
        await self._connection.must_exist(self._reply_topic)
        count = await self._connection.partitions(self._reply_topic)
        self._partitions = choose(self._reply_topic, self._reply_partitions, count)
        if None in (self._pool, self._tier, self._spread):
            self._registry = Registry(self._connection)
            await self._registry.open()
        self._replies = Replies(consumer, self._reply_topic, count, self._partitions)
        await self._replies.start()
        self._store = None if self._access is None else Store(self._access)

    # -- what the registries say, where the application says nothing

    def _tier_of(self, tenant: str) -> str:
        entry = self._registry.tenant(tenant) if self._registry is not None else None
        return self._tier or (entry.tier if entry is not None else "standard")

    def _spread_of(self, tenant: str) -> int:
        entry = self._registry.tenant(tenant) if self._registry is not None else None
        return self._spread or (entry.spread_at(time.time()) if entry is not None else 1)

    def _pool_of(self, body: object) -> str:
        """By the body's model; that of a claim-checked one is not known here."""
        model = body.get("model") if isinstance(body, Mapping) else None
        found = self._registry.pool_of(model) if self._registry is not None else None
        return self._pool or found or "default"

    async def _disconnect(self) -> None:
        if self._replies is not None:
            await self._replies.stop()
        if self._registry is not None:
            await self._registry.close()
            self._registry = None
        await self._connection.close()
        if self._store is not None:
            self._store.close()
        self._replies = self._store = None

    def _open(self) -> tuple[Replies, Store | None]:
        if self._replies is None:
            raise Closed("the client is not open: use it as `async with Client(…) as client:`")
        return self._replies, self._store

    async def _claim_check(self, fields: dict[str, Any], record: JobRecord, store: Store | None) -> JobRecord:
        if store is None or fields["body"] is None:
            raise InvalidJob(
                f"the job's record has {len(record.value):,} bytes, over {MAX_RECORD_BYTES:,}: "
                "give the client a store, and it puts large bodies there: Client(…, store=StoreAccess(…))"
            )
        ref = await store.put_input(record.tenant, record.id, record.run, orjson.dumps(fields["body"]))
        return build({**fields, "body": None, "input": ref.wire()}, self._spread_of(record.tenant))

    def _stream(self, token: ResumeToken, streaming: bool, content: bytes | None = None) -> Stream:
        return Stream(
            token.tenant,
            token.id,
            token.run,
            partition=token.partition,
            offset=token.offset,
            limit=self._buffer,
            streaming=streaming,
            content=content,
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
