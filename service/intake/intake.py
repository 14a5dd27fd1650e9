"""The worker's door: every record becomes a job, a refusal that can be answered, or a dead letter. Never anything else.

Order: sender → decode → id and tenant → theirs? → reply address → schema → tenant known → endpoint → deadline → body →
model → limits. So whoever can be told is told, and no I/O is spent on what cannot be answered. Never queues, never
talks to the engine.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection
from functools import partial
from typing import Any, Protocol

from pydantic import ValidationError

from schemas import job as wire
from schemas.blob import InputRef
from schemas.bodies import BODIES, check_body
from schemas.decode import NotJson, decode
from schemas.errors import ErrorCode, Expired, InvalidJob, ModelNotFound, Refusal, Undeliverable
from schemas.fields import ID_PATTERN
from schemas.names import EMBEDDINGS, deferred_topic, overflow_topic
from schemas.problems import problem
from schemas.tenants import Tenant
from service import credentials
from service.credentials import Credentials, Doubt, Proof
from service.frames import Head
from service.intake.address import resolve
from service.intake.headers import read_headers
from service.intake.inputs import Inputs, InputStore, too_big
from service.intake.reading import Reading, head_of, shape, undeliverable, unverified
from service.intake.topics import ReplyTopics
from service.intake.verdict import NEAR_S, Early, Elsewhere, Lookup, Refused, Verdict
from service.job import Job, Record, Ticket
from service.models import Models
from service.settings import Settings
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


class Intake:
    """Reads records. `models` are the names that the engine serves; without it, the engine's one served name.

    `registry`: what other names mean, and which pool serves them.

    `jobs_retention_s`: how long jobs are kept, as the plan has it; the app sets what the topics really have.
    """

    def __init__(
        self,
        settings: Settings,
        tenants: Registry,
        topics: ReplyTopics,
        store: InputStore,
        *,
        models: Collection[str] | None = None,
        registry: Models | None = None,
        jobs_retention_s: float = JOBS_RETENTION_S,
    ) -> None:
        """Raises ValueError if the identity mode lacks what it needs."""
        self.credentials: Credentials = credentials.build(settings, tenants)
        self.models: Collection[str] = models if models is not None else frozenset({settings.engine.served_name})
        self._registry = registry or Models()
        self._pool = settings.pool
        self._tenants = tenants
        self._topics = topics
        self._inputs = Inputs(settings.store, store)
        self.jobs_retention_s = jobs_retention_s
        self._service_topics = frozenset({deferred_topic(settings.pool), overflow_topic(settings.pool)})

    def read(self, record: Record, ticket: Ticket) -> Verdict | Early | Lookup:
        """Sync and fast; a `Lookup` where I/O or much work is needed. Never raises."""
        received = time.time()
        proof = self.credentials.at_once(record)
        if proof is None or (record.value is not None and len(record.value) > LARGE):
            return Lookup(record, ticket, partial(self._after_proof, record, ticket, received, proof))
        return self._read(record, ticket, received, proof)

    async def _after_proof(
        self, record: Record, ticket: Ticket, received: float, proof: Proof | Doubt | None
    ) -> Verdict | Early:
        if proof is None:
            proof = await self.credentials.later(record)
        if record.value is not None and len(record.value) > LARGE:
            found = await asyncio.to_thread(self._read, record, ticket, received, proof)
        else:
            found = self._read(record, ticket, received, proof)
        return await found.finish() if isinstance(found, Lookup) else found

    # -- whose is it, and can anybody be told?

    def _read(self, record: Record, ticket: Ticket, received: float, proof: Proof | Doubt) -> Verdict | Early | Lookup:
        headers = read_headers(
            record,
            service_topic=record.place.topic in self._service_topics and isinstance(proof, Proof),
            replies=self.credentials.believes_headers,
        )
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
            doubt = proof if isinstance(proof, Doubt) else proof.doubt(tenant_id, job_id)
            if doubt is not None and doubt.sender is None:
                return unverified(record, ticket, received, decoded, job_id, tenant_id, doubt)
            if isinstance(proof, Proof):
                tenant_id = proof.tenant or tenant_id
                if doubt is None:
                    record = self.credentials.marked(record, proof)
            tenant = self._tenants.get(tenant_id) if tenant_id else None
            address = resolve(
                document.get("reply"),
                headers,
                tenant,
                self._service_topics | {record.place.topic},
                own=self.credentials.own_replies,
            )
        except NotJson as wrong:
            return undeliverable(record, ticket, headers, ErrorCode.INVALID_JOB, str(wrong))
        except Undeliverable as wrong:
            return undeliverable(record, ticket, headers, wrong.code, wrong.message)
        reading = Reading(record, ticket, received, headers, decoded, job_id, tenant_id, tenant, address, doubt)
        partitions = self._topics.known(address.topic)
        if partitions is None:
            return Lookup(record, ticket, partial(self._after_look_up, reading))
        return self._judge(reading, partitions)

    async def _after_look_up(self, reading: Reading) -> Verdict | Early:
        partitions = await self._topics.look_up(reading.address.topic)
        found = self._judge(reading, partitions or 0)
        return await found.finish() if isinstance(found, Lookup) else found

    # -- what is it worth?

    def _judge(self, reading: Reading, partitions: int) -> Verdict | Early | Lookup:
        topic, partition = reading.address.topic, reading.address.partition
        if partitions == 0 or (partition is not None and partition >= partitions):
            message = (
                f"reply.topic {topic} does not exist; create it, then replay this dead letter"
                if partitions == 0
                else f"reply.partition is {partition}, but the topic {topic} has {partitions} partitions"
            )
            return undeliverable(
                reading.record, reading.ticket, reading.headers, ErrorCode.REPLY_TOPIC_REFUSED, message
            )
        head = head_of(reading)
        try:
            if reading.doubt is not None:
                raise reading.doubt
            asked = self._validate(reading)
            tenant = reading.tenant
            if tenant is None:
                raise Refusal(
                    ErrorCode.UNKNOWN_TENANT, "the tenant is not in the registry; check its id, or have it added"
                )
            if not tenant.enabled:
                raise Refusal(ErrorCode.NOT_AUTHORIZED, "the tenant is disabled; ask the operator")
            shape(head, asked)
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
        self, reading: Reading, head: Head, asked: wire.Job, ref: InputRef, tenant: Tenant
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
            if isinstance(job, Job):
                job.fetched = ref.size
            return job
        except Refusal as refusal:
            return Refused(head, refusal, reading.record, reading.ticket, reading.received)

    def _validate(self, reading: Reading) -> wire.Job:
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

    def _check_times(self, asked: wire.Job, reading: Reading) -> None:
        published = reading.record.timestamp_ms / 1000 if reading.record.timestamp_ms > 0 else reading.received
        horizon_s = self.jobs_retention_s / 2
        latest = published + horizon_s
        for name, moment in (("deadline", asked.deadline), ("not_before", asked.not_before)):
            if moment is not None and moment.timestamp() > latest:
                raise InvalidJob(
                    f"{name} lies more than {horizon_s / 3600:g} hours after publication, "
                    "which is half the time that jobs are kept; choose an earlier one"
                )
        if asked.deadline is not None and asked.deadline.timestamp() + TOLERANCE_S < reading.received:
            raise Expired("the deadline had passed before the job could start")

    def _admit(
        self, reading: Reading, head: Head, asked: wire.Job, body: dict[str, Any] | None, tenant: Tenant
    ) -> Job | Elsewhere:
        clean = check_body(asked.endpoint, body, tenant)
        name = head.model = clean["model"]
        entry = self._registry.get(name) if name not in self.models else None
        model = entry.alias_of or name if entry is not None else name
        away = entry is not None and entry.pool != self._pool and not reading.headers.hopped
        if model not in self.models and not away:
            raise ModelNotFound(
                f"body.model is not served here; this pool serves {', '.join(sorted(self.models)[:8]) or 'no model'}"
            )
        if tenant.models is not None and not {name, model} & set(tenant.models):
            allowed = ", ".join(tenant.models[:8]) or "none"
            raise Refusal(
                ErrorCode.NOT_AUTHORIZED, f"body.model is not among those of this tenant ({allowed}); ask the operator"
            )
        if away:
            assert entry is not None
            return Elsewhere(head, entry.pool, reading.record, reading.ticket, reading.received, reading.headers.starts)
        head.model = clean["model"] = model
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
