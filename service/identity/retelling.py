"""A further copy of a job that has ended: what its status record and its terminal event say about it (R7). Pure.

A status record of another identity, or without a terminal, tells nothing: the copy runs. Of the same origin: it is the
same record. With another digest: other content. Else its terminal, checked, becomes the copy's answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

from schemas.events import TERMINAL
from service.frames import Answer, Head
from service.job import Place


class Known(Enum):
    SAME_RECORD = auto()
    OTHER_CONTENT = auto()


@dataclass(frozen=True, slots=True)
class End:
    """How the first copy ended: `kind`, and where its terminal event lies."""

    kind: str
    attempt: str
    terminal: Place
    usage: dict[str, Any] | None
    code: str | None
    output: dict[str, Any] | None


def identity_of(status: dict[str, Any]) -> tuple[str, str, int] | None:
    """The identity that a status record ends; None if it ends none, or tells of a further copy only."""
    try:
        if status["kind"] not in TERMINAL or status.get("repeat") or not status["tenant"]:
            return None
        identity = (status["tenant"], status["job_id"], status["run"])
    except (KeyError, TypeError):
        return None
    return identity if [type(part) for part in identity] == [str, str, int] else None


def read_status(value: bytes | None) -> dict[str, Any] | None:
    """A status record's fields; None for anything else."""
    if not value:
        return None
    try:
        status = orjson.loads(value)
    except ValueError:
        return None
    return status if isinstance(status, dict) else None


def judge(status: dict[str, Any] | None, head: Head) -> Known | End | None:
    """What the status record means for the copy of which `head` is."""
    if status is None or identity_of(status) != (head.tenant, head.job_id, head.run):
        return None
    if status.get("origin") == head.origin:
        return Known.SAME_RECORD
    if status.get("digest") != head.digest:
        return Known.OTHER_CONTENT
    terminal, attempt = status.get("terminal"), status.get("attempt")
    try:
        place = Place(str(terminal["topic"]), int(terminal["partition"]), int(terminal["offset"]))  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        return None
    if not isinstance(attempt, str):
        return None
    return End(status["kind"], attempt, place, status.get("usage"), status.get("code"), status.get("output"))


def retell(event: bytes | None, end: End, head: Head) -> Answer | None:
    """The terminal event as it goes out once more; None if what lies at its place is another record by now."""
    if not event:
        return None
    try:
        told = orjson.loads(event)
        expected = (end.kind, head.tenant, head.job_id, head.run, end.attempt)
        if tuple(told[name] for name in ("type", "tenant", "job_id", "run", "attempt")) != expected:
            return None
        seq = int(told["seq"])
    except (ValueError, KeyError, TypeError):
        return None
    told["duplicate"] = True
    return Answer(
        event=orjson.dumps(told), attempt=end.attempt, seq=seq, usage=end.usage, code=end.code, output=end.output
    )
