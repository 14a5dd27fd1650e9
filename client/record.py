"""One job as the record that goes onto the log: value, key and headers, checked against the contract before anything
is sent. Pure.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from math import isfinite
from typing import Any

import orjson
from pydantic import ValidationError

from client.errors import InvalidJob
from schemas.fields import format_time
from schemas.job import NOT_CONTENT, Job
from schemas.keys import job_key
from schemas.names import CHAT, COMPLETIONS, EMBEDDINGS, SCHEMA_VERSION

# Bytes of a job record that a broker takes with its default limits (1 MiB), less room for key, headers and framing.
MAX_RECORD_BYTES = 1_000_000

# What a field takes, where pydantic would answer with a pattern.
PLAINLY = {
    "id": (ID := "takes 1 to 128 of A-Z a-z 0-9 . _ : -"),
    "job_id": ID,
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
    try:
        if isinstance(when, int | float) and not isinstance(when, bool):
            when = timedelta(seconds=when)
        if isinstance(when, timedelta):
            when = datetime.now(UTC) + when
        if isinstance(when, datetime) and when.tzinfo is not None:
            return format_time(when)
    except (ValueError, OverflowError):  # not a number, or beyond the calendar
        raise InvalidJob(f"deadline and not_before: {when!r} is no time that can be waited for") from None
    raise InvalidJob("deadline and not_before need a time zone: datetime.now(UTC) + …, not a naive datetime")


def build(fields: Mapping[str, Any], spread: int = 1) -> JobRecord:
    """The record of a job given by its contract fields; absent and None are the same. Raises InvalidJob."""
    job = {"schema_version": SCHEMA_VERSION, **{name: value for name, value in fields.items() if value is not None}}
    try:
        Job.model_validate(job)
    except ValidationError as error:
        raise InvalidJob(fault(error, "job")) from None
    try:
        value = orjson.dumps(job)
    except TypeError as error:
        raise InvalidJob(f"the job is not JSON: {error}") from None
    if b"null" in value and (where := _not_finite(job, "")):  # which orjson writes as null, without a word
        raise InvalidJob(f"{where}: NaN and Infinity are not JSON")
    return JobRecord(
        id=job["id"],
        tenant=job["tenant"],
        run=job.get("run", 0),
        key=job_key(job["tenant"], spread, job.get("conversation") or job["id"]).encode(),
        value=value,
    )


def fault(error: ValidationError, whole: str) -> str:
    """The first fault in one line; `whole` is what has it, if no single field does."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    return f"{where}: {PLAINLY.get(where) or first['msg'].removeprefix('Value error, ')}"


def plain(fields: Mapping[str, Any] | None) -> Any:
    """A mapping as JSON knows it; anything else stays for the contract to refuse."""
    return dict(fields) if isinstance(fields, Mapping) else fields


def headers_of(headers: Mapping[str, str] | None, traceparent: str | None) -> dict[str, str]:
    """The caller's, which must be text that can be written. Raises InvalidJob."""
    try:
        for name, text in {**(headers or {}), "traceparent": traceparent or ""}.items():
            name.encode(), text.encode()
    except (TypeError, AttributeError, UnicodeEncodeError):
        raise InvalidJob("headers and traceparent: take text, of characters that UTF-8 has") from None
    return dict(headers or {})


def content_of(fields: Mapping[str, Any]) -> bytes:
    """What tells jobs of one identity apart: a digest of all that `build` took but run and reply, as the service has
    it (R7), and the times, which differ each time that they are counted from now.
    """
    content = {name: value for name, value in fields.items() if name not in NOT_CONTENT}
    return sha256(orjson.dumps(content, None, orjson.OPT_SORT_KEYS)).digest()


def _not_finite(value: Any, path: str) -> str | None:
    """Where a number lies that JSON has not."""
    match value:
        case float():
            return None if isfinite(value) else path
        case dict():
            within = ((f"{path}.{name}" if path else name, inner) for name, inner in value.items())
        case list() | tuple():
            within = ((f"{path}[{place}]", inner) for place, inner in enumerate(value))
        case _:
            return None
    return next((found for inner_path, inner in within if (found := _not_finite(inner, inner_path))), None)
