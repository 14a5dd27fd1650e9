"""One record on its way through intake, and what can be said of its job. Decides nothing; pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

from schemas import job as wire
from schemas.bodies import BODIES
from schemas.decode import Decoded
from schemas.errors import ErrorCode
from schemas.fields import INT32_MAX
from schemas.names import REPLIES, tier_of
from schemas.tenants import Tenant
from service.credentials.doubt import Doubt
from service.frames import Head
from service.intake.address import Address
from service.intake.headers import Headers
from service.intake.verdict import Undeliverable, Unverified
from service.job import Record, Ticket
from service.telemetry.propagation import extract


@dataclass(slots=True)
class Reading:
    """`tenant`: None if the registry does not know it. `doubt`: its sender is known, and is not who the job says."""

    record: Record
    ticket: Ticket
    received: float
    headers: Headers
    decoded: Decoded
    job_id: str
    tenant_id: str
    tenant: Tenant | None
    address: Address
    doubt: Doubt | None = None


# Of `input` the digest counts: who asks again has stored the same request under another key.
_ASIDE = wire.NOT_CONTENT | {"input"}


def digest_of(document: dict[str, Any], value: bytes) -> str:
    """SHA-256 of the job's content, hex: all fields but `run`, `reply`, `deadline` and `not_before`, of `input` the
    digest alone, keys sorted, so that a repetition is recognised whatever wrote it (R7). A document too deep to be
    written again is refused anyway; it gets the digest of its bytes."""
    content = {key: field for key, field in document.items() if key not in _ASIDE}
    if (reference := document.get("input")) is not None:
        content["input"] = reference.get("sha256") if isinstance(reference, dict) else reference
    try:
        written = orjson.dumps(content, None, orjson.OPT_SORT_KEYS)
    except TypeError:
        written = value
    return sha256(written).hexdigest()


def undeliverable(record: Record, ticket: Ticket, headers: Headers, code: ErrorCode, message: str) -> Undeliverable:
    origin = headers.origin or record.place
    return Undeliverable(record.dead(ticket, origin, code, message, headers.starts), record, ticket)


def unverified(
    record: Record, ticket: Ticket, received: float, decoded: Decoded, job_id: str, tenant_id: str, doubt: Doubt
) -> Unverified:
    """Told on the common reply topic alone, whatever the record asks for, and with nothing of it but whom it names."""
    replies = Address(REPLIES, None)
    head = head_of(Reading(record, ticket, received, Headers(), decoded, job_id, tenant_id, None, replies))
    head.metadata = None
    head.model = head.endpoint = ""
    head.stream = head.progress = False
    dead = record.dead(ticket, record.place, doubt.code, doubt.message)
    return Unverified(head, doubt, record, ticket, received, dead)


def head_of(reading: Reading) -> Head:
    """What can be said of any job that can be answered, valid or not; `shape` adds what only a valid one has."""
    record, document = reading.record, reading.decoded.document
    place = record.place
    origin = reading.headers.origin or place
    reply = document.get("reply")
    reply = reply if isinstance(reply, dict) else {}
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


def shape(head: Head, asked: wire.Job) -> None:
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
