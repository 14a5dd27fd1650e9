"""One job as the record that goes onto the log: value, key and headers, checked against the contract before anything
is sent. Pure.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from pydantic import ValidationError

from client.errors import InvalidJob
from schemas.fields import format_time
from schemas.job import Job
from schemas.keys import job_key
from schemas.names import CHAT, COMPLETIONS, EMBEDDINGS, SCHEMA_VERSION

# Bytes of a job record that a broker takes with its default limits (1 MiB), less room for key, headers and framing.
MAX_RECORD_BYTES = 1_000_000

# What a field takes, where pydantic would answer with a pattern.
PLAINLY = {
    "id": "takes 1 to 128 of A-Z a-z 0-9 . _ : -",
    "tenant": "takes 1 to 64 of A-Z a-z 0-9 _ -",
    "endpoint": f"takes {CHAT}, {COMPLETIONS} or {EMBEDDINGS}",
}

When = datetime | timedelta | float | str


@dataclass(frozen=True, slots=True)
class JobRecord:
    id: str
    tenant: str
    run: int
    key: bytes
    value: bytes


def new_id() -> str:
    return uuid.uuid4().hex


def moment(when: When | None) -> str | None:
    """RFC 3339 for the wire. A number or timedelta counts from now, in seconds; a datetime needs its zone."""
    if when is None or isinstance(when, str):
        return when
    if isinstance(when, int | float) and not isinstance(when, bool):
        when = timedelta(seconds=when)
    if isinstance(when, timedelta):
        when = datetime.now(UTC) + when
    if not isinstance(when, datetime) or when.tzinfo is None:
        raise InvalidJob("deadline and not_before need a time zone: datetime.now(UTC) + …, not a naive datetime")
    return format_time(when)


def build(fields: Mapping[str, Any], spread: int = 1) -> JobRecord:
    """The record of a job given by its contract fields; absent and None are the same. Raises InvalidJob."""
    job = {"schema_version": SCHEMA_VERSION, **{name: value for name, value in fields.items() if value is not None}}
    try:
        Job.model_validate(job)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "job"
        raise InvalidJob(f"{where}: {PLAINLY.get(where) or first['msg'].removeprefix('Value error, ')}") from None
    try:
        value = orjson.dumps(job)
    except TypeError as error:
        raise InvalidJob(f"the job is not JSON: {error}") from None
    return JobRecord(
        id=job["id"],
        tenant=job["tenant"],
        run=job.get("run", 0),
        key=job_key(job["tenant"], spread, job.get("conversation") or job["id"]).encode(),
        value=value,
    )
