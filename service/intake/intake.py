"""The worker's door: every record becomes a job, a refusal that can be answered, or a dead letter. Never anything else.

Order: decode → id and tenant → reply address → schema → tenant known → endpoint → deadline → body → model → limits. So
whoever can be told is told, and no I/O is spent on what cannot be answered. Never queues, never talks to the engine.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Protocol

import orjson
from pydantic import ValidationError

from schemas import job as wire
from schemas.blob import InputRef
from schemas.bodies import BODIES, check_body
from schemas.decode import Decoded, NotJson, decode
from schemas.errors import ErrorCode, Expired, InvalidJob, ModelNotFound, Refusal, Undeliverable
from schemas.fields import ID_PATTERN, INT32_MAX
from schemas.names import EMBEDDINGS, deferred_topic, overflow_topic, tier_of
from schemas.problems import problem
from schemas.tenants import Tenant
from service.frames import Head
from service.intake import verdict
from service.intake.address import Address, resolve
from service.intake.headers import Headers, read_headers
from service.intake.inputs import Inputs, InputStore, too_big
from service.intake.topics import ReplyTopics
from service.intake.verdict import NEAR_S, Early, Lookup, Refused, Verdict
from service.job import Job, Record, Ticket
from service.settings import Settings
from service.telemetry.propagation import extract
from service.topics import JOBS_RETENTION_MS

# Records over so many bytes are read in a thread: a small job takes about 50 µs, one of 1 MiB 5 ms and more.
LARGE = 64 * 1024
# Seconds a deadline may have passed by the worker's clock before the job counts as expired (R14).
TOLERANCE_S = 2.0
# Seconds a jobs topic keeps its records; times beyond half of it are refused.
JOBS_RETENTION_S = JOBS_RETENTION_MS / 1000

_ID = re.compile(ID_PATTERN, re.ASCII)
_JOB_NAMES = (
    frozenset(wire.Job.model_fields) | frozenset(wire.Reply.model_fields) | frozenset(wire.OutputOptions.model_fields)
) | {"bucket", "key", "size", "sha256", "content_type"}


class Registry(Protocol):
    def get(self, tenant: str) -> Tenant | None: ...


@dataclass(slots=True)
class _Reading:
    """One record on its way through."""

    record: Record
    ticket: Ticket
    received: float
    headers: Headers
    decoded: Decoded
    job_id: str
    tenant_id: str
    tenant: Tenant | None
    address: Address


class Intake:
    """Reads records. `models` are the names that the engine serves; without it, the engine's one served name."""

    def __init__(
        self,
        settings: Settings,
        tenants: Registry,
        topics: ReplyTopics,
        store: InputStore,
        *,
        models: Collection[str] | None = None,
        jobs_retention_s: float = JOBS_RETENTION_S,
    ) -> None:
        if settings.identity != "trusted":
            raise ValueError(
                f"identity mode {settings.identity!r} is not available: set HEADRACE_IDENTITY=trusted, "
                "and let only trusted producers write to the jobs topics"
            )
        self.models: Collection[str] = models if models is not None else frozenset({settings.engine.served_name})
        self._tenants = tenants
        self._topics = topics
        self._inputs = Inputs(settings.store, store)
        self._horizon_s = jobs_retention_s / 2
        self._service_topics = frozenset({deferred_topic(settings.pool), overflow_topic(settings.pool)})

    def read(self, record: Record, ticket: Ticket) -> Verdict | Early | Lookup:
        """Sync and fast; a `Lookup` where I/O or much work is needed. Never raises."""
        received = time.time()
        if record.value is not None and len(record.value) > LARGE:

            async def in_thread() -> Verdict | Early:
                found = await asyncio.to_thread(self._read, record, ticket, received)
                return await found.finish() if isinstance(found, Lookup) else found

            return Lookup(record, ticket, in_thread)
        return self._read(record, ticket, received)

    # -- can anybody be told?

    def _read(self, record: Record, ticket: Ticket, received: float) -> Verdict | Early | Lookup:
        headers = read_headers(record, service_topic=record.place.topic in self._service_topics)
        try:
            decoded = decode(record.value)
            document = decoded.document
            job_id = document.get("id")
            if not isinstance(job_id, str) or not _ID.fullmatch(job_id):
                raise NotJson(f"id must be a string that matches {ID_PATTERN}")
            tenant_id = document.get("tenant")
            if tenant_id is None:
                tenant_id = ""
            if not isinstance(tenant_id, str) or (tenant_id and not _ID.fullmatch(tenant_id)):
                raise NotJson("tenant must be the id of a tenant")
            tenant = self._tenants.get(tenant_id) if tenant_id else None
            address = resolve(document.get("reply"), headers, tenant, self._service_topics | {record.place.topic})
        except NotJson as wrong:
            return _undeliverable(record, ticket, headers, ErrorCode.INVALID_JOB, str(wrong))
        except Undeliverable as wrong:
            return _undeliverable(record, ticket, headers, wrong.code, wrong.message)
        reading = _Reading(record, ticket, received, headers, decoded, job_id, tenant_id, tenant, address)
        partitions = self._topics.known(address.topic)
        if partitions is None:
            return Lookup(record, ticket, partial(self._after_look_up, reading))
        return self._judge(reading, partitions)

    async def _after_look_up(self, reading: _Reading) -> Verdict | Early:
        partitions = await self._topics.look_up(reading.address.topic)
        found = self._judge(reading, partitions or 0)
        return await found.finish() if isinstance(found, Lookup) else found

    # -- what is it worth?

    def _judge(self, reading: _Reading, partitions: int) -> Verdict | Early | Lookup:
        topic, partition = reading.address.topic, reading.address.partition
        if partitions == 0 or (partition is not None and partition >= partitions):
            message = (
                f"reply.topic {topic} does not exist; create it, then replay this dead letter"
                if partitions == 0
                else f"reply.partition is {partition}, but the topic {topic} has {partitions} partitions"
            )
            return _undeliverable(
                reading.record, reading.ticket, reading.headers, ErrorCode.REPLY_TOPIC_REFUSED, message
            )
        head = _head(reading)
        try:
            asked = self._validate(reading)
            tenant = reading.tenant
            if tenant is None:
                raise Refusal(
                    ErrorCode.UNKNOWN_TENANT, "the tenant is not in the registry; check its id, or have it added"
                )
            if not tenant.enabled:
                raise Refusal(ErrorCode.NOT_AUTHORIZED, "the tenant is disabled; ask the operator")
            _shape(head, asked)
            if asked.endpoint == EMBEDDINGS:
                raise ModelNotFound(
                    "no pool of this service serves embeddings; use a service that has an embedding pool"
                )
            self._check_times(asked, reading)
            if asked.input is not None:
                self._inputs.check(asked.input, tenant)
                fetch = partial(self._after_fetch, reading, head, asked, asked.input, tenant)
                lookup = Lookup(reading.record, reading.ticket, fetch)
                due = asked.not_before.timestamp() if asked.not_before is not None else 0.0
                return lookup if due <= reading.received + NEAR_S else Early(head, due, reading.headers.starts, lookup)
            return self._admit(reading, head, asked, asked.body, tenant)
        except Refusal as refusal:
            return Refused(head, refusal, reading.record, reading.ticket, reading.received)

    async def _after_fetch(
        self, reading: _Reading, head: Head, asked: wire.Job, ref: InputRef, tenant: Tenant
    ) -> Verdict:
        try:
            timer = asyncio.timeout(None if asked.deadline is None else asked.deadline.timestamp() - time.time())
            try:
                async with timer:
                    body = await self._inputs.fetch(ref)
            except TimeoutError:
                if not timer.expired():
                    raise
                raise Expired("the deadline passed before the input was fetched") from None
            if ref.size > LARGE:
                job = await asyncio.to_thread(self._admit, reading, head, asked, body, tenant)
            else:
                job = self._admit(reading, head, asked, body, tenant)
            job.fetched = ref.size
            return job
        except Refusal as refusal:
            return Refused(head, refusal, reading.record, reading.ticket, reading.received)

    def _validate(self, reading: _Reading) -> wire.Job:
        if reading.decoded.too_big is not None:
            raise InvalidJob(too_big(reading.decoded.too_big))
        document = reading.decoded.document
        if document.get("schema_version") != 1 or document["schema_version"] is True:
            raise InvalidJob("schema_version must be 1, the only one that this service reads")
        endpoint = document.get("endpoint")
        if isinstance(endpoint, str) and endpoint not in BODIES:
            raise InvalidJob(f"endpoint must be one of {', '.join(BODIES)}")
        try:
            return wire.Job.__pydantic_validator__.validate_python(document)
        except ValidationError as error:
            raise InvalidJob(problem(error, "", _JOB_NAMES)) from None

    def _check_times(self, asked: wire.Job, reading: _Reading) -> None:
        published = reading.record.timestamp_ms / 1000 if reading.record.timestamp_ms > 0 else reading.received
        latest = published + self._horizon_s
        for name, moment in (("deadline", asked.deadline), ("not_before", asked.not_before)):
            if moment is not None and moment.timestamp() > latest:
                raise InvalidJob(
                    f"{name} lies more than {self._horizon_s / 3600:g} hours after publication, "
                    "which is half the time that jobs are kept; choose an earlier one"
                )
        if asked.deadline is not None and asked.deadline.timestamp() + TOLERANCE_S < reading.received:
            raise Expired("the deadline had passed before the job could start")

    def _admit(
        self, reading: _Reading, head: Head, asked: wire.Job, body: dict[str, Any] | None, tenant: Tenant
    ) -> Job:
        clean = check_body(asked.endpoint, body, tenant)
        model = clean["model"]
        head.model = model
        if model not in self.models:
            raise ModelNotFound(
                f"body.model is not served here; this pool serves {', '.join(sorted(self.models)[:8]) or 'no model'}"
            )
        if tenant.models is not None and model not in tenant.models:
            raise Refusal(ErrorCode.NOT_AUTHORIZED, "body.model is not allowed for this tenant; ask the operator")
        return Job(
            ticket=reading.ticket,
            record=reading.record,
            head=head,
            body=clean,
            received=reading.received,
            deadline=asked.deadline.timestamp() if asked.deadline is not None else None,
            not_before=asked.not_before.timestamp() if asked.not_before is not None else None,
            conversation=asked.conversation,
            starts=reading.headers.starts,
        )


def digest_of(document: dict[str, Any], value: bytes) -> str:
    """SHA-256 of the job's content, hex: all fields but `run` and `reply` (who asks again may wait elsewhere), keys
    sorted, so that a repetition is recognised whatever wrote it (R7). A document too deep to be written again is
    refused anyway; it gets the digest of its bytes."""
    try:
        content = orjson.dumps(
            {key: field for key, field in document.items() if key not in ("run", "reply")}, None, orjson.OPT_SORT_KEYS
        )
    except TypeError:
        content = value
    return sha256(content).hexdigest()


def _undeliverable(
    record: Record, ticket: Ticket, headers: Headers, code: ErrorCode, message: str
) -> verdict.Undeliverable:
    origin = headers.origin or record.place
    return verdict.Undeliverable(record.dead(ticket, origin, code, message, headers.starts), record, ticket)


def _head(reading: _Reading) -> Head:
    """What can be said of any job that can be answered, valid or not; `_shape` adds what only a valid one has."""
    record, document = reading.record, reading.decoded.document
    place = record.place
    origin = reading.headers.origin or place
    reply = document.get("reply") or {}
    body = document.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    run = document.get("run", 0)
    endpoint = document.get("endpoint")
    return Head(
        topic=place.topic,
        partition=place.partition,
        offset=place.offset,
        epoch=reading.ticket.epoch,
        origin=str(origin),
        job_id=reading.job_id,
        run=run if type(run) is int and 0 <= run <= INT32_MAX else 0,
        tenant=reading.tenant_id,
        tier=tier_of(origin.topic),
        endpoint=endpoint if isinstance(endpoint, str) and endpoint in BODIES else "",
        model=model if isinstance(model, str) and len(model) <= 256 else "",
        reply_topic=reading.address.topic,
        reply_partition=reading.address.partition,
        stream=reply.get("stream", True) is True,
        progress=reply.get("progress") is True,
        inline_max_bytes=wire.INLINE_DEFAULT,
        store="auto",
        ttl_days=None,
        metadata=_metadata(document.get("metadata")),
        digest=digest_of(document, record.value or b""),
        trace=extract(record.headers),
        broker_time=record.timestamp_ms / 1000 if record.timestamp_ms > 0 else reading.received,
    )


def _shape(head: Head, asked: wire.Job) -> None:
    output = asked.output
    if output is not None:
        head.inline_max_bytes = output.inline_max_bytes
        head.store = output.store
        head.ttl_days = output.ttl_days


def _metadata(value: object) -> dict[str, str] | None:
    """The caller's pairs, if they are what the contract allows; a refusal of a job with others goes without."""
    if not isinstance(value, dict) or not value or len(value) > 16:
        return None
    fits = all(isinstance(text, str) and len(text) <= 512 and 0 < len(key) <= 64 for key, text in value.items())
    return value if fits else None
