"""The field types that several records share, and the base classes of all models. No I/O, no business rules."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

# Identifiers of callers: safe in Kafka keys, object keys, file names and logs.
ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
# Tenants: no dot and no bar, so that the reply-topic pattern `<tenant>.*` and the record key `tenant|k` isolate.
TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
# Kafka's own rule for topic names; "." and ".." are excluded by `is_topic`.
TOPIC_PATTERN = r"^[A-Za-z0-9._-]{1,249}$"
SHA256_PATTERN = r"^[0-9a-f]{64}$"

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
INT32_MAX = 2**31 - 1

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII)
_TOPIC = re.compile(TOPIC_PATTERN, re.ASCII)


def parse_time(value: Any) -> datetime:
    """An RFC 3339 time with its zone. Raises ValueError for everything else, naive times and numbers included."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("must have a time zone")
        return value
    if not isinstance(value, str) or not _RFC3339.fullmatch(value):
        raise ValueError("must be an RFC 3339 time with zone, such as 2030-01-31T12:00:00Z")
    try:
        return datetime.fromisoformat(value.upper())
    except ValueError:
        raise ValueError("is not a date and time that exists") from None


def format_time(value: datetime) -> str:
    """RFC 3339 in UTC with microseconds, as orjson writes an aware UTC datetime with OPT_UTC_Z."""
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def at(seconds: float) -> str:
    """Wall-clock seconds as they are written on the wire."""
    return format_time(datetime.fromtimestamp(seconds, UTC))


def is_topic(name: str) -> bool:
    """Whether Kafka accepts this as the name of a topic."""
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..")


Time = Annotated[
    datetime,
    BeforeValidator(parse_time),
    PlainSerializer(format_time, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
JobId = Annotated[str, Field(pattern=ID_PATTERN)]
TenantId = Annotated[str, Field(pattern=TENANT_PATTERN)]
TopicName = Annotated[str, Field(pattern=TOPIC_PATTERN)]
Sha256 = Annotated[str, Field(pattern=SHA256_PATTERN)]
Run = Annotated[int, Field(ge=0, le=INT32_MAX)]
Partition = Annotated[int, Field(ge=0, le=INT32_MAX)]
Offset = Annotated[int, Field(ge=0, le=INT64_MAX)]
Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


def exactly_one(first: str, second: str) -> dict[str, Any]:
    """JSON Schema for two fields of which exactly one is there and not null."""
    given, absent = {"not": {"type": "null"}}, {"type": "null"}
    return {
        "oneOf": [
            {"required": [one], "properties": {one: given, other: absent}}
            for one, other in ((first, second), (second, first))
        ]
    }


class Written(BaseModel):
    """What the service writes: readers ignore fields that they do not know, so that old ones survive new fields."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, hide_input_in_errors=True)


class Asked(BaseModel):
    """What callers and operators write: unknown fields are refused, so that a typo is not silently ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class Place(Written):
    """Where a record lies."""

    topic: TopicName
    partition: Partition
    offset: Offset
