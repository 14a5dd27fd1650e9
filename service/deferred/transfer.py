"""A record on its way to another topic of the service, and what its headers say there (R7, R11-R13). Pure.

Value, key and the record's own headers travel whole. Ours beside them: where it first lay and when, how often it was
started; on `deferred` also when it is due and which job it is, so that it can wait without being read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from schemas.names import H_DUE, H_JOB, H_ORIGIN, H_PUBLISHED, H_STARTS
from service.frames import Head
from service.job import Record

# Of a record's own headers these are ours to write; all others are copied.
OURS = frozenset({H_ORIGIN, H_STARTS, H_PUBLISHED, H_DUE, H_JOB})
# Digits of a time in milliseconds: until the year 33658. More is not ours.
TIME_DIGITS = 15


@dataclass(frozen=True, slots=True)
class Transfer:
    """A record as it is published on another topic, as a rule under the same partition number (R1)."""

    topic: str
    partition: int | None  # None: by its key
    key: bytes | None
    value: bytes | None = field(repr=False)
    headers: tuple[tuple[str, bytes | None], ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        record: Record,
        head: Head | None,
        topic: str,
        *,
        starts: int,
        due: float | None = None,
        partition: int | None = None,
    ) -> Transfer:
        """`head`: what intake made of it; None: a publisher's record that nobody has judged, not for `deferred`.

        `starts`: unclean starts so far. `due`: wall clock, for `deferred`.

        `partition`: another number than the record's, where its former copies may lie (spread).
        """
        headers = [(name, value) for name, value in record.headers if name not in OURS]
        origin = str(record.place) if head is None else head.origin
        headers.append((H_ORIGIN, origin.encode()))
        headers.append((H_PUBLISHED, str(record.timestamp_ms).encode()))
        if starts:
            headers.append((H_STARTS, str(starts).encode()))
        if due is not None and head is not None:
            headers.append((H_DUE, str(round(due * 1000)).encode()))
            headers.append((H_JOB, f"{head.tenant}|{head.job_id}|{head.run}".encode()))
        number = record.place.partition if partition is None else partition
        return cls(topic, number, record.key, record.value, tuple(headers))


@dataclass(frozen=True, slots=True)
class Mark:
    """What a deferred record's headers say."""

    due: float  # wall clock
    tenant: str
    job_id: str
    run: int

    @classmethod
    def of(cls, record: Record) -> Mark | None:
        """None: the headers are not ours, or not whole; the record must be read."""
        said = {name: value for name, value in record.headers if name in OURS and value}
        due = _number(said.get(H_DUE))
        try:
            tenant, job_id, run = said[H_JOB].decode("ascii").split("|")
        except (KeyError, ValueError):
            return None
        number = _number(run.encode())
        return Mark(due / 1000, tenant, job_id, number) if due is not None and number is not None else None


def first_time(record: Record) -> Record:
    """A transferred record with the broker's time of its first place: what cancels and deadlines go by (R13)."""
    for name, value in reversed(record.headers):
        if name == H_PUBLISHED:
            published = _number(value)
            return record if published is None else replace(record, timestamp_ms=published)
    return record


def _number(raw: bytes | None) -> int | None:
    return int(raw) if raw and raw.isdigit() and len(raw) <= TIME_DIGITS else None
